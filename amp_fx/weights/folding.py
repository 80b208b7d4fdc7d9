"""What Inductor's freezing computes its constants from, written down as an FX graph, and as a recipe for each constant.

Constants of two graphs are one tensor if the same is computed from the same weights, also for other batch sizes, as
long as oneDNN packs alike for them. Then they have equal recipes.

A recorded program::

    w0, w1 = placeholder()                                                    # f32, weights
    detach = torch.ops.aten.detach.default(w1)
    to = torch.ops.aten.to.dtype(detach, torch.bfloat16)
    t = torch.ops.aten.t.default(to)                                          # an input of the compiled graph
    packed = torch.ops.mkldnn._reorder_linear_weight.default(to, 16)          # another

gives a recipe for ``to``, of which the first input is a view, and::

    weight = placeholder()
    detach = torch.ops.aten.detach.default(weight)
    to = torch.ops.aten.to.dtype(detach, torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight.default(to, 16)
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.fx.node import map_arg

from amp_fx._torch import autocast_disabled, borrowed, packed_layout, tunes_kernels
from amp_fx.graphs.calls import is_returned
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.weights.derived import DerivedInputs, Input
from amp_fx.weights.recipes import Folded

__all__ = ["Constant", "FoldingRecord", "split"]

aten = torch.ops.aten

#: by which BatchNorm and the like are folded into weights
_ARITHMETIC = frozenset({aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor})

#: their results have the values of their first argument
_MOVES = frozenset({aten.clone.default, aten.permute.default, aten.reshape.default})

#: their results lie in the memory of their first argument
_VIEWS = frozenset(
    {
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
    }
)

#: they lay out their first argument in a way that may depend on the others, such as a batch size
_PACKING = frozenset(
    {"mkldnn._reorder_linear_weight", "mkldnn._reorder_convolution_weight", "onednn.qlinear_prepack"}
)


class Constant(NamedTuple):
    """A constant of a frozen graph.

    Attributes:
        node: computes it.
        layout: how oneDNN has packed it; empty if it is not packed.
        is_returned: True if the graph returns it, or a view of it.
    """

    node: fx.Node
    layout: bytes = b""
    is_returned: bool = False


class FoldingRecord:
    """Writes down what Inductor computes its constants from, while one graph is compiled, and makes inputs of them.

    Args:
        weights: in the order in which :class:`DerivedInputs` takes them.
        values: what the constants are in a call, as long as it goes on.
    """

    def __init__(self, weights: Sequence[Tensor], values: Callable[[], Sequence[Tensor]]) -> None:
        self._weights = weights
        self.values = values
        self._root, self._graph = nn.Module(), fx.Graph()
        self._inputs = [self._graph.placeholder(f"w{at}") for at in range(len(weights))]
        # ids are those of the constants as long as the constants live
        self._keep: list[Tensor] = []
        self._positions: dict[int, int] = {}
        #: constant -> what computes it; None if no weight is in it
        self._known: dict[int, fx.Node | None] = {}
        #: those that are inputs, once they are known
        self._lifted: list[Constant] | None = None

    def value(self, position: int, dtype: torch.dtype) -> Tensor:
        """A weight as a constant of the graph that is going to be frozen."""
        weight = self._weights[position].detach()
        value = borrowed(weight) if weight.dtype is dtype else weight.to(dtype)
        self._keep.append(value)
        self._positions[id(value)] = position
        return value

    def note_given(self, gm: fx.GraphModule) -> None:
        """See :class:`amp_fx._torch.Lifting`."""
        for node in gm.graph.find_nodes(op="get_attr") if not self._known else ():
            value = _constant(gm, node)
            self._keep.append(value)
            position = self._positions.get(id(value))
            self._known[id(value)] = None if position is None else self._read(position, value.dtype)

    def note(self, gm: fx.GraphModule, node: fx.Node, constant: Tensor) -> None:
        """See :class:`amp_fx._torch.Lifting`."""
        self._keep.append(constant)
        self._known[id(constant)] = self._copy(gm, node, {})

    def choose(self, gm: fx.GraphModule) -> list[list[fx.Node]]:
        """The constants of a frozen graph that weights are in: they become inputs.

        None, if the code that is generated may need them: ``max-autotune`` packs weights for its own kernels. Nor
        elsewhere than on a CPU, or if there are constants of which it is not known what computes them.
        """
        nodes: dict[int, list[fx.Node]] = {}
        for node in gm.graph.find_nodes(op="get_attr"):
            if isinstance(value := _constant(gm, node), Tensor):
                nodes.setdefault(id(value), []).append(node)
        # one that was not seen may be something that a weight has become; a weight, an input whose view is returned
        unknown = (nodes.keys() | self._positions.keys()) - self._known.keys()
        if unknown or tunes_kernels() or any(weight.device.type != "cpu" for weight in self._weights):
            return []
        computed = {key: node for key in nodes if (node := self._known[key])}
        self._lifted = [
            Constant(node, _layout(gm, nodes[key][0]), any(map(is_returned, nodes[key])))
            for key, node in computed.items()
        ]
        return [nodes[key] for key in computed]

    def finish(self) -> DerivedInputs | None:
        """What derives the inputs that were constants; None if they are constants still."""
        if self._lifted is None:
            return None
        self._graph.output(tuple(each.node for each in self._lifted))
        self._graph.eliminate_dead_code()
        program = fx.GraphModule(self._root, self._graph)
        with torch.inference_mode(False), torch.no_grad(), autocast_disabled():
            _round_once(program, self._weights)
        return split(program, self._lifted)

    def _read(self, position: int, dtype: torch.dtype) -> fx.Node:
        weight = self._graph.call_function(aten.detach.default, (self._inputs[position],))
        return self._graph.call_function(aten.to.dtype, (weight, dtype))

    def _copy(
        self, gm: fx.GraphModule, node: fx.Node, copies: dict[fx.Node, fx.Node | None]
    ) -> fx.Node | None:
        """The node and what it is computed from, in the recorded graph; None if no weight is in it."""
        if node not in copies:
            value = None
            if node.op == "get_attr":
                value = self._known.get(id(_constant(gm, node)))
            else:
                inputs = {arg: self._copy(gm, arg, copies) for arg in node.all_input_nodes}
                if any(inputs.values()):
                    value = self._graph.node_copy(node, lambda arg: inputs[arg] or self._fixed(gm, arg))
            copies[node] = value
        return copies[node]

    def _fixed(self, gm: fx.GraphModule, node: fx.Node) -> fx.Node:
        """A node that no weight is in."""
        if node.op != "get_attr":
            return self._graph.node_copy(node, lambda arg: self._fixed(gm, arg))
        name = f"c{len(list(self._root.buffers()))}"
        self._root.register_buffer(name, _constant(gm, node))
        return self._graph.get_attr(name)


def _constant(gm: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(gm)


def _layout(gm: fx.GraphModule, node: fx.Node) -> bytes:
    value = _constant(gm, node)
    return packed_layout(value) if value.is_mkldnn else b""


# ---- weights are rounded once ----


def _round_once(program: fx.GraphModule, weights: Sequence[Tensor]) -> None:
    """Folds in fp32 what Inductor folds into a low copy: weights are rounded once, not twice.

    Before::

        to = torch.ops.aten.to.dtype(detach, torch.bfloat16)          # detach: f32, a weight
        mul = torch.ops.aten.mul.Tensor(to, scale)                    # scale: f32, of a BatchNorm
        low = torch.ops.prims.convert_element_type.default(mul, torch.bfloat16)

    After::

        mul = torch.ops.aten.mul.Tensor(detach, scale)
        low = torch.ops.prims.convert_element_type.default(mul, torch.bfloat16)
    """
    folds = [node for node in program.graph.nodes if node.target in _ARITHMETIC]
    dtypes = _dtypes(program, folds, weights)
    for node in folds:
        for arg in node.all_input_nodes if dtypes[node] is torch.float32 else ():
            wide = _widened(arg, dtypes) if dtypes.get(arg) in LOW_DTYPES else None
            if wide is not None:
                node.replace_input_with(arg, wide)
    program.graph.eliminate_dead_code()
    program.recompile()


def _widened(node: fx.Node, dtypes: Mapping[fx.Node, torch.dtype]) -> fx.Node | None:
    """The node before it was rounded, if all that happened since is that elements have moved."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is aten.to.dtype and dtypes[source] is torch.float32:
        return source
    if node.target not in _MOVES or (wide := _widened(source, dtypes)) is None:
        return None
    with node.graph.inserting_after(node):
        return node.graph.node_copy(node, lambda _: wide)


