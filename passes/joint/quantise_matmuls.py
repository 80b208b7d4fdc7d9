"""Convert what matmuls in fp8 read, once for all of them, and multiply with scales."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.fx as fx

from amp_fx.graphs.facts import run_fake
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.joint.fp8_matmuls import FORWARD, FP8_META, Matmul, Operand, find_matmuls
from amp_fx.policy.fp8 import Recipe
from amp_fx.policy.fp8_copy import fp8_scale, scaled
from amp_fx.policy.mx_scales import block_scales

__all__ = ["QuantiseMatmuls"]

aten = torch.ops.aten

#: what new nodes take over from the matmul that needs them first
_META = (
    "ac_graph_id",
    "fwd_nn_module_stack",
    "nn_module_stack",
    "partitioner_tag",
    "recompute",
    "stack_trace",
)


@dataclass(frozen=True)
class QuantiseMatmuls(Pass):
    """Runs on Inductor's joint graph (forward and backward together), after :class:`PlaceFp8` has chosen.

    A value is converted where the first matmul reads it, and all that read it in the same dtype, layout and scaling
    share the copy, forward and backward. Library kernels take the rows of the first operand and the columns of the
    second in one piece each: a copy that lies otherwise is written that way. Cases:

    1. by row: largest magnitude, scale and copy are those of the matrix as the matmul reads it. Or of each block of a
       row: then scales are bytes, in the order of :mod:`amp_fx.policy.mx_scales`.
    2. whole: there is one scale and one copy of the value, and one more copy for who reads it transposed; of a weight,
       the backward makes that again.
    3. a weight that is fp32 in memory is read as it is, not as it is cast for a low matmul.
    4. a value with an infinity or NaN has a scale of zero or NaN: everything that depends on the scale becomes NaN,
       which a loss scaler sees as it does the infinity.

    Before, with ``w`` of 512 rows::

        w_16 = torch.ops.prims.convert_element_type.default(w, torch.bfloat16)
        w_t = torch.ops.aten.permute.default(w_16, [1, 0])
        mm = torch.ops.aten.mm.default(x, w_t)                                          # bf16[8192, 512]

    After, by row, and likewise for ``x``::

        amax = torch.ops.aten.amax.default(torch.ops.aten.abs.default(w), [1], True)    # f32[512, 1]
        scale = exp2(floor(log2(448 / clamp_min(amax, 2**-100))))
        w_8 = torch.ops.prims.convert_element_type.default(clamp(w * scale), torch.float8_e4m3fn)
        mm = torch.ops.aten._scaled_mm.default(x_8, w_8.t(), 1 / x_scale, 1 / scale, None, None, torch.bfloat16, True)

    The sums are exact to fp32 in the backward, and as the hardware adds up fastest in the forward.
    """

    name: ClassVar[str] = "quantise-matmuls"
    needs: ClassVar[frozenset[str]] = frozenset({"fp8-placed"})

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        matmuls = [matmul for matmul in find_matmuls(gm) if FP8_META in matmul.node.meta]
        work = _Work(gm.graph)
        for matmul in matmuls:
            work.multiply(matmul, matmul.node.meta[FP8_META])
        for copy in work.copies.values():
            if copy.source.op == "placeholder" and not any(copy.in_forward):
                _make_in_backward(copy.steps)
        if matmuls:
            gm.graph.eliminate_dead_code()
        return PassResult(
            gm, len(matmuls), f"{len(matmuls)} scaled matmuls read {len(work.copies)} fp8 copies"
        )


@dataclass
class _Scaled:
    """An fp8 copy.

    Attributes:
        source: what was converted.
        data: in fp8.
        scale: in fp32, what the source was multiplied by.
        factor: what gives the values back: one for each row, or one, in fp32; or scales of blocks.
        steps: all nodes between source and data.
        in_forward: for each matmul that reads it, whether that is one of the forward.
    """

    source: fx.Node
    data: fx.Node
    scale: fx.Node
    factor: fx.Node
    steps: list[fx.Node]
    in_forward: list[bool] = field(default_factory=list)


def _make_in_backward(steps: Sequence[fx.Node]) -> None:
    """Keeps what is made of an input, and what only the backward reads, out of the forward.

    It takes no memory in between: the input is there. Of other values the partitioner knows what is kept, and makes
    copies again from that: the backward reads their sources for other reasons.
    """
    for step in steps:
        if "recompute" not in step.meta:
            step.meta["partitioner_tag"] = "must_be_in_backward"


@dataclass
class _Work:
    """Adds nodes to one graph.

    Attributes:
        graph: where to.
        copies: base, dtype and what its scales stand for -> the copy.
    """

    graph: fx.Graph
    copies: dict[object, _Scaled] = field(default_factory=dict)
    _turned: dict[object, fx.Node] = field(default_factory=dict)
    _added: list[fx.Node] = field(default_factory=list)

    def multiply(self, matmul: Matmul, recipe: Recipe) -> None:
        """Makes a low matmul a scaled one."""
        node = matmul.node
        bias = node.args[0] if node.target is aten.addmm.default else None
        with self.graph.inserting_before(node):
            copies = [self._copy(operand, recipe, node) for operand in matmul.operands]
            for copy in copies:
                copy.in_forward.append(matmul.role == FORWARD)
            first, second = (
                self._matrix(copy, operand, recipe, node)
                for copy, operand in zip(copies, matmul.operands, strict=True)
            )
            columns = self._call(node, aten.permute.default, second, [1, 0])
            factors = [copy.factor for copy in copies]
            if recipe.block is None:
                shapes = ([-1, 1], [1, -1]) if recipe.by_row else ([], [])
                factors = [
                    self._factor(copy, shape, node) for copy, shape in zip(copies, shapes, strict=True)
                ]
        # in place: other operands may be seen through this very node
        out, fast = node.meta["val"].dtype, matmul.role == FORWARD
        node.target, node.args = (
            aten._scaled_mm.default,
            (first, columns, *factors, bias, None, out, fast),
        )

    def _copy(self, operand: Operand, recipe: Recipe, like: fx.Node) -> _Scaled:
        """What the operand is converted to, by row as the matmul reads it, else as the value lies in memory."""
        dtype = recipe.gradient if operand.is_gradient else torch.float8_e4m3fn
        key = operand.base, dtype, operand.layout_key if recipe.by_row else ""
        if key not in self.copies:
            before = len(self._added)
            value = self._viewed(operand.source, operand, like) if recipe.by_row else operand.source
            made = self._quantised(value, dtype, recipe, like)
            self.copies[key] = _Scaled(operand.source, *made, self._added[before:])
        return self.copies[key]

    def _matrix(self, copy: _Scaled, operand: Operand, recipe: Recipe, like: fx.Node) -> fx.Node:
        """The copy as the matrix that is multiplied, its rows in one piece."""
        key = copy.data, operand.layout_key
        if key not in self._turned:
            rows = copy.data if recipe.by_row else self._turned_whole(copy, operand, like)
            # strides spelled out: Inductor lays a copy out as suits the kernel that writes it, unless a view fixes it
            self._turned[key] = self._strided(rows, [rows.meta["val"].shape[1], 1], like)
        return self._turned[key]

    def _turned_whole(self, copy: _Scaled, operand: Operand, like: fx.Node) -> fx.Node:
        """A copy with one scale, as the operand's matrix.

        What the backward reads the other way round of an input, it makes again of that: so no byte is kept for each
        parameter. Scaled after it was turned, it is not the same expression as the copy, and stays apart from it.
        """
        first, in_forward = len(self._added), copy.in_forward[-1]
        if operand.lies_in_rows or in_forward or copy.source.op != "placeholder":
            return self._in_rows(self._viewed(copy.data, operand, like), like)
        value = self._viewed(copy.source, operand, like)
        call = functools.partial(self._call, like)
        data, _ = scaled(value, call(aten.view.default, copy.scale, []), copy.data.meta["val"].dtype, call)
        rows = self._in_rows(data, like)
        _make_in_backward(self._added[first:])
        return rows

    def _viewed(self, node: fx.Node, operand: Operand, like: fx.Node) -> fx.Node:
        """The operand's matrix, of its base or of what has the elements of the base."""
        for view in operand.views:
            node = self._call(like, view.target, node, *view.args[1:], **view.kwargs)
        return self._call(like, aten.permute.default, node, [1, 0]) if operand.transposed else node

    def _in_rows(self, node: fx.Node, like: fx.Node) -> fx.Node:
        value = node.meta["val"]
        if value.stride(1) == 1 and value.stride(0) == value.shape[1]:
            return node
        return self._call(like, aten.clone.default, node, memory_format=torch.contiguous_format)

    def _quantised(
        self, value: fx.Node, dtype: torch.dtype, recipe: Recipe, like: fx.Node
    ) -> tuple[fx.Node, fx.Node, fx.Node]:
        """(in fp8, scale, factors); by row: of a matrix, laid out in rows; else of any shape, as the value lies."""
        call = functools.partial(self._call, like)
        shape = list(value.meta["val"].shape)
        if recipe.block is not None:
            value = call(aten.view.default, value, [shape[0], -1, recipe.block])
        # first along rows, which fuses with what computes these
        others = [] if recipe.by_row else list(range(value.meta["val"].ndim - 1))
        scale = fp8_scale(
            value,
            dtype,
            [*filter(None, ([-1], others))],
            call,
            powers=recipe.powers,
            is_wide=value.meta["val"].dtype is torch.float32,
        )
        # a buffer of its own: of a value that takes many steps to compute and to scale, Inductor stores a step in fp32
        scale = self._strided(scale, _strides(scale), like)
        data, factor = scaled(value, scale, dtype, call)
        if recipe.block is not None:
            data = call(aten.view.default, data, shape)
            factor = block_scales(factor, call)
        if recipe.by_row:
            data = self._in_rows(data, like)
        return data, scale, factor

    def _factor(self, scaled: _Scaled, shape: list[int], like: fx.Node) -> fx.Node:
        """The factors in the shape that a scaled matmul takes."""
        factor = self._call(like, aten.view.default, scaled.factor, shape)
        if not shape:
            return factor
        # strides spelled out: those of a dimension of size 1 are anything in Inductor, and the kernel for CPU wants 1
        return self._strided(factor, [1, 1], like)

    def _strided(self, node: fx.Node, strides: list[int], like: fx.Node) -> fx.Node:
        """What has these strides already, in whichever way the graph is compiled."""
        sizes = [
            size if isinstance(size, int) else self._call(like, aten.sym_size.int, node, dim)
            for dim, size in enumerate(node.meta["val"].shape)
        ]
        return self._call(like, aten.as_strided.default, node, sizes, strides)

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta = {key: like.meta[key] for key in _META if key in like.meta}
        node.meta["val"] = run_fake(node)
        self._added.append(node)
        return node


def _strides(node: fx.Node) -> list[int]:
    """Those of a value; where a size is not known, that dimension is the only one that has more than one element."""
    strides = node.meta["val"].stride()
    return [stride if isinstance(stride, int) else 1 for stride in strides]
