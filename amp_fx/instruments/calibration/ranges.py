"""Scales of the values that int8 calls read, from what a model computes on a few batches.

A value is ``(byte - zero point) * scale`` in uint8. The range has zero in it, so that zeros stay zeros: what is
one-sided, as behind relu, has all 256 bytes for its side. The ends are those that give the least squared error, of
rounding and saturation together: the extremes, or less where few values are far out.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

#: elements of a tensor that are looked at
SAMPLES = 65536
#: elements of a value that are kept of each batch
_KEPT = 16384
#: shares of each extreme that ranges are tried with
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
#: a smaller range has no scale whose inverse is a number
_LEAST = 2.0**-100
#: graph, name of the call
CallId = tuple[int, str]


@dataclass
class Ranges:
    """The range of the first argument of each call that may run in int8, over all batches."""

    lowest: dict[CallId, float] = field(default_factory=dict)
    highest: dict[CallId, float] = field(default_factory=dict)
    samples: dict[CallId, list[Tensor]] = field(default_factory=dict)

    def observe(self, call_id: CallId, value: Tensor) -> None:
        """Adds the value that a call reads in one batch."""
        if not value.numel():
            return
        low, high = (each.item() for each in value.aminmax())
        if math.isnan(low):
            # min and max would forget it
            low, high = -math.inf, math.inf
        self.lowest[call_id] = min(low, self.lowest.get(call_id, 0.0))
        self.highest[call_id] = max(high, self.highest.get(call_id, 0.0))
        stride = sample_stride(value.shape, _KEPT)
        self.samples.setdefault(call_id, []).append(value.reshape(-1)[::stride].float())

    def scales(self) -> dict[CallId, tuple[float, int]]:
        """Scale and zero point of what each call reads; none for a value that was zero, infinite or NaN."""
        found: dict[CallId, tuple[float, int]] = {}
        for call, samples in self.samples.items():
            low, high = self.lowest[call], self.highest[call]
            if _LEAST < high - low < math.inf:
                found[call] = fitted(torch.cat(samples), low, high)
            else:
                logger.warning(
                    "%s reads values from %s to %s: no scale fits them, so each call looks for one or stays in 16 bits",
                    call[1],
                    low,
                    high,
                )
        return found


def sample_stride(shape: Sequence[int], most: int = SAMPLES) -> int:
    """Steps between sampled elements, with no factor in common with a size: no row or column is left out."""
    if math.prod(shape) <= most:
        return 1
    stride = math.prod(shape) // most + 1
    while any(math.gcd(stride, size) > 1 for size in shape if size > 1):
        stride += 1
    return stride


def fitted(sample: Tensor, low: float, high: float) -> tuple[float, int]:
    """The scale and zero point of least squared error for values from ``low <= 0`` to ``high >= 0``."""
    best, least = (1.0, 0), math.inf
    shares = itertools.product(_SHARES if low else (1.0,), _SHARES if high else (1.0,))
    for below, above in shares:
        scale = (high * above - low * below) / 255
        chosen = scale, round(-low * below / scale)
        error = (requantised(sample, chosen) - sample).square().sum().item()
        if error < least:
            best, least = chosen, error
    return best


def requantised(value: Tensor, by: tuple[float, int]) -> Tensor:
    """The value as it is read in uint8, in its own dtype."""
    scale, zero = by
    return torch.fake_quantize_per_tensor_affine(value, scale, zero, 0, 255)
