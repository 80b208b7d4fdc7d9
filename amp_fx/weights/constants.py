"""What frozen graphs compute from weights: once for each weight, whichever graphs read it.

What Inductor's freezing computes from weights (low copies, packed for oneDNN, with BatchNorm folded in) is known as an
FX graph, see :mod:`amp_fx.weights.folding`::

    w0 = placeholder()                                                        # f32, a weight
    detach = torch.ops.aten.detach.default(w0)
    to = torch.ops.aten.to.dtype(detach, torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight.default(to, 16)          # an input of the compiled graph

What is computed in the same way from the same weights is one tensor, also for graphs of other batch sizes, as long as
oneDNN packs alike for them. After weights have changed, the part that depends on them runs again.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_arg

from amp_fx._torch import autocast_disabled, borrowed, packed_memory
from amp_fx.weights.watch import Key, Look, key_of

__all__ = ["Constant", "Constants", "Holder", "folded_bytes"]

#: they lay out their first argument in a way that may depend on the others, such as a batch size
_PACKING = frozenset({"mkldnn._reorder_linear_weight", "mkldnn._reorder_convolution_weight"})

#: their results lie in the memory of their first argument
_VIEWS = frozenset(
    {
        torch.ops.aten.detach.default,
        torch.ops.aten.expand.default,
        torch.ops.aten.permute.default,
        torch.ops.aten.t.default,
        torch.ops.aten.transpose.int,
        torch.ops.aten.unsqueeze.default,
    }
)

_lock = threading.RLock()
_layouts = itertools.count(1)


class Holder(Protocol):
    """Has a list of the tensors of constants."""

    def hold(self, constants: Sequence[Constant], tensors: Sequence[Tensor]) -> None:
        """Keeps the constants alive, and the list."""
        ...

    def give_up(self) -> None:
        """One of them is going to be computed again: the list goes."""
        ...


@dataclass(eq=False)
class Constant:
    """What was computed from some weights.

    Attributes:
        tensor: None before it is computed.
        looks: of the weights, when it was.
        holders: whose lists it is in.
    """

    tensor: Tensor | None = None
    looks: tuple[Look, ...] = ()
    holders: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


class _Name(NamedTuple):
    """What a constant is: constants of one name are one.

    Attributes:
        expression: what computes it.
        weights: from which.
        layout: a number for each way in which oneDNN has packed it; 0 if it is not packed.
    """

    expression: str
    weights: Key
    layout: int


#: all that are alive
_constants: weakref.WeakValueDictionary[_Name, Constant] = weakref.WeakValueDictionary()


def folded_bytes() -> int:
    """Bytes of all constants that are alive, without those in the memory of a weight."""
    with _lock:
        alive = list(_constants.values())
    of_weights = {look.storage for constant in alive for look in constant.looks}
    memory = dict(_memory(constant.tensor) for constant in alive if constant.tensor is not None)
    return sum(size for address, size in memory.items() if address not in of_weights)


class Constants:
    """The constants of one graph, of whichever weights.

    Args:
        program: computes them from the weights.
        nodes: of the program, one for each constant.
    """

    def __init__(self, program: fx.GraphModule, nodes: Sequence[fx.Node]) -> None:
        self._program = program
        # graphs that read different views of a value share the value
        self._nodes = list(dict.fromkeys((*nodes, *map(_base, nodes))))
        writer = _Writer(program)
        self._expressions, self._needs = zip(*map(writer.write, self._nodes), strict=True)
        # which one is known when it is packed
        self._layouts: list[int | None] = [None if _is_packed(node) else 0 for node in self._nodes]
        #: those that the graph reads come first
        self._count = len(nodes)

    def of(self, weights: Sequence[Tensor], looks: Sequence[Look]) -> list[Constant]:
        """The constants that follow from weights. Those are computed that are not known, or not any more.

        Args:
            weights: all of them.
            looks: what they look like.
        """
        with _lock:
            seen = [tuple(looks[position] for position in needs) for needs in self._needs]
            found = [self._known(at, weights) for at in range(len(self._nodes))]
            stale = {
                node: at
                for at, node in enumerate(self._nodes)
                if found[at].looks != seen[at] or found[at].tensor is None
            }
            for at in stale.values():
                # there is never more than one tensor too many
                found[at].tensor = None
                for holder in list(found[at].holders):
                    holder.give_up()
            fresh = {
                node: constant.tensor
                for node, constant in zip(self._nodes, found, strict=True)
                if node not in stale and constant.tensor is not None
            }

            def keep(node: fx.Node, tensor: Tensor) -> None:
                at = stale[node]
                if self._layouts[at] is None:
                    found[at] = self._packed(at, weights, tensor, seen[at])
                if found[at].tensor is None:
                    # what lies in the memory of a weight does not keep it
                    lies = None if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()
                    in_weight = any(look.storage == lies for look in seen[at])
                    found[at].tensor, found[at].looks = borrowed(tensor) if in_weight else tensor, seen[at]

            with torch.inference_mode(False), torch.no_grad(), autocast_disabled():
                _Partly(self._program, stale, fresh, keep).run(*weights)
            return found

    def give(self, holder: Holder, weights: Sequence[Tensor], looks: Sequence[Look]) -> list[Tensor]:
        """As :meth:`of`, for a graph that keeps them: its tensors, which nobody makes again meanwhile."""
        with _lock:
            found = self.of(weights, looks)
            for constant in found:
                constant.holders.add(holder)
            tensors = [constant.tensor for constant in found[: self._count] if constant.tensor is not None]
            holder.hold(found, tensors)
            return tensors

    def anew(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that follow from weights, computed for one call and not kept."""
        with torch.inference_mode(False), torch.no_grad(), autocast_disabled():
            return list(self._program(*weights))

    def _name(self, at: int, weights: Sequence[Tensor], layout: int) -> _Name:
        key = key_of([weights[position] for position in self._needs[at]])
        return _Name(self._expressions[at], key, layout)

    def _known(self, at: int, weights: Sequence[Tensor]) -> Constant:
        layout = self._layouts[at]
        # one that is not in the table yet has no layout
        return Constant() if layout is None else _shared(self._name(at, weights, layout))

    def _packed(self, at: int, weights: Sequence[Tensor], tensor: Tensor, seen: tuple[Look, ...]) -> Constant:
        """The constant that is packed like this one, if there is any; now its layout has a number."""
        name = self._name(at, weights, 0)
        for other, constant in list(_constants.items()):
            if (
                other._replace(layout=0) == name
                and constant.looks == seen
                and constant.tensor is not None
                and _bits(constant.tensor) == _bits(tensor)
            ):
                self._layouts[at] = other.layout
                return constant
        self._layouts[at] = layout = next(_layouts)
        return _shared(name._replace(layout=layout))


