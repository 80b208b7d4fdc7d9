"""Matmuls of a captured graph as fp8 sees them: a value, whose last dimension is contracted, times a matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx.graphs.facts import LOW_DTYPES, is_cast
from amp_fx.graphs.linears import LINEARS
from amp_fx.plans.plan import CAST_META

__all__ = ["Linear", "linear_of"]

aten = torch.ops.aten

_TRANSPOSES = frozenset({aten.t.default, aten.numpy_T.default, aten.mT.default, aten.adjoint.default})


@dataclass(frozen=True)
class Linear:
    """A call that multiplies a value with a matrix.

    Attributes:
        node: the call; its result is in a low dtype.
        value: what is multiplied, (..., contracted).
        matrix: what the call reads, in the low dtype.
        source: what the matrix is quantised from: the value before a pass has cast it, which rounds it once only.
        in_rows: True if the source is (columns, contracted), else it is the other way round.
        bias: (columns,), or None.
    """

    node: fx.Node
    value: fx.Node
    matrix: fx.Node
    source: fx.Node
    in_rows: bool
    bias: fx.Node | None

    @property
    def sizes(self) -> tuple[int | torch.SymInt, int | torch.SymInt]:
        """(contracted, columns)."""
        first, second = self.source.meta["val"].shape
        return (second, first) if self.in_rows else (first, second)


def linear_of(node: fx.Node) -> Linear | None:
    """The call as a linear; None where it is none, or not of 16-bit values."""
    if node.op != "call_function" or node.kwargs:
        return None
    value, matrix, in_rows, bias = _arguments(node)
    if not isinstance(value, fx.Node) or not isinstance(matrix, fx.Node):
        return None
    result, left, right = node.meta["val"], value.meta["val"], matrix.meta["val"]
    if right.ndim != 2 or left.ndim < 1 or not left.dtype is right.dtype is result.dtype in LOW_DTYPES:
        return None
    if bias is not None:
        if not isinstance(bias, fx.Node):
            return None
        added = bias.meta["val"]
        if added.dtype is not result.dtype or added.shape != result.shape[-1:]:
            return None
    source, in_rows = _behind_transposes(matrix, in_rows)
    if CAST_META in source.meta and is_cast(source):
        wide = source.all_input_nodes[0]
        if wide.meta["val"].dtype is torch.float32:
            source, in_rows = _behind_transposes(wide, in_rows)
    return Linear(node, value, matrix, source, in_rows, bias)


def _behind_transposes(matrix: fx.Node, in_rows: bool) -> tuple[fx.Node, bool]:
    while _is_transpose(matrix):
        matrix, in_rows = matrix.all_input_nodes[0], not in_rows
    return matrix, in_rows


def _is_transpose(node: fx.Node) -> bool:
    if node.target in _TRANSPOSES:
        return True
    if node.target is aten.permute.default:
        return [dim % 2 for dim in node.args[1]] == [1, 0]  # type: ignore[union-attr]  # of two dimensions
    return node.target is aten.transpose.int and {dim % 2 for dim in node.args[1:]} == {0, 1}  # type: ignore[operator]  # numbers


def _arguments(node: fx.Node) -> tuple[object, object, bool, object]:
    """(value, matrix, whether its rows are contracted, bias)."""
    form = LINEARS.get(node.target)  # type: ignore[call-overload]  # a target that is a string is not in it
    if form is None:
        return None, None, False, None
    bias = None if form.bias is None or form.bias >= len(node.args) else node.args[form.bias]
    return node.args[form.input], node.args[form.weight], form.by_rows, bias
