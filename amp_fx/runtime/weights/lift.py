"""A graph without gradients is split in two: what it computes from its weights alone, and the rest.

Before::

    w_bf16 = torch.ops.aten.to.dtype(w, torch.bfloat16)                         # w: f32, an input
    linear = torch.ops.aten.linear.default(x_bf16, w_bf16)

After, a graph of its own, and the rest::

    def prepare(w):
        return (torch.ops.aten.to.dtype(w, torch.bfloat16),)

    def run(x_bf16, w_bfloat16):
        return torch.ops.aten.linear.default(x_bf16, w_bfloat16)

How long the results of ``prepare`` live is not decided here: :mod:`amp_fx.runtime.weights.cache` keeps them across
calls, an exported program stores them. Patterns on the way (norms folded, products joined, weights packed) are in
``patterns.py``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx._torch import FakeTensor, Packing, autocast_disabled, is_wrapper
from amp_fx.graphs.calls import add_input, args_of, graph_inputs_of, is_cast, is_parameter, is_returned
from amp_fx.graphs.keys import KEPT_META
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.values import is_pure, is_view, numel, storage_of, tensors, writers_in

#: of all elements of a graph's weights, those that may be added by what is computed from them: embeddings that are
#: expanded to a batch are others for each batch size
_EXPANDED = 1 / 32
#: behind the name of a weight: what is left of a norm that was folded into it, where a program is stored
SHIFT = "_folded"
#: a value that is computed from weights alone, and how oneDNN packs it, or None
Result = tuple[fx.Node, Packing | None]


def is_plain(node: fx.Node) -> bool:
    """True for tensors of known sizes, not for their subclasses and not for sizes."""
    value = node.meta.get("val")
    if is_wrapper(node.meta.get("example_value")):
        # a plain tensor stands for a DTensor
        return False
    return type(value) is FakeTensor and not any(isinstance(size, torch.SymInt) for size in value.shape)


def weight_inputs(gm: fx.GraphModule) -> frozenset[str]:
    """Names of the inputs whose copies can be kept across calls: parameters that are plain tensors."""
    return frozenset(
        node.name for node in gm.graph.find_nodes(op="placeholder") if is_parameter(node) and is_plain(node)
    )


def kept_copies(graph: fx.Graph) -> list[fx.Node]:
    """The copies of weights that :class:`amp_fx.passes.MarkCopies` has marked."""
    return [node for node in graph.nodes if KEPT_META in node.meta]


def steps_to(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """The calls that compute some values, without inputs, in the order of the graph."""
    found, stack = set[fx.Node](), list(nodes)
    while stack:
        if (node := stack.pop()) not in found and node.op != "placeholder":
            found.add(node)
            stack += node.all_input_nodes
    return sorted(found)


class Part:
    """A graph from some weights to results that follow from them alone. Parts that compute the same are equal.

    Attributes:
        graph: takes the weights, gives a tuple of tensors.
        form: what its results are where they are the copy of one weight: a dtype that the weight is cast to, or
            :class:`amp_fx.precision.policy.forms.ScaledRows`; else None.
    """

    def __init__(
        self, gm: fx.GraphModule, weights: Sequence[fx.Node], results: Sequence[Result], form: object = None
    ) -> None:
        graph, attributes, fixed = fx.Graph(), dict[str, Any](), list[object]()
        made = {weight: graph.placeholder(f"w{at}") for at, weight in enumerate(weights)}
        for node in steps_to(node for node, _ in results):
            if node.op == "get_attr":
                value = operator.attrgetter(str(node.target))(gm)
                name = f"c{len(attributes)}"
                attributes[name] = value
                fixed.append(f"{value.dtype} {value.tolist()}" if value.numel() == 1 else id(value))
                made[node] = graph.get_attr(name)
            else:
                made[node] = graph.node_copy(node, made.__getitem__)
                made[node].meta.clear()
        outputs = list[fx.Node]()
        for node, how in results:
            if how is None:
                outputs.append(made[node])
                continue
            name = f"pack{len(attributes)}"
            attributes[name] = _Pack(how)
            fixed.append(how)
            outputs.append(graph.call_module(name, (made[node],)))
        graph.output((*outputs,))
        self.graph = fx.GraphModule(attributes, graph)
        self.form = form
        self._key = (self.graph.code, *fixed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Part) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def make(self, weights: Sequence[Tensor], before: tuple[Tensor, ...] = ()) -> tuple[Tensor, ...]:
        """The results. ``before``: those of these weights before, which are written to; else empty."""
        with autocast_disabled():
            # not the module: hooks that the program has on all modules are about its own
            made = self.graph.forward(*(weight.detach() for weight in weights))
        for tensor, value in zip(before, made, strict=bool(before)):
            tensor.copy_(value)
        return before or made


class _Pack(nn.Module):
    """Packs a weight, as a module of a graph."""

    def __init__(self, how: Packing) -> None:
        super().__init__()
        self._how = how

    def forward(self, weight: Tensor) -> Tensor:
        return self._how(weight)


@dataclass(frozen=True)
class Prepare:
    """The tensors that a graph reads of its weights, as a function of the weights.

    Attributes:
        parts: what is computed, each with the positions of the weights that it takes.
        results: of each result, its part, and which of the part's results it is.
    """

    parts: Sequence[tuple[Part, Sequence[int]]]
    results: Sequence[tuple[int, int]]

    def __call__(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The results, computed now; weights that are one tensor give one result."""
        made: dict[object, tuple[Tensor, ...]] = {}
        found = list[tuple[Tensor, ...]]()
        # an inference tensor could not be written to outside inference mode
        with torch.inference_mode(False), torch.no_grad():
            for part, positions in self.parts:
                own = [weights[at] for at in positions]
                key = part, *map(_place, own)
                if key not in made:
                    made[key] = part.make(own)
                found.append(made[key])
        return self.taken(found)

    def taken(self, made: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        """The results, of those of all parts."""
        return [made[part][at] for part, at in self.results]


def _place(weight: Tensor) -> tuple[object, ...]:
    """Equal for tensors that are one."""
    return weight.untyped_storage()._cdata, weight.storage_offset(), weight.shape, weight.stride()


def prepare_of(gm: fx.GraphModule, weights: Sequence[fx.Node], results: Sequence[Result]) -> Prepare:
    """The function from weights to some results of a graph."""
    position = {weight: at for at, weight in enumerate(weights)}
    groups: dict[tuple[fx.Node, ...], list[Result]] = {}
    for each in results:
        groups.setdefault(weights_of([each[0]]), []).append(each)
    parts: list[tuple[Part, list[int]]] = []
    places: dict[Result, tuple[int, int]] = {}
    for group, own in groups.items():
        for form, one in _by_form(own):
            places |= {each: (len(parts), at) for at, each in enumerate(one)}
            parts.append((Part(gm, group, one, form), [position[weight] for weight in group]))
    return Prepare(parts, [places[each] for each in results])


def _by_form(results: list[Result]) -> list[tuple[object, list[Result]]]:
    """Copies of a weight in one form are a part of their own, which other graphs have, too; None for all the rest."""
    groups: dict[object, list[Result]] = {}
    for node, how in sorted(results, key=lambda each: each[0]):
        kept = node.meta.get(KEPT_META) if how is None else None
        groups.setdefault(None if kept is None else kept.form, []).append((node, how))
    return [*groups.items()]


def weights_of(values: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
    """The inputs of the graph that values are computed from, each once, in the order in which they are read."""
    return (*dict.fromkeys(weight for value in values for weight in graph_inputs_of(value)),)


class Lifted(NamedTuple):
    """A graph that was split: see :meth:`Lift.split`.

    Attributes:
        prepare: what the graph reads of its weights.
        weights: the inputs that ``prepare`` takes; those that the graph does not read itself are inputs all the same.
        inputs: the inputs of the graph that take the results of ``prepare``.
    """

    prepare: Prepare
    weights: tuple[fx.Node, ...]
    inputs: list[fx.Node]


class Lift:
    """A graph that is about to be split.

    Attributes:
        graph: see above.
        derived: what is computed from weights alone, weights included.
        work: adds calls to the rest of the graph.
        shifts: those derived values that are left of folded norms, and are added to what a weight was folded for.
    """

    def __init__(self, gm: fx.GraphModule, derived: Iterable[fx.Node]) -> None:
        self.graph, self.derived, self.work = gm.graph, {*derived}, Rewriter(gm.graph)
        self.writers: Mapping[int | None, list[fx.Node]] = {**writers_in(gm.graph)}
        self.shifts = set[fx.Node]()
        self._gm = gm
        self._programs = gm.graph.find_nodes(op="placeholder")
        self._last = self._programs[-1] if self._programs else None
        self._taken: dict[Result, fx.Node] = {}
        self._read_instead: list[tuple[fx.Node, fx.Node, fx.Node]] = []

    def extend(self) -> None:
        """Adds to ``derived`` what follows from it, but for what would take much more memory than the weights."""
        left = _EXPANDED * sum(numel(node.meta["val"]) for node in self._programs if node in self.derived)
        fixed = set[fx.Node]()
        sources: dict[fx.Node, frozenset[fx.Node]] = {}
        for node in self.graph.nodes:
            inputs = node.all_input_nodes
            if node.op == "get_attr":
                fixed.add(node)
            elif node.op == "placeholder":
                sources[node] = frozenset((node,))
            else:
                sources[node] = frozenset[fx.Node]().union(*(sources.get(arg, ()) for arg in inputs))
            is_computed = any(arg in self.derived for arg in inputs) and all(
                arg in self.derived or arg in fixed for arg in inputs
            )
            is_settled = node in self.derived or storage_of(node) in self.writers
            if is_settled or not is_computed or not is_pure(node):
                continue
            if not is_view(node):
                elements = sum(numel(weight.meta["val"]) for weight in sources[node])
                more = sum(map(numel, tensors(node.meta["val"]))) - elements
                if more > left:
                    continue
                left -= max(more, 0)
            self.derived.add(node)

    def call(self, target: Any, *args: Any) -> fx.Node:
        """A new call that computes something from weights alone."""
        self.derived.add(step := self.work.call(target, *args))
        return step

    def in_fp32(self, node: fx.Node) -> fx.Node:
        """A derived value in fp32: before it was rounded, where it was."""
        if is_cast(node) and node.all_input_nodes[0].meta["val"].dtype is torch.float32:
            return node.all_input_nodes[0]
        return self.call(torch.ops.aten.to.dtype, node, torch.float32)

    def is_written_between(self, call: fx.Node, later: fx.Node) -> bool:
        """True where a call that is made later would read what was written."""
        return any(call < each < later for each in self.writers.get(storage_of(args_of(call)[0]), ()))

    def take(self, node: fx.Node, how: Packing | None = None, given: fx.Node | None = None) -> fx.Node:
        """A derived value as an input, packed or as it is; a weight as it is stays one.

        ``given``: the input that takes the value; None: a new one behind all others.
        """
        if how is None and given is None and (node.op == "placeholder" or is_view(node)):
            return node
        if (node, how) not in self._taken:
            if given is None:
                like = node.meta["val"]
                kind, value = (
                    ("made", like.detach()) if how is None else ("packed", like.new_empty(how.shape))
                )
                kept = node.meta.get(KEPT_META)
                name = f"{node.name}_{kind}"
                if kept is not None and how is None:
                    name = f"{kept.weight}{kept.suffix}"
                assert self._last is not None
                given = self._last = add_input(self._last, name, value, stays=True)
            self._taken[node, how] = given
        return self._taken[node, how]

    def read_instead(self, node: fx.Node, given: fx.Node) -> None:
        """Has the readers of a derived value, but for those that are derived, read an input once the graph is split."""
        self._read_instead += [(reader, node, given) for reader in node.users if reader not in self.derived]

    def take_the_rest(self) -> None:
        """Takes the derived values that the graph reads; it keeps its views, and the values that it returns."""
        stays = set[fx.Node]()
        for node in reversed(list(self.graph.nodes)):
            if node not in self.derived or node.op == "placeholder":
                continue
            readers = [user for user in node.users if user not in self.derived or user in stays]
            if not readers:
                continue
            if is_view(node) or is_returned(node) or not isinstance(node.meta["val"], Tensor):
                stays.add(node)
                continue
            given = self.take(node)
            self._read_instead += [(reader, node, given) for reader in readers]

    def split(self) -> Lifted:
        """Splits the graph, which becomes the rest: it reads the inputs that :meth:`take` has given."""
        results = list(self._taken)
        weights = weights_of(node for node, _ in results)
        # first: what is derived may be computed through a view that stays
        prepare = prepare_of(self._gm, weights, results)
        for reader, node, given in self._read_instead:
            reader.replace_input_with(node, given)
        for node in reversed(list(self.graph.nodes)):
            is_ours = node.op == "get_attr" or (node.op == "call_function" and node in self.derived)
            if is_ours and not node.users:
                self.graph.erase_node(node)
        self._gm.recompile()
        return Lifted(prepare, weights, [*self._taken.values()])
