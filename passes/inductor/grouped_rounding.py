"""Values in 8 and in 4 bits, with a scale for each group of elements that lie side by side; bools in one bit.

GACT (https://arxiv.org/abs/2206.11357) and COAT (https://arxiv.org/abs/2410.19313) keep activations in such groups
between forward and backward. Plain functions of tensors, which passes trace into a graph. ``order`` are a value's
dimensions from the outermost stride to the innermost, which is contiguous and a multiple of ``group``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from amp_fx._torch import uniform_noise

#: elements that share a scale where the contiguous dimension divides, else the next
GROUPS = (64, 32, 16)
#: bools in a byte
BITS = 8
#: the largest number of a finite element; one more in magnitude stands for an infinity
_MOST = 126
#: steps between the least and the largest element of a group in 4 bits
_STEPS = 15
_SCALE = torch.bfloat16


def _in_groups(value: Tensor, order: Sequence[int], group: int) -> Tensor:
    return value.permute(*order).unflatten(-1, (-1, group))


def _as_it_was(groups: Tensor, order: Sequence[int]) -> Tensor:
    return groups.flatten(-2).permute(*(order.index(dim) for dim in range(len(order))))


def to_int8(value: Tensor, order: Sequence[int], group: int) -> tuple[Tensor, Tensor]:
    """int8 numbers in the shape of ``value.permute(order)``, and for each group a scale.

    Symmetric: zeros stay zeros. Infinities stay what they are, and a group that has a NaN becomes NaN.
    """
    wide = _in_groups(value, order, group).float()
    magnitude = wide.abs()
    largest = torch.where(magnitude == torch.inf, 0.0, magnitude).amax(-1, keepdim=True)
    # the numbers are those of the scale as it is kept
    scale = (largest * (1 / _MOST)).to(_SCALE)
    step = scale.float()
    # a kernel may have more digits of the value than its largest magnitude was found with: no finite number is beyond
    numbers = (wide / torch.where(step == 0, 1.0, step)).round().clamp(-_MOST, _MOST)
    numbers = torch.where(magnitude == torch.inf, wide.clamp(-_MOST - 1, _MOST + 1), numbers)
    return numbers.to(torch.int8).flatten(-2), scale


def from_int8(numbers: Tensor, scale: Tensor, order: Sequence[int], group: int, dtype: torch.dtype) -> Tensor:
    """The value that :func:`to_int8` has rounded."""
    wide = numbers.unflatten(-1, (-1, group)).float()
    wide = wide * torch.where(wide.abs() > _MOST, torch.inf, scale.float())
    return _as_it_was(wide, order).to(dtype)


def to_int4(value: Tensor, order: Sequence[int], group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Numbers of 4 bits, two in a byte, in the order of ``value.permute(order)``; for each group a step and the least.

    Rounded up as often as an element is closer to the number above (``torch.manual_seed`` says when), so that the mean
    over many draws is the element. A group that has a NaN or an infinity becomes NaN.
    """
    wide = _in_groups(value, order, group).float()
    # in fp32: an element below the least as it is kept, or above the last number, would have another mean
    least = wide.amin(-1, keepdim=True)
    above = wide - least
    scale = (above.amax(-1, keepdim=True) * ((1 + 2**-7) / _STEPS)).to(_SCALE)
    step = scale.float()
    steps = above / torch.where(step == 0, 1.0, step) + uniform_noise(wide.shape, wide.device)
    numbers = steps.floor().clamp(0, _STEPS).to(torch.uint8)
    half = group // 2
    return (numbers[..., :half] | (numbers[..., half:] << 4)).flatten(-2), scale, least


def from_int4(
    numbers: Tensor, scale: Tensor, least: Tensor, order: Sequence[int], group: int, dtype: torch.dtype
) -> Tensor:
    """The value that :func:`to_int4` has rounded."""
    pairs = numbers.unflatten(-1, (-1, group // 2))
    wide = torch.cat([pairs & _STEPS, pairs >> 4], -1).float()
    return _as_it_was(wide * scale.float() + least, order).to(dtype)


def to_bits(value: Tensor, order: Sequence[int], group: int) -> Tensor:
    """A byte for eight bools that lie side by side."""
    wide = _in_groups(value, order, group).to(torch.uint8)
    found = wide[..., 0]
    for bit in range(1, group):
        found = found | (wide[..., bit] << bit)
    return found


def from_bits(numbers: Tensor, order: Sequence[int], group: int, dtype: torch.dtype) -> Tensor:
    """The bools that :func:`to_bits` has put side by side."""
    bits = torch.arange(group, dtype=torch.uint8, device=numbers.device)
    return _as_it_was((numbers.unsqueeze(-1) >> bits) & 1, order).to(dtype)
