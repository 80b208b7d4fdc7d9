"""A linear with an eye on its three matmuls: what it would cost if each of them read its operands in fp8.

The forward multiplies input and weight, the backward the gradient of the result by the weight and by the input. Each of
these has a copy in fp8 of its own, scaled along what it contracts. So the input and the weight have an alias each for
forward and backward, and the gradient of the result has one for each of the two matmuls that read it: one double
backward gives the sensitivity of all six.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_fx.calibration.meter import Meter, RoleKey, sample_stride
from amp_fx.policy.fp8 import FORWARD, INPUT, WEIGHT, Recipe
from amp_fx.policy.fp8_copy import fp8_copy, run

__all__ = ["fp8_error", "multiply"]


def multiply(meter: Meter, call: tuple[int, str], x: Tensor, weight: Tensor, *, by_rows: bool) -> Tensor:
    """``x @ weight.T`` or ``x @ weight``, which can be differentiated twice.

    Args:
        meter: of the step, with a recipe.
        call: number of the graph, name of the call.
        x: (..., rows, contracted).
        weight: (columns, contracted) ``by_rows``, else (contracted, columns).
        by_rows: the rows of the weight are contracted, not its columns.

    Returns:
        (..., rows, columns).
    """
    watch = _Watch(meter, call)
    x_back, weight_back = x.view_as(x), weight.view_as(weight)
    x, weight = x.view_as(x), weight.view_as(weight)
    watch.value(x, FORWARD, "input", in_rows=True)
    watch.value(weight, FORWARD, "weight", in_rows=by_rows)
    watch.value(weight_back, INPUT, "weight", in_rows=not by_rows)
    recipe = meter.recipe
    if recipe is not None and recipe.weight_gradients:
        watch.value(x_back, WEIGHT, "input", in_rows=False)
    return _Product.apply(x, weight, x_back, weight_back, watch.gradients, by_rows)  # type: ignore[no-any-return]


class _Product(torch.autograd.Function):
    """The product; its backward reads aliases of its own."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        x_back: Tensor,
        weight_back: Tensor,
        watch: Callable[[Tensor], tuple[Tensor, Tensor]],
        by_rows: bool,
    ) -> Tensor:
        ctx.save_for_backward(x_back, weight_back)
        ctx.watch, ctx.by_rows = watch, by_rows
        return x @ (weight.mT if by_rows else weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        for_input, for_weight = ctx.watch(gradients[0])
        rows, outer = x.flatten(0, -2), for_weight.flatten(0, -2)
        of_weight = outer.mT @ rows if ctx.by_rows else rows.mT @ outer
        return for_input @ (weight if ctx.by_rows else weight.mT), of_weight, None, None, None, None


class _Watch:
    """Puts hooks on what the matmuls of one call read."""

    def __init__(self, meter: Meter, call: tuple[int, str]) -> None:
        self._meter = meter
        self._call = call

    def value(self, value: Tensor, role: str, operand: str, *, in_rows: bool) -> None:
        """An input or a weight: ``value`` has to be an alias of its own."""
        key = (*self._call, role, operand)
        error, stride = self._error(value, torch.float8_e4m3fn, in_rows)

        def hook(sensitivity: Tensor | None) -> None:
            # None where nothing depends on what the backward reads
            if self._meter.phase == 2 and sensitivity is not None:
                self._add(key, sensitivity, error, stride)

        self._meter.fp8.setdefault(key, 0.0)
        value.register_hook(hook)

    def gradients(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The gradient of the result, for the gradient of the input and for that of the weight."""
        recipe = self._meter.recipe
        if recipe is None or self._meter.phase != 1 or not gradient.requires_grad:
            return gradient, gradient
        for_input = self._gradient(gradient, INPUT, recipe.gradient, in_rows=True)
        if not recipe.weight_gradients:
            return for_input, gradient
        return for_input, self._gradient(gradient, WEIGHT, recipe.gradient, in_rows=False)

    def _gradient(self, gradient: Tensor, role: str, dtype: torch.dtype, *, in_rows: bool) -> Tensor:
        key = (*self._call, role, "gradient")
        error, stride = self._error(gradient, dtype, in_rows)
        self._meter.fp8.setdefault(key, 0.0)
        alias = gradient.view_as(gradient)
        alias.register_hook(lambda sensitivity: self._add(key, sensitivity, error, stride))
        return alias

    def _error(self, value: Tensor, dtype: torch.dtype, in_rows: bool) -> tuple[Tensor, int]:
        if self._meter.recipe is None:
            raise AssertionError("a meter without a recipe measures nothing of fp8")
        return fp8_error(value, dtype, self._meter.recipe, in_rows=in_rows)

    def _add(self, key: RoleKey, sensitivity: Tensor, error: Tensor, stride: int) -> None:
        self._meter.add(self._meter.fp8, key, sensitivity, error, stride)


def fp8_error(value: Tensor, dtype: torch.dtype, recipe: Recipe, *, in_rows: bool) -> tuple[Tensor, int]:
    """What a copy in fp8 differs by, at elements at equal steps, in bf16; and how far a step goes.

    Args:
        value: fp32, of at least two dimensions; all but the last are rows.
        dtype: e4m3 or e5m2.
        recipe: says what a scale stands for. It always comes from the whole value.
        in_rows: rows are contracted, which are scaled one by one, or by blocks; else columns.
    """
    matrix = value.detach().reshape(-1, value.shape[-1])
    stride = sample_stride(value)
    places = torch.arange(0, matrix.numel(), stride, device=matrix.device)
    sample = matrix.reshape(-1)[::stride]
    row, column = places // matrix.shape[1], places % matrix.shape[1]
    if not recipe.by_row:
        largest = torch.linalg.vector_norm(matrix, math.inf).expand(places.shape)
    elif in_rows:
        largest = _largest(matrix, recipe.block, row, column)
    else:
        largest = _largest(matrix.mT, recipe.block, column, row)
    # each element beside the largest of those that share its scale: a group of two has the same scale
    pairs = torch.stack([sample, largest], dim=1)
    data, factors = fp8_copy(pairs, dtype, [[1]], run, powers=recipe.powers, is_wide=True)
    error = (data.to(sample.dtype) * factors)[:, 0] - sample
    return error.to(torch.bfloat16), stride


def _largest(matrix: Tensor, block: int | None, row: Tensor, column: Tensor) -> Tensor:
    """The largest magnitude in the row, or in its block, of elements."""
    if block is None:
        return torch.linalg.vector_norm(matrix, math.inf, 1)[row]
    # what a block does not divide runs in no fp8; its last block is measured as if zeros filled it up
    blocks = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % block)).unflatten(1, (-1, block))
    return torch.linalg.vector_norm(blocks, math.inf, 2)[row, column // block]
