"""Calls that multiply the rows of a tensor by one matrix: with their gradients, the matmuls that may run in fp8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

__all__ = ["LINEARS", "LINEAR_OPS", "LinearForm", "linear_form"]

aten = torch.ops.aten


@dataclass(frozen=True)
class LinearForm:
    """``input @ weight.T + bias`` or ``input @ weight + bias``.

    Attributes:
        input: position of the argument whose rows are multiplied.
        weight: of the matrix.
        bias: of what is added, or None.
        by_rows: the rows of the matrix are contracted, not its columns.
    """

    input: int
    weight: int
    bias: int | None
    by_rows: bool


#: target -> how it multiplies, where its second factor is a matrix
LINEARS = {
    aten.linear.default: LinearForm(0, 1, 2, by_rows=True),
    aten.addmm.default: LinearForm(1, 2, 0, by_rows=False),
    aten.mm.default: LinearForm(0, 1, None, by_rows=False),
    aten.matmul.default: LinearForm(0, 1, None, by_rows=False),
}

#: the same by ATen name: position of the matrix
LINEAR_OPS = {target._schema.name.removeprefix("aten::"): linear.weight for target, linear in LINEARS.items()}


def linear_form(node: fx.Node) -> LinearForm | None:
    """How a call multiplies rows by one matrix; None for any other call.

    ``matmul`` is one where its first argument has rows, and its second is a matrix.
    """
    found = LINEARS.get(node.target)  # type: ignore[call-overload]  # a target that is a string is not in it
    if found is None or node.kwargs:
        return None
    operands = [node.args[found.input], node.args[found.weight]]
    values = [operand.meta["val"] for operand in operands if isinstance(operand, fx.Node)]
    if len(values) < 2 or values[0].ndim < 2 or values[1].ndim != 2:
        return None
    return found
