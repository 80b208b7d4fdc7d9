"""What Inductor's freezing computes its constants from, written down as an FX graph."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx._torch import autocast_disabled, borrowed, observe_freezing, packed_layout, tunes_kernels
from amp_fx.graphs.calls import is_returned
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.weights.splitting import Constant, split
from amp_fx.weights.values import Values

__all__ = ["FoldingRecord"]

#: by which BatchNorm and the like are folded into weights
_ARITHMETIC = frozenset(
    {
        torch.ops.aten.add.Tensor,
        torch.ops.aten.sub.Tensor,
        torch.ops.aten.mul.Tensor,
        torch.ops.aten.div.Tensor,
    }
)

#: their results have the values of their first argument
_MOVES = frozenset(
    {torch.ops.aten.clone.default, torch.ops.aten.permute.default, torch.ops.aten.reshape.default}
)


class FoldingRecord:
    """Writes down what Inductor computes its constants from, while one graph is compiled, and makes inputs of them.

    Args:
        weights: in the order in which :class:`Values` takes them.
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

    def observe(self) -> contextlib.AbstractContextManager[None]:
        """Within this context the graph is compiled."""
        return observe_freezing(self)

    def choose(self, gm: fx.GraphModule) -> list[list[fx.Node]]:
        """The constants of a frozen graph that weights are in: they become inputs.

        None, if the code that is generated may need them: ``max-autotune`` packs weights for its own kernels. Nor
        elsewhere than on a CPU, or if there are constants of which it is not known what computes them.
        """
        nodes: dict[int, list[fx.Node]] = {}
        for node in gm.graph.find_nodes(op="get_attr"):
            value = _constant(gm, node)
            if isinstance(value, Tensor):
                nodes.setdefault(id(value), []).append(node)
        # one that was not seen may be something that a weight has become; a weight, an input whose view is returned
        unknown = (nodes.keys() | self._positions.keys()) - self._known.keys()
        if unknown or tunes_kernels() or any(weight.device.type != "cpu" for weight in self._weights):
            return []
        chosen = {key: computed for key in nodes if (computed := self._known[key])}
        self._lifted = [
            Constant(computed, _layout(gm, nodes[key][0]), any(map(is_returned, nodes[key])))
            for key, computed in chosen.items()
        ]
        return [nodes[key] for key in chosen]

    def finish(self) -> Values | None:
        """What makes the inputs that were constants; None if they are constants still."""
        if self._lifted is None:
            return None
        self._graph.output(tuple(each.node for each in self._lifted))
        self._graph.eliminate_dead_code()
        program = fx.GraphModule(self._root, self._graph)
        with torch.inference_mode(False), torch.no_grad(), autocast_disabled():
            _round_once(program, self._weights)
        return split(program, self._lifted)

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

    def _read(self, position: int, dtype: torch.dtype) -> fx.Node:
        weight = self._graph.call_function(torch.ops.aten.detach.default, (self._inputs[position],))
        return self._graph.call_function(torch.ops.aten.to.dtype, (weight, dtype))

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


def _round_once(program: fx.GraphModule, weights: Sequence[Tensor]) -> int:
    """Folds in fp32 what Inductor folds into a low copy: weights are rounded once, not twice.

    Before::

        to = torch.ops.aten.to.dtype(detach, torch.bfloat16)          # detach: f32, a weight
        mul = torch.ops.aten.mul.Tensor(to, scale)                    # scale: f32, of a BatchNorm
        low = torch.ops.prims.convert_element_type.default(mul, torch.bfloat16)

    After::

        mul = torch.ops.aten.mul.Tensor(detach, scale)
        low = torch.ops.prims.convert_element_type.default(mul, torch.bfloat16)

    Returns:
        Number of inputs replaced.
    """
    graph = program.graph
    folds = [node for node in graph.nodes if node.target in _ARITHMETIC]
    dtypes = _dtypes(program, folds, weights)
    count = 0
    for node in folds:
        if dtypes[node] is not torch.float32:
            continue
        for arg in node.all_input_nodes:
            wide = _widened(graph, arg, dtypes) if dtypes.get(arg) in LOW_DTYPES else None
            if wide is not None:
                node.replace_input_with(arg, wide)
                count += 1
    graph.eliminate_dead_code()
    program.recompile()
    return count


def _widened(graph: fx.Graph, node: fx.Node, dtypes: Mapping[fx.Node, torch.dtype]) -> fx.Node | None:
    """The node before it was rounded, if all that happened since is that elements have moved."""
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node):
        return None
    if node.target is torch.ops.aten.to.dtype and dtypes[source] is torch.float32:
        return source
    if node.target not in _MOVES or (wide := _widened(graph, source, dtypes)) is None:
        return None
    with graph.inserting_after(node):
        return graph.node_copy(node, lambda _: wide)


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


def _constant(gm: fx.GraphModule, node: fx.Node) -> Any:
    return operator.attrgetter(str(node.target))(gm)


def _layout(gm: fx.GraphModule, node: fx.Node) -> bytes:
    value = _constant(gm, node)
    return packed_layout(value) if value.is_mkldnn else b""
