"""Calls that multiply the rows of a tensor by one matrix: they, and their gradients, may run below 16 bits."""

from __future__ import annotations

import torch
import torch.fx as fx

from amp_fx.graphs.traits import OPS, LinearForm, op_row

__all__ = ["LINEARS", "LINEAR_OPS", "LinearForm", "linear_form"]

aten = torch.ops.aten


#: by ATen name: position of the matrix
LINEAR_OPS = {name: row.linear.weight for name, row in OPS.items() if row.linear is not None}

#: the same by target: how it multiplies, where its second factor is a matrix
LINEARS = {getattr(aten, name).default: OPS[name].linear for name in LINEAR_OPS}


def linear_form(node: fx.Node) -> LinearForm | None:
    """How a call multiplies rows by one matrix; None for any other call.

    ``matmul`` is one where its first argument has rows, and its second is a matrix.
    """
    found = op_row(node).linear
    if found is None or node.kwargs:
        return None
    operands = [node.args[found.input], node.args[found.weight]]
    values = [operand.meta["val"] for operand in operands if isinstance(operand, fx.Node)]
    if len(values) < 2 or values[0].ndim < 2 or values[1].ndim != 2:
        return None
    return found
