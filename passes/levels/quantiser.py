"""Adds to a graph what matmuls below 16 bits read: copies of values with scales, each made once."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.fx as fx

from amp_fx.graphs.rewriter import Rewriter
from amp_fx.passes.levels.level_problem import level_of
from amp_fx.passes.levels.matmuls import Matmul, Operand
from amp_fx.precision.policy.levels import FORWARD, Kernel, Level, Scale
from amp_fx.precision.policy.scaled import Product, block_scales, scale_of, scaled

aten = torch.ops.aten


class WithScale(NamedTuple):
    """An operand with scales."""

    #: in the level's dtype
    data: fx.Node
    #: what gives the values back: one for each row, or one, in fp32; or scales of blocks
    factor: fx.Node
    #: what the value was multiplied by, in fp32; None of a weight that may be stored
    scale: fx.Node | None = None


class Quantiser:
    """Adds nodes to one joint graph, whose matmuls are multiplied in order, forward before backward.

    Attributes:
        copies: source, dtype and what its scales stand for -> the copy.
    """

    def __init__(self, work: Rewriter) -> None:
        self.copies: dict[object, WithScale] = {}
        self._graph, self._call = work.graph, work
        self._matrices: dict[object, fx.Node] = {}
        #: whether the matmul that nodes are added for is one of the forward
        self._in_forward = True

    def multiply(self, matmul: Matmul, level: Level, kernel: Kernel) -> None:
        """Makes a low matmul one of operands with scales."""
        node, self._in_forward = matmul.node, matmul.role == FORWARD
        pairs = [(operand, level_of(operand, level)) for operand in matmul.operands]
        with self._call.before(node):
            copies = [self._copy(operand, each, kernel) for operand, each in pairs]
            first, second = (self._matrix(copy, *pair) for copy, pair in zip(copies, pairs, strict=True))
            columns = self._call(aten.permute.default, second, [1, 0])
            # scales of another kind than the level's are multiplied behind the product
            one, other = (
                self._factor(copy, each, shape) if each.scale is level.scale else copy.factor
                for copy, (_, each), shape in zip(copies, pairs, ([-1, 1], [1, -1]), strict=True)
            )
            out = node.meta["val"].dtype
            given = Product(first, columns, (one, other), matmul.bias, out, self._in_forward)
            final = kernel.multiply(given, self._call)
            self._become(matmul, final)

    def divided(self, matmul: Matmul, level: Level) -> Matmul:
        """The product of a value that is divided, where the weight is equalised; a joint graph has none such."""
        return matmul

    def tidy(self, path: str) -> None:
        """Erases what nothing reads; ``path`` is the prefix of names in a body."""
        self._graph.eliminate_dead_code()

    def _become(self, matmul: Matmul, final: fx.Node) -> None:
        """In place: other operands may be seen through this very node."""
        matmul.node.target, matmul.node.args = final.target, final.args
        self._graph.erase_node(final)

    def _copy(self, operand: Operand, level: Level, kernel: Kernel) -> WithScale:
        """The converted operand, by row as the matmul reads it, else as the value lies in memory."""
        dtype = level.dtype_of(is_gradient=operand.is_gradient)
        if kernel.value is not None and not operand.is_weight:
            dtype = kernel.value
        key = operand.source, dtype, level.scale, operand.layout if level.by_row else "", operand.equalisation
        if key not in self.copies or self._is_written(operand.source):
            first = len(self._call.added)
            self.copies[key] = self._made(operand, dtype, level)
            if operand.source.op == "placeholder" and not self._in_forward:
                self._make_in_backward(first)
        return self.copies[key]

    def _made(self, operand: Operand, dtype: torch.dtype, level: Level) -> WithScale:
        value = self._viewed(operand.source, operand) if level.by_row else operand.source
        shape = list(value.meta["val"].shape)
        if level.block is not None:
            value = self._call(aten.view.default, value, [shape[0], -1, level.block])
        # first along rows, which fuses with what computes these
        others = [] if level.by_row else list(range(value.meta["val"].ndim - 1))
        groups = [*filter(None, ([-1], others))]
        is_wide = value.meta["val"].dtype is torch.float32
        scale = scale_of(value, dtype, groups, self._call, powers=level.powers, is_wide=is_wide)
        scale = self._settled(scale)
        data, factor = scaled(value, scale, dtype, self._call)
        if level.block is not None:
            data = self._call(aten.view.default, data, shape)
            factor = block_scales(factor, self._call)
        if level.by_row and data.meta["val"].ndim == 2:
            data = self._in_rows(data)
        return WithScale(data, factor, scale)

    def _matrix(self, copy: WithScale, operand: Operand, level: Level) -> fx.Node:
        """The copy as the matrix that is multiplied, its rows in one piece."""
        key = copy.data, operand.layout
        if key not in self._matrices:
            rows = self._in_rows(copy.data) if level.by_row else self._turned_whole(copy, operand)
            # strides spelled out: Inductor lays a copy out as suits the kernel that writes it, unless a view fixes it
            self._matrices[key] = self._strided(rows, [rows.meta["val"].shape[1], 1])
        return self._matrices[key]

    def _turned_whole(self, copy: WithScale, operand: Operand) -> fx.Node:
        """A copy with one scale, as the operand's matrix.

        What the backward reads the other way round of an input, it makes again of that: so no byte is kept for each
        parameter. Scaled after it was turned, it is not the same expression as the copy, and stays apart from it.
        """
        stays = operand.lies_in_rows or self._in_forward or operand.source.op != "placeholder"
        if stays or copy.scale is None:
            return self._in_rows(self._viewed(copy.data, operand))
        first = len(self._call.added)
        value = self._viewed(operand.source, operand)
        scale = self._call(aten.view.default, copy.scale, [])
        rows = self._in_rows(scaled(value, scale, copy.data.meta["val"].dtype, self._call)[0])
        self._make_in_backward(first)
        return rows

    def _make_in_backward(self, first: int) -> None:
        """Keeps what is made of an input, and what only the backward reads, out of the forward.

        That takes no memory in between: the input is there. Of other values the partitioner knows what is kept, and
        makes copies again from that: the backward reads their sources for other reasons.
        """
        for step in self._call.added[first:]:
            if "recompute" not in step.meta:
                step.meta["partitioner_tag"] = "must_be_in_backward"

    def _viewed(self, node: fx.Node, operand: Operand) -> fx.Node:
        """The operand's matrix, of its source or of what has the elements of the source."""
        for view in operand.views:
            node = self._call(view.target, node, *view.args[1:], **dict[str, Any](view.kwargs))
        return self._call(aten.permute.default, node, [1, 0]) if operand.transposed else node

    def _in_rows(self, node: fx.Node) -> fx.Node:
        """A matrix whose rows are those of the value, in one piece each."""
        if node.meta["val"].ndim != 2:
            node = self._call(aten.view.default, node, [-1, node.meta["val"].shape[-1]])
        value = node.meta["val"]
        if value.stride(1) == 1 and value.stride(0) == value.shape[1]:
            return node
        return self._call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def _factor(self, copy: WithScale, level: Level, shape: list[int]) -> fx.Node:
        """The factors as a scaled matmul takes them."""
        if level.scale is Scale.BLOCK:
            return copy.factor
        if level.scale is Scale.WHOLE:
            return self._call(aten.view.default, copy.factor, [])
        # strides spelled out: those of a dimension of size 1 are anything in Inductor, and the kernel for CPU wants 1
        return self._strided(self._call(aten.view.default, copy.factor, shape), [1, 1])

    def _settled(self, scale: fx.Node) -> fx.Node:
        """A buffer of its own: of a value that takes many steps to compute, Inductor stores one of them in fp32."""
        # where a size is not known, that dimension is the only one that has more than one element
        return self._strided(scale, [s if isinstance(s, int) else 1 for s in scale.meta["val"].stride()])

    def _strided(self, node: fx.Node, strides: list[Any]) -> fx.Node:
        """The node with these strides, which it has already, in whichever way the graph is compiled."""
        return self._call(aten.as_strided.default, node, self._sizes(node), strides)

    def _sizes(self, node: fx.Node) -> list[Any]:
        return [
            size if isinstance(size, int) else self._call(aten.sym_size.int, node, dim)
            for dim, size in enumerate(node.meta["val"].shape)
        ]

    def _is_written(self, source: fx.Node) -> bool:
        """True where somebody writes to the value: then nobody shares its copy."""
        return False
