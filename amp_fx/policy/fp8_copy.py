"""The formula of an fp8 copy: its scales, and the values that are kept. Nodes of a graph and tensors have the same one.

Scales are those of torchao: the largest magnitude becomes the largest number of the dtype. FP8 Formats for Deep
Learning, https://arxiv.org/abs/2209.05433.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Call", "fp8_copy", "fp8_scale", "run", "scaled"]

aten, prims = torch.ops.aten, torch.ops.prims

#: the smallest magnitude that a scale is made for: scale and inverse are normal numbers in fp32, and zeros stay zeros
_LEAST = 2.0**-100


class Call(Protocol):
    """Runs an op, or adds it to a graph."""

    def __call__(self, target: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The result."""
        ...


def run(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The :class:`Call` for tensors."""
    return target(*args, **kwargs)


def fp8_copy(
    value: Any,
    dtype: torch.dtype,
    groups: Sequence[Sequence[int]],
    call: Call,
    *,
    powers: bool,
    is_wide: bool,
) -> tuple[Any, Any]:
    """A value in fp8, and what gives it back: :func:`fp8_scale`, and then :func:`scaled`."""
    scale = fp8_scale(value, dtype, groups, call, powers=powers, is_wide=is_wide)
    return scaled(value, scale, dtype, call)


def fp8_scale(
    value: Any,
    dtype: torch.dtype,
    groups: Sequence[Sequence[int]],
    call: Call,
    *,
    powers: bool,
    is_wide: bool,
) -> Any:
    """What a value is multiplied by before it is rounded to fp8.

    Args:
        value: of any shape.
        dtype: e4m3 or e5m2.
        groups: dimensions over which a scale is shared, reduced one group after the other.
        call: what every step is made with.
        powers: scales are powers of two, so that scaling itself rounds nothing.
        is_wide: the value is fp32.

    Returns:
        fp32, of size 1 in the dimensions of the groups.
    """
    amax = call(aten.abs.default, value)
    for dims in groups:
        amax = call(aten.amax.default, amax, dims, True)
    if not is_wide:
        amax = call(prims.convert_element_type.default, amax, torch.float32)
    amax = call(aten.clamp_min.default, amax, _LEAST)
    scale = call(aten.mul.Tensor, call(aten.reciprocal.default, amax), torch.finfo(dtype).max)
    if powers:
        for function in (aten.log2.default, aten.floor.default, aten.exp2.default):
            scale = call(function, scale)
    return scale


def scaled(value: Any, scale: Any, dtype: torch.dtype, call: Call) -> tuple[Any, Any]:
    """A value in fp8, and what gives it back.

    Args:
        value: of any shape.
        scale: from :func:`fp8_scale`.
        dtype: e4m3 or e5m2.
        call: what every step is made with.

    Returns:
        The value in fp8, shaped and laid out as it was; and the factors in fp32, which are 1 / scale.
        ``value ~ data * factors``.
    """
    largest = torch.finfo(dtype).max
    # widened by the product itself: a cast of its own would make Inductor keep the value in fp32
    data = call(aten.mul.Tensor, value, scale)
    data = call(aten.clamp_min.default, data, -largest)
    data = call(aten.clamp_max.default, data, largest)
    return call(prims.convert_element_type.default, data, dtype), call(aten.reciprocal.default, scale)
