"""A linear with an eye on its three matmuls: what it would cost if each of them read its operands below 16 bits.

The forward multiplies input and weight, the backward the gradient of the result by the weight and by the input. Each of
these has a copy of its own, scaled along what it contracts. So the input and the weight have an alias each for forward
and backward, and the gradient of the result has one for each of the two matmuls that read it: one double backward gives
the sensitivity of all six.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amp_fx.calibration.meter import Meter, sample_stride
from amp_fx.policy.levels import FORWARD, INPUT, WEIGHT, Level, Scale
from amp_fx.policy.scaled import run, scale_of, scaled

__all__ = ["multiply", "read_below", "scaled_error"]


def multiply(meter: Meter, call: tuple[int, str], x: Tensor, weight: Tensor, *, by_rows: bool) -> Tensor:
    """``x @ weight.T`` or ``x @ weight``, which can be differentiated twice.

    Args:
        meter: of the step, with a level.
        call: number of the graph, name of the call.
        x: (..., rows, contracted).
        weight: (columns, contracted) ``by_rows``, else (contracted, columns).
        by_rows: the rows of the weight are contracted, not its columns.

    Returns:
        (..., rows, columns).
    """
    watch = _Watch(meter, call)
    x_back = watch.alias(x, WEIGHT, "input", in_rows=False)
    weight_back = watch.alias(weight, INPUT, "weight", in_rows=not by_rows)
    x, weight = read_below(meter, call, x, weight, by_rows=by_rows)
    return _Product.apply(x, weight, x_back, weight_back, watch, by_rows)  # type: ignore[no-any-return]


def read_below(
    meter: Meter, call: tuple[int, str], x: Tensor, weight: Tensor, *, by_rows: bool
) -> tuple[Tensor, Tensor]:
    """Both operands of the matmul of the forward, each with an eye on what a copy below 16 bits would cost there.

    Args:
        meter: of the step, with a level.
        call: number of the graph, name of the call.
        x: (..., rows, contracted).
        weight: (columns, contracted) ``by_rows``, else (contracted, columns).
        by_rows: the rows of the weight are contracted, not its columns.
    """
    watch = _Watch(meter, call)
    return (
        watch.alias(x, FORWARD, "input", in_rows=True),
        watch.alias(weight, FORWARD, "weight", in_rows=by_rows),
    )


class _Product(torch.autograd.Function):
    """The product; its backward reads aliases of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        x_back: Tensor,
        weight_back: Tensor,
        watch: _Watch,
        by_rows: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_back, weight_back)
        ctx.watch, ctx.by_rows = watch, by_rows
        return x @ (weight.mT if by_rows else weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        for_input = ctx.watch.gradient(gradients[0], INPUT, in_rows=True)
        for_weight = ctx.watch.gradient(gradients[0], WEIGHT, in_rows=False)
        rows, outer = x.flatten(0, -2), for_weight.flatten(0, -2)
        of_weight = outer.mT @ rows if ctx.by_rows else rows.mT @ outer
        return for_input @ (weight if ctx.by_rows else weight.mT), of_weight, None, None, None, None


class _Watch:
    """Has an eye on what the matmuls of one call read."""

    def __init__(self, meter: Meter, call: tuple[int, str]) -> None:
        if meter.level is None:
            raise AssertionError("a meter without a level measures nothing below 16 bits")
        self._level, self._meter, self._call = meter.level, meter, call

    def gradient(self, gradient: Tensor, role: str, *, in_rows: bool) -> Tensor:
        """The gradient of the result, for one of the matmuls that read it."""
        if self._meter.phase != 1 or not gradient.requires_grad:
            return gradient
        return self.alias(gradient, role, "gradient", in_rows=in_rows)

    def alias(self, value: Tensor, role: str, operand: str, *, in_rows: bool) -> Tensor:
        """An operand of one matmul, by itself: its gradient tells what a copy of it would cost there."""
        alias, key = value.view_as(value), (*self._call, role, operand)
        if role == WEIGHT and not self._level.weight_gradients:
            return alias
        dtype = self._level.dtype_of(is_gradient=operand == "gradient")
        error, stride = scaled_error(value, dtype, self._level, in_rows=in_rows)

        def hook(sensitivity: Tensor | None) -> None:
            # None where nothing depends on what the backward reads
            if self._meter.phase == 2 and sensitivity is not None:
                self._meter.add(self._meter.roles, key, sensitivity, error, stride)

        self._meter.roles.setdefault(key, 0.0)
        alias.register_hook(hook)
        return alias


def scaled_error(value: Tensor, dtype: torch.dtype, level: Level, *, in_rows: bool) -> tuple[Tensor, int]:
    """What a copy with scales differs by, at elements at equal steps, in bf16; and how far a step goes.

    Args:
        value: fp32, of at least two dimensions; all but the last are rows.
        dtype: of the copy.
        level: says what a scale stands for. It always comes from the whole value.
        in_rows: rows are contracted, which are scaled one by one, or by blocks; else columns.
    """
    matrix = value.detach().reshape(-1, value.shape[-1])
    stride = sample_stride(value.shape)
    places = torch.arange(0, matrix.numel(), stride, device=matrix.device)
    sample = matrix.reshape(-1)[::stride]
    row, column = places // matrix.shape[1], places % matrix.shape[1]
    if level.scale is Scale.WHOLE:
        largest = torch.linalg.vector_norm(matrix, math.inf).expand(places.shape)
    elif in_rows:
        largest = _largest(matrix, level.block, row, column)
    else:
        largest = _largest(matrix.mT, level.block, column, row)
    # each element beside the largest of those that share its scale: a group of two has the same scale
    pairs = torch.stack([sample, largest], dim=1)
    scale = scale_of(pairs, dtype, [[1]], run, powers=level.powers, is_wide=True)
    data, factors = scaled(pairs, scale, dtype, run)
    error = (data.to(sample.dtype) * factors)[:, 0] - sample
    return error.to(torch.bfloat16), stride


def _largest(matrix: Tensor, block: int | None, row: Tensor, column: Tensor) -> Tensor:
    """The largest magnitude in the row, or in its block, of elements."""
    if block is None:
        return torch.linalg.vector_norm(matrix, math.inf, 1)[row]
    # what a block does not divide stays low; its last block is measured as if zeros filled it up
    blocks = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % block)).unflatten(1, (-1, block))
    return torch.linalg.vector_norm(blocks, math.inf, 2)[row, column // block]