def _dtypes(
    program: fx.GraphModule, folds: Sequence[fx.Node], weights: Sequence[Tensor]
) -> dict[fx.Node, torch.dtype]:
    """Of some nodes and what they are computed from. Nothing else runs: that would pack all weights once more."""
    needed, dtypes = set(folds), dict[fx.Node, torch.dtype]()
    for node in reversed(program.graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)

    class Run(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n) if n in needed or n.op == "placeholder" else None
            if isinstance(value, Tensor):
                dtypes[n] = value.dtype
            return value

    Run(program).run(*weights)
    return dtypes


# ---- a recipe for each constant ----


def split(program: fx.GraphModule, constants: Sequence[Constant]) -> DerivedInputs:
    """The recipes of the constants that a program computes from the weights that it takes."""
    bases = list(dict.fromkeys(_base(each.node) for each in constants))
    returned = {_base(each.node) for each in constants if each.is_returned}
    layouts = {_base(each.node): each.layout for each in constants}
    recipes = [_recipe(program, Constant(base, layouts[base], base in returned)) for base in bases]
    inputs = [Input(bases.index(_base(each.node)), view=_view(each.node)) for each in constants]
    return DerivedInputs(recipes, inputs)


def _base(node: fx.Node) -> fx.Node:
    """What a value is a view of."""
    while node.target in _VIEWS and node.all_input_nodes[0].op == "call_function":
        [node] = node.all_input_nodes
    return node