def _shared(name: _Name) -> Constant:
    constant = _constants.get(name)
    if constant is None:
        constant = _constants[name] = Constant()
    return constant


class _Writer:
    """Writes down what computes nodes of a program, without regard to which of its inputs are read."""

    def __init__(self, program: fx.GraphModule) -> None:
        self._program = program
        inputs = program.graph.find_nodes(op="placeholder")
        self._positions = {node: at for at, node in enumerate(inputs)}

    def write(self, node: fx.Node) -> tuple[str, tuple[int, ...]]:
        """The expression, and the positions of the inputs in the order in which it names them."""
        lines: dict[fx.Node, str] = {}
        needs: list[int] = []
        self._write(node, lines, needs)
        return "\n".join(lines.values()), tuple(needs)

    def _write(self, node: fx.Node, lines: dict[fx.Node, str], needs: list[int]) -> None:
        if node in lines:
            return
        for arg in node.all_input_nodes:
            self._write(arg, lines, needs)
        if node.op == "placeholder":
            needs.append(self._positions[node])
            lines[node] = "weight"
        elif node.op == "get_attr":
            # a constant of this graph alone
            value = self._program.get_buffer(str(node.target))
            lines[node] = f"{value.tolist()} {value.dtype}" if value.numel() == 1 else f"constant {id(value)}"
        else:
            numbers = {arg: at for at, arg in enumerate(lines)}
            args = node.args[:1] if _is_packed(node) else (node.args, node.kwargs)
            lines[node] = f"{node.target}{map_arg(args, lambda arg: _Number(numbers[arg]))}"


class _Number(int):
    """Stands for a line of an expression."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


class _Partly(fx.Interpreter):
    """Computes some nodes of a program, and what they need that is not known."""

    def __init__(
        self,
        program: fx.GraphModule,
        wanted: Mapping[fx.Node, int],
        fresh: Mapping[fx.Node, Tensor],
        keep: Callable[[fx.Node, Tensor], None],
    ) -> None:
        super().__init__(program)
        self._wanted, self._fresh, self._keep = wanted, fresh, keep
        self._needed = set(wanted)
        for node in reversed(program.graph.nodes):
            if node in self._needed and node not in fresh:
                self._needed.update(node.all_input_nodes)

    def run_node(self, n: fx.Node) -> Any:
        if n in self._fresh:
            return self._fresh[n]
        if n not in self._needed and n.op != "placeholder":
            return None
        value = super().run_node(n)
        if n in self._wanted:
            self._keep(n, value)
        return value


def _is_packed(node: fx.Node) -> bool:
    return str(node.target).removesuffix(".default") in _PACKING


def _bits(packed: Tensor) -> bytes:
    return ctypes.string_at(*packed_memory(packed))


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes."""
    if tensor.is_mkldnn:
        return packed_memory(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _base(node: fx.Node) -> fx.Node:
    """What a value is a view of."""
    while node.target in _VIEWS and node.all_input_nodes[0].op == "call_function":
        [node] = node.all_input_nodes
    return node
