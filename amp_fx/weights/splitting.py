"""One program that computes constants from weights, as a recipe for each.

Constants of two graphs are one value if the same is computed from the same weights, also for other batch sizes, as long
as oneDNN packs alike for them. Then they have equal recipes.

Before::

    w0, w1 = placeholder()                                                    # f32, weights
    detach = torch.ops.aten.detach.default(w1)
    to = torch.ops.aten.to.dtype(detach, torch.bfloat16)
    t = torch.ops.aten.t.default(to)                                          # an input of the compiled graph
    packed = torch.ops.mkldnn._reorder_linear_weight.default(to, 16)          # another

After, a recipe for ``to``, of which the first input is a view, and::

    weight = placeholder()
    detach = torch.ops.aten.detach.default(weight)
    to = torch.ops.aten.to.dtype(detach, torch.bfloat16)
    packed = torch.ops.mkldnn._reorder_linear_weight.default(to, 16)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.fx as fx
from torch import Tensor
from torch.fx.node import map_arg

from amp_fx.weights.recipes import Folded
from amp_fx.weights.values import Input, Values

__all__ = ["Constant", "split"]

aten = torch.ops.aten

#: they lay out their first argument in a way that may depend on the others, such as a batch size
_PACKING = frozenset(
    {"mkldnn._reorder_linear_weight", "mkldnn._reorder_convolution_weight", "onednn.qlinear_prepack"}
)

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


def split(program: fx.GraphModule, constants: Sequence[Constant]) -> Values:
    """The values that constants are of.

    Args:
        program: computes the constants; takes the weights.
        constants: their nodes are of the program.
    """
    returned = {_base(each.node) for each in constants if each.is_returned}
    layouts = {_base(each.node): each.layout for each in constants}
    places = {base: at for at, base in enumerate(layouts)}
    recipes = [_recipe(program, Constant(base, layout, base in returned)) for base, layout in layouts.items()]
    return Values(recipes, [Input(places[_base(each.node)], view=_view(each.node)) for each in constants])


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
            lines.append(_fixed(program, each) if each.op == "get_attr" else call)
            copies[each] = graph.node_copy(each, lambda arg: inputs[arg])
        return copies[each]

    copied = copy(constant.node)
    # weights come first
    for placeholder in reversed(graph.find_nodes(op="placeholder")):
        next(iter(graph.nodes)).prepend(placeholder)
    graph.output(copied)
    written = "\n".join(lines), constant.layout, constant.is_returned
    return Folded(*written, fx.GraphModule(program, graph)), tuple(needs)


def _fixed(program: fx.GraphModule, node: fx.Node) -> str:
    value = program.get_buffer(str(node.target))
    # a constant of this graph alone
    return f"{value.tolist()} {value.dtype}" if value.numel() == 1 else f"constant {id(value)}"


class _Number(int):
    """Stands for a line of an expression."""

    def __repr__(self) -> str:
        return f"%{int(self)}"
