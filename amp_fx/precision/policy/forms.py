"""Arithmetic on weights alone: rows with scales, norms folded in; for nodes of a graph and for tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amp_fx.precision.policy.levels import LEVELS
from amp_fx.precision.policy.scaled import Emit, run, scale_of, scaled

aten = torch.ops.aten

#: of equalisation: both powers, 2 ** 14 and 2 ** -14, are normal numbers in fp16
MOST_EXPONENT = 14


@dataclass(frozen=True)
class ScaledRows:
    """A matrix with one factor for each column of what it is multiplied to. Two tensors.

    The first is (columns, contracted), contiguous, in the dtype of the level; the second fp32 (columns, 1): ``data *
    factors`` is the matrix. Where factors are powers of two, scaling itself rounds nothing, so that every runtime
    computes the same copy.

    Attributes:
        level: name of the level, which has a scale for each row.
        in_rows: True if the weight is (columns, contracted), else it is the other way round.
        bits: of int8 that are used.
        equalisation: exponents of two, one for each contracted channel, or none: the matrix is multiplied by these
            powers first, as what it multiplies is divided by them.
    """

    level: str
    in_rows: bool
    bits: int = 8
    equalisation: tuple[int, ...] = ()

    def __call__(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of a weight."""
        return self._made(weight, weight.dtype, run)

    def steps(self, weight: Any, call: Emit) -> tuple[Any, Any]:
        """The tensors as nodes of a graph, each made with ``call``."""
        return self._made(weight, weight.meta["val"].dtype, call)

    def _made(self, weight: Any, dtype: torch.dtype, call: Emit) -> tuple[Any, Any]:
        level, is_wide = LEVELS[self.level], dtype is torch.float32
        rows = weight if self.in_rows else call(aten.permute.default, weight, [1, 0])
        if self.equalisation:
            powers = powers_beside(self.equalisation, weight, call)
            rows, is_wide = call(aten.mul.Tensor, rows, powers), True
        scale = scale_of(rows, level.dtype, [[-1]], call, powers=level.powers, is_wide=is_wide)
        if level.dtype is torch.int8 and self.bits < 8:
            scale = call(aten.mul.Tensor, scale, 2.0 ** (self.bits - 8))
        data, factors = scaled(rows, scale, level.dtype, call)
        return call(aten.clone.default, data, memory_format=torch.contiguous_format), factors


def powers_of_two(exponents: Sequence[int], like: Any, call: Emit) -> Any:
    """Powers of two in fp32, one for each exponent, on the device of another value."""
    value = like.meta["val"] if hasattr(like, "meta") else like
    return call(torch.tensor, [2.0**each for each in exponents], dtype=torch.float32, device=value.device)


def powers_beside(exponents: Sequence[int], weight: Any, call: Emit) -> Any:
    """Powers of two as they are computed from a weight, so that they are kept, or stored, beside it."""
    one = call(aten.new_ones.default, weight, [1])
    return call(aten.mul.Tensor, powers_of_two(exponents, weight, call), one)


def with_norm(
    weight: Any, bias: Any, norm: Sequence[Any], sizes: Sequence[int], call: Emit
) -> tuple[Any, Any]:
    """Weight and bias of a convolution or a product, in fp32, with a norm behind it folded in.

    Args:
        weight: in fp32 or low.
        bias: or None.
        norm: scale or None, shift or None, mean, variance and epsilon of a BatchNorm in inference.
        sizes: -1 for the dimension of the weight that is the result's channels, else 1.
        call: runs each op, or adds it to a graph.
    """
    scale, shift, mean, variance, epsilon = norm
    factor = call(aten.rsqrt.default, call(aten.add.Tensor, variance, epsilon))
    if scale is not None:
        factor = call(aten.mul.Tensor, factor, scale)
    moved = call(aten.neg.default, mean) if bias is None else call(aten.sub.Tensor, bias, mean)
    moved = call(aten.mul.Tensor, moved, factor)
    if shift is not None:
        moved = call(aten.add.Tensor, moved, shift)
    return call(aten.mul.Tensor, weight, call(aten.reshape.default, factor, list(sizes))), moved
