"""Weights, and low copies of them as a graph has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from amp_fx.weights.derived import DerivedInputs, Input, WeightCache
from amp_fx.weights.recipes import Cast

__all__ = ["are_current", "copies_for", "new_weights"]


def new_weights() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(shape)) for shape in ((64, 48), (48,), (3,), (8, 4, 3, 3))]


def copies_for(count: int, dtype: torch.dtype = torch.bfloat16) -> WeightCache[list[Tensor]]:
    """The copies of so many weights in a graph."""
    places = range(count)
    return WeightCache(DerivedInputs([(Cast(dtype), (at,)) for at in places], [*map(Input, places)]).derive)


def are_current(copies: WeightCache[list[Tensor]], parameters: Sequence[Tensor]) -> bool:
    return all(torch.equal(c, p.to(c.dtype)) for c, p in zip(copies.of(parameters), parameters, strict=True))
