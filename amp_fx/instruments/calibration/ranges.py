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
#: elements that are rounded by each range that is tried, and ranges by which all are
_ROUNDED, _CLOSE = 4096, 4
#: shares of each extreme that ranges are tried with
_SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
#: a smaller range has no scale whose inverse is a number
_LEAST = 2.0**-100
#: graph, name of the call
CallId = tuple[int, str]

#: in front of the name of a call: its result
_RESULT = "result of "


def result_of(call: CallId) -> CallId:
    """What stands for the result of a call beside the calls."""
    return call[0], f"{_RESULT}{call[1]}"


def call_with_result(call: CallId) -> CallId | None:
    """The call whose result this stands for, see :func:`result_of`; None for a call."""
    return (call[0], call[1].removeprefix(_RESULT)) if call[1].startswith(_RESULT) else None


@dataclass
class Ranges:
    """The range of the first argument of each call that may run in int8, and of results, over all batches."""

    lowest: dict[CallId, float] = field(default_factory=dict)
    highest: dict[CallId, float] = field(default_factory=dict)
    samples: dict[CallId, list[Tensor]] = field(default_factory=dict)

    def observe(self, call_id: CallId, value: Tensor) -> None:
        """Adds the value that a call reads in one batch."""
        if not value.numel():
            return
        low, high = extremes(value)
        if math.isnan(low):
            # min and max would forget it
            low, high = -math.inf, math.inf
        self.lowest[call_id] = min(low, self.lowest.get(call_id, 0.0))
        self.highest[call_id] = max(high, self.highest.get(call_id, 0.0))
        sample = sampled(value, sample_stride(value.shape, _KEPT))
        # a copy: the program may write to the value, and need not keep it
        self.samples.setdefault(call_id, []).append(sample.to(torch.float32, copy=True))

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


def sampled(value: Tensor, stride: int) -> Tensor:
    """Elements at equal steps in the order of the dimensions, which is not always that in memory."""
    if stride == 1 or value.is_contiguous():
        return value.reshape(-1)[::stride]
    # a tenth of the time of a copy of all
    return value.take(torch.arange(0, value.numel(), stride, device=value.device))


def extremes(value: Tensor) -> tuple[float, float]:
    """The least and the largest element, NaN where there is one."""
    # in the order in memory, which is much faster
    order = sorted(range(value.dim()), key=value.stride, reverse=True)
    low, high = value.permute(order).aminmax()
    return low.item(), high.item()


def fitted(sample: Tensor, low: float, high: float) -> tuple[float, int]:
    """The scale and zero point of least squared error for values from ``low <= 0`` to ``high >= 0``.

    What saturates is added up over all values, rounding over some at equal steps: few values are far out, and each
    of those counts, where rounding is much the same for all. The best few are then tried on all.
    """
    shares = itertools.product(_SHARES if low else (1.0,), _SHARES if high else (1.0,))
    ends = sample.new_tensor([low, high], dtype=torch.float64)
    below, above = (sample.new_tensor([*shares], dtype=torch.float64) * ends).unbind(1)
    scale = (above - below) / 255
    zero = (-below / scale).round()
    ordered = sample.sort().values.double()
    error = _beyond(ordered, (255 - zero) * scale) + _beyond(-ordered.flip(0), zero * scale)
    some = sample[:: sample_stride(sample.shape, _ROUNDED)]
    wide = (scale.float()[:, None], zero.float()[:, None])
    bytes_ = (some / wide[0]).add_(wide[1]).clamp_(0, 255)
    rounded = (bytes_.round() - bytes_).mul_(wide[0])
    error += rounded.square().sum(1).double() * (len(sample) / len(some))
    best = error.topk(min(_CLOSE, len(error)), largest=False).indices.sort().values
    finalists = [(scale[at].item(), int(zero[at])) for at in best.tolist()]
    return min(finalists, key=lambda each: (requantised(sample, each) - sample).square().sum().item())


def _beyond(ordered: Tensor, ends: Tensor) -> Tensor:
    """The squared distances of ascending values from each end, added up over those beyond it."""
    at = torch.searchsorted(ordered, ends, right=True)
    nothing = ordered.new_zeros(1)
    once, twice = (torch.cat([nothing, each.cumsum(0)]) for each in (ordered, ordered.square()))
    count, once, twice = len(ordered) - at, once[-1] - once[at], twice[-1] - twice[at]
    return (twice - 2 * ends * once + count * ends.square()).clamp(min=0)


def requantised(value: Tensor, by: tuple[float, int]) -> Tensor:
    """The value as it is read in uint8, in its own dtype."""
    scale, zero = by
    return torch.fake_quantize_per_tensor_affine(value, scale, zero, 0, 255)
