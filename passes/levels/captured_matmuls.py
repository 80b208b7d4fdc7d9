"""The matmuls of a captured graph: a value, whose last dimension is contracted, times a matrix."""

from __future__ import annotations

import math

import torch
import torch.fx as fx

from amp_fx.graphs.calls import is_cast
from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.keys import CAST_META, REGION_META
from amp_fx.graphs.traits import op_row
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.passes.base import PassContext
from amp_fx.passes.levels.matmuls import Matmul, Operand, aten
from amp_fx.plans.label import Kind, label_of
from amp_fx.policy import OpClass
from amp_fx.policy.levels import FORWARD
from amp_fx.policy.rules import BELOW

__all__ = ["captured_matmul", "may_run_below"]

_TRANSPOSES = frozenset({aten.t.default, aten.numpy_T.default, aten.mT.default, aten.adjoint.default})


def may_run_below(node: fx.Node, context: PassContext) -> bool:
    """True for a matmul that policy and plan let run below 16 bits."""
    row = label_of(node)
    if row is None or row.dtype not in LOW_DTYPES or not is_matmul(node):
        return False
    rule = context.policy.rule_for(row.op, row.module_path)
    if rule is not None:
        return rule.precision in BELOW
    if row.is_because(Kind.WIDE_RESULT):
        return False
    region = node.meta.get(REGION_META, {}).get(node.meta["val"].device.type)
    return row.op_class is OpClass.LOW or (region is not None and region.enabled)


def captured_matmul(node: fx.Node, context: PassContext) -> Matmul | None:
    """The product that a call is; None where it is none of 16-bit values and a matrix."""
    form, row = op_row(node).linear, label_of(node)
    if form is None or node.kwargs or row is None:
        return None
    value, matrix = node.args[form.input], node.args[form.weight]
    bias = None if form.bias is None or form.bias >= len(node.args) else node.args[form.bias]
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
    first = Operand(value, value, "", True, frozenset(value.users))
    second = _weight(matrix, context.folded, in_rows=form.by_rows)
    contracted, columns = reversed(right.shape) if form.by_rows else right.shape
    sizes = math.prod(left.shape[:-1]), contracted, columns
    return Matmul(node, row.name, FORWARD, (first, second), sizes, bias)


def _weight(matrix: fx.Node, folded: frozenset[str], *, in_rows: bool) -> Operand:
    """What a value is multiplied by; its source is what it was before a pass has cast it.

    Args:
        matrix: in the low dtype.
        folded: inputs of which copies are made outside the graph.
        in_rows: the rows of the matrix are contracted, not its columns.
    """
    base, in_rows = _behind_transposes(matrix, in_rows)
    source = base
    if CAST_META in base.meta and is_cast(base):
        wide = base.all_input_nodes[0]
        if wide.meta["val"].dtype is torch.float32:
            source, in_rows = _behind_transposes(wide, in_rows)
    return Operand(
        base,
        source,
        str(in_rows),
        in_rows,
        frozenset(matrix.users),
        transposed=not in_rows,
        is_weight=True,
        is_folded=source.name in folded,
    )


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
