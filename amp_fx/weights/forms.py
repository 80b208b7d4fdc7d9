"""What a copy of a weight may be: the weight in a low dtype, or narrower, with its scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from amp_fx.policy.levels import LEVELS
from amp_fx.policy.scaled import Call, run, scale_of, scaled

__all__ = ["FORM_META", "Cast", "Form", "Scaled", "form_of", "new_copy"]

aten = torch.ops.aten

#: node.meta key of an input that is a copy of a weight: its form, and which of the form's tensors it is
FORM_META = "amp_fx_copy_form"


@dataclass(frozen=True)
class Cast:
    """The weight in another dtype, laid out as it is. One tensor.

    Attributes:
        dtype: low.
    """

    dtype: torch.dtype

    def empty(self, weight: Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """The tensors, with nothing in them yet."""
        return (torch.empty_like(weight, dtype=self.dtype, device=device, requires_grad=False),)

    def write(self, weight: Tensor, tensors: tuple[Tensor, ...]) -> None:
        """Makes the copy, in place."""
        tensors[0].copy_(weight)


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

    def empty(self, weight: Tensor, device: torch.device) -> tuple[Tensor, ...]:
        """The tensors, with nothing in them yet."""
        columns, contracted = weight.shape if self.in_rows else reversed(weight.shape)
        data = torch.empty(columns, contracted, dtype=LEVELS[self.level].dtype, device=device)
        return data, torch.empty(columns, 1, dtype=torch.float32, device=device)

    def write(self, weight: Tensor, tensors: tuple[Tensor, ...]) -> None:
        """Makes the copy, in place."""
        for tensor, value in zip(tensors, self.made(weight), strict=True):
            tensor.copy_(value)

    def made(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The tensors of a weight."""
        return self._made(weight, weight.dtype, run)

    def steps(self, weight: fx.Node, call: Call) -> tuple[fx.Node, fx.Node]:
        """The copy as nodes of a graph, each made with ``call``."""
        return self._made(weight, weight.meta["val"].dtype, call)

    def _made(self, weight: Any, dtype: torch.dtype, call: Call) -> tuple[Any, Any]:
        level, is_wide = LEVELS[self.level], dtype is torch.float32
        rows = weight if self.in_rows else call(aten.permute.default, weight, [1, 0])
        scale = scale_of(rows, level.dtype, [[-1]], call, powers=level.powers, is_wide=is_wide)
        data, factors = scaled(rows, scale, level.dtype, call)
        return call(aten.clone.default, data, memory_format=torch.contiguous_format), factors


Form = Cast | Scaled


def form_of(node: fx.Node) -> tuple[Form, int]:
    """The form of an input that is a copy of a weight, and which of its tensors the input is."""
    return node.meta.get(FORM_META) or (Cast(node.meta["val"].dtype), 0)


def new_copy(weight: Tensor, form: Form) -> tuple[Tensor, ...]:
    """The tensors of a copy that nobody keeps."""
    # an inference tensor could not be written to outside inference mode
    with torch.inference_mode(False), torch.no_grad():
        tensors = form.empty(weight, weight.device)
        form.write(weight, tensors)
    return tensors
