"""Recipes: how tensors are derived from weights. They are cast, scaled, or folded and packed by Inductor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.fx as fx
from torch import Tensor

from amp_fx._torch import autocast_disabled, borrowed
from amp_fx.graphs.keys import RECIPE_META
from amp_fx.policy.levels import LEVELS
from amp_fx.policy.scaled import Emit, run, scale_of, scaled

__all__ = ["Cast", "CopyRecipe", "Folded", "Recipe", "Scaled", "recipe_of"]

aten = torch.ops.aten


class Recipe(Protocol):
    """How tensors are derived from weights. Recipes that do the same are equal."""

    def make(self, weights: Sequence[Tensor], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The derived tensors. ``before``: those of these weights before, written to if possible; else empty."""
        ...


@dataclass(frozen=True)
class Cast:
    """The weight in a low dtype, laid out as it is. One tensor."""

    dtype: torch.dtype

    def make(self, weights: Sequence[Tensor], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See :class:`Recipe`."""
        [weight] = weights
        tensors = before or (torch.empty_like(weight, dtype=self.dtype, requires_grad=False),)
        tensors[0].copy_(weight)
        return tensors


@dataclass(frozen=True)
class Scaled:
    """A matrix with one factor for each column of what it is multiplied to. Two tensors.

    The first is (columns, contracted), contiguous, in the dtype of the level; the second fp32 (columns, 1): ``data *
    factors`` is the matrix. Where factors are powers of two, scaling itself rounds nothing, so that every runtime
    computes the same copy.

    Attributes:
        level: name of the level, which has a scale for each row.
        in_rows: True if the weight is (columns, contracted), else it is the other way round.
    """

    level: str
    in_rows: bool

    def make(self, weights: Sequence[Tensor], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See :class:`Recipe`."""
        [weight] = weights
        made = self.made(weight)
        for tensor, value in zip(before, made, strict=bool(before)):
            tensor.copy_(value)
        return before or made

    def made(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of a weight."""
        return self._made(weight, weight.dtype, run)

    def steps(self, weight: fx.Node, call: Emit) -> tuple[fx.Node, fx.Node]:
        """The copy as nodes of a graph, each made with ``call``."""
        return self._made(weight, weight.meta["val"].dtype, call)

    def _made(self, weight: Any, dtype: torch.dtype, call: Emit) -> tuple[Any, Any]:
        level, is_wide = LEVELS[self.level], dtype is torch.float32
        rows = weight if self.in_rows else call(aten.permute.default, weight, [1, 0])
        scale = scale_of(rows, level.dtype, [[-1]], call, powers=level.powers, is_wide=is_wide)
        data, factors = scaled(rows, scale, level.dtype, call)
        return call(aten.clone.default, data, memory_format=torch.contiguous_format), factors


@dataclass(frozen=True)
class Folded:
    """What Inductor has computed from weights: with BatchNorm folded in, packed for oneDNN. One tensor.

    Attributes:
        expression: what computes it, without the weights.
        layout: how oneDNN has packed it; empty if it is not packed.
        is_returned: True if a caller gets it, and may keep it when the weights change: it is not written to.
        program: computes it from the weights.
    """

    expression: str
    layout: bytes
    is_returned: bool
    program: fx.GraphModule = field(compare=False, repr=False)

    def make(self, weights: Sequence[Tensor], before: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """See :class:`Recipe`."""
        with autocast_disabled():
            value: Tensor = self.program(*weights)
        if not value.is_mkldnn and any(
            value.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr() for weight in weights
        ):
            # what lies in the memory of a weight does not keep it
            return (borrowed(value),)
        if not before or self.is_returned:
            return (value,)
        before[0].copy_(value)
        return before


#: recipes of copies that graphs read as inputs
CopyRecipe = Cast | Scaled


def recipe_of(node: fx.Node) -> tuple[CopyRecipe, int]:
    """The recipe of an input that is a copy of a weight, and which of its tensors the input is."""
    return node.meta.get(RECIPE_META) or (Cast(node.meta["val"].dtype), 0)