def _view(node: fx.Node) -> Callable[[Tensor], Tensor] | None:
    """Makes a view of its base."""
    base = _base(node)
    if node is base:
        return None
    graph = fx.Graph()
    copies = {base: graph.placeholder("base")}

    def copy(each: fx.Node) -> fx.Node:
        if each not in copies:
            copies[each] = graph.node_copy(each, copy)
        return copies[each]

    graph.output(copy(node))
    return fx.GraphModule({}, graph)


def _recipe(program: fx.GraphModule, constant: Constant) -> tuple[Folded, tuple[int, ...]]:
    """What computes a constant, and the positions of the weights that this takes."""
    positions = {each: at for at, each in enumerate(program.graph.find_nodes(op="placeholder"))}
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    needs: list[int] = []
    lines: list[str] = []

    def copy(each: fx.Node) -> fx.Node:
        if each in copies:
            return copies[each]
        inputs = {arg: copy(arg) for arg in each.all_input_nodes}
        if each.op == "placeholder":
            copies[each] = graph.placeholder(f"weight{len(needs)}")
            needs.append(positions[each])
            lines.append("weight")
        else:
            numbers = {arg: _Number(at) for at, arg in enumerate(copies)}
            is_packing = str(each.target).removesuffix(".default") in _PACKING
            # of the others it counts only how it is packed
            args = each.args[:1] if is_packing and each is constant.node else (each.args, each.kwargs)
            call = f"{each.target}{map_arg(args, lambda arg: numbers[arg])}"
            lines.append(_fixed_value(program, each) if each.op == "get_attr" else call)
            copies[each] = graph.node_copy(each, lambda arg: inputs[arg])
        return copies[each]

    copied = copy(constant.node)
    # weights come first
    for placeholder in reversed(graph.find_nodes(op="placeholder")):
        next(iter(graph.nodes)).prepend(placeholder)
    graph.output(copied)
    written = "\n".join(lines), constant.layout, constant.is_returned
    return Folded(*written, fx.GraphModule(program, graph)), tuple(needs)


def _fixed_value(program: fx.GraphModule, node: fx.Node) -> str:
    value = program.get_buffer(str(node.target))
    # a constant of this graph alone
    return f"{value.tolist()} {value.dtype}" if value.numel() == 1 else f"constant {id(value)}"


class _Number(int):
    """Stands for a line of an expression."""

    def __repr__(self) -> str:
        return f"%{int(self)}"
