"""Ops that random programs call, and that no library has: the user's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amp_fx._torch import quantised_ops


class Twice(torch.autograd.Function):
    """A product whose backward the user has written."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]  # theirs takes anything
        ctx.save_for_backward(x, y)
        return 2 * (x @ y)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]  # theirs takes anything
        x, y = ctx.saved_tensors
        return 2 * (g @ y.mT), 2 * (x.mT @ g)


@torch.library.custom_op("amp_fx_fuzz::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return 2 * x


twice.register_fake(lambda x: torch.empty_like(2 * x))
twice.register_autograd(lambda ctx, g: 2 * g)


@torch.library.custom_op("amp_fx_fuzz::bump", mutates_args={"x"})
def bump(x: Tensor) -> None:
    x.add_(1)


bump.register_fake(lambda x: None)


@torch.library.custom_op("amp_fx_fuzz::bits", mutates_args=())
def bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.view(dtype).clone()


bits.register_fake(lambda x, dtype: x.view(dtype).clone())
#: registers them
quantised_ops()
