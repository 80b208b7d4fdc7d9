"""Tensors: which of them mixed precision may re-type, and how large they are."""

from __future__ import annotations

import math
from typing import Any, TypeGuard

import torch
from torch.utils._pytree import tree_leaves

from amp_fx._torch import FakeTensor, size_hint

__all__ = ["LOW_DTYPES", "cast_bytes", "is_eligible", "numel", "tensors"]

#: dtypes that amp_fx places; fp8 and fp64 are the program's own business
LOW_DTYPES = (torch.bfloat16, torch.float16)
_PLACED_DTYPES = (torch.float32, *LOW_DTYPES)


def tensors(value: Any) -> list[torch.Tensor]:
    """Tensors inside a nested value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_eligible(value: Any) -> TypeGuard[torch.Tensor]:
    """True for a tensor that mixed precision may re-type: plain, strided, fp32, bf16 or fp16.

    The rule of ``is_eligible`` in ``ATen/autocast_mode.h`` (floating, not fp64), without tensor subclasses,
    which choose their own storage.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in _PLACED_DTYPES
        and value.layout is torch.strided
        and type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
    )


def numel(value: torch.Tensor) -> int:
    """Number of elements; symbolic sizes count with the hint they were traced with."""
    return math.prod(size_hint(size) for size in value.shape)


def cast_bytes(value: torch.Tensor, to: torch.dtype) -> int:
    """Bytes a cast of ``value`` reads and writes when it is a kernel of its own."""
    return numel(value) * (value.dtype.itemsize + to.itemsize)
