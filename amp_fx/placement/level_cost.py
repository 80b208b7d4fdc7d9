"""What matmuls below 16 bits cost beside the low dtype: terms of a second minimum cut, over what is low already.

Three labels in one cut would not be exact: the low copy is charged for the label in the middle, which is not
submodular. Two labels over the low matmuls are exact, given the first cut: here LOW is the level below, HIGH the low
dtype. Every matmul is a variable of its own: the one of the forward, the one that gives the gradient of its input, and
the one that gives the gradient of its weight.

What the cut believes:

* A copy is a value, a dtype and what its scales stand for: all of it, or one row as a matmul reads it. All matmuls
  that read the same copy share it, forward and backward.
* A copy costs what Inductor makes of it, :func:`copy_traffic`: a pass that finds the largest magnitudes and a pass that
  converts; where a scale stands for what lies in memory in one piece, both are one pass.
* A library kernel wants both operands with the contracted dimension last in memory. A copy for a whole tensor that lies
  otherwise is written once more.
* What is in memory in the low dtype anyway costs nothing more there.

Sizes are in elements, times in picoseconds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from amp_fx.placement.profile import DeviceProfile
from amp_fx.plans.plan import dtype_name
from amp_fx.policy.levels import Level

__all__ = ["BYTES", "NARROW", "OPERATIONS", "LevelCost", "copy_traffic"]

#: bytes of an element with scales, and of a scale
NARROW, _FP32 = 1, torch.float32.itemsize


def copy_traffic(elements: int, itemsize: int, *, in_rows: bool, block: int | None = None) -> tuple[int, int]:
    """What Inductor makes of a copy of a value that is in memory: bytes read and written, and kernels.

    In rows, one kernel reads the value, finds the scales and writes the copy. Else there are three kernels, and two of
    them read the value: long reductions, over columns or over all, are split in two; and with a scale for each block,
    the third puts scales into the order that libraries read. The scale of a row, or of all, is no traffic.

    Args:
        elements: of the value.
        itemsize: of one element as it is read.
        in_rows: what a scale stands for lies in memory in one piece, and is not all of the value.
        block: so many elements have a scale of one byte; None: all of a row or of the value.
    """
    scales = 0
    if block is not None:
        # not in rows, they are handed on in fp32: written once, read twice
        scales = elements // block * (1 if in_rows else 1 + 3 * _FP32)
    passes, kernels = (1, 1) if in_rows else (2, 3)
    return elements * (passes * itemsize + NARROW) + scales, kernels


@dataclass(frozen=True)
class LevelCost:
    """What matmuls in the low dtype, in a level below, and their copies take on a device.

    Attributes:
        low: FLOP/s in the low dtype.
        below: FLOP/s in the level below.
        bandwidth: bytes/s, reads and writes together.
        launch: seconds that a kernel takes at least.
    """

    low: float
    below: float
    bandwidth: float
    launch: float

    @classmethod
    def of(cls, profile: DeviceProfile, low: torch.dtype, level: Level) -> LevelCost | None:
        """The costs on a device; None where it has no rate for the level."""
        rate = profile.peak.get(level.rate)
        if rate is None:
            return None
        return cls(profile.peak[dtype_name(low)], rate, profile.bandwidth, profile.launch)

    def matmul(self, flops: int, elements: int, itemsize: int) -> tuple[int, int]:
        """One matmul and the reads of its operands: in the low dtype, and in the level below.

        Args:
            flops: of the matmul.
            elements: of both operands.
            itemsize: bytes of an element in the low dtype.
        """
        low, below = self.moving(elements * itemsize), self.moving(elements * NARROW)
        return low + _ps(flops / self.low), below + _ps(flops / self.below)

    def moving(self, nbytes: int, kernels: int = 0) -> int:
        """Reads and writes so many bytes, in kernels of their own or in others."""
        return _ps(nbytes / self.bandwidth + kernels * self.launch)


def _ps(seconds: float) -> int:
    return round(seconds * 1e12)


#: without a profile nobody knows whether a level gains time: as many operations as may be are multiplied in it. A time
#: is the bytes that an H100 moves while it multiplies in fp8 (datasheet, SXM5)
OPERATIONS = LevelCost(low=295e12, below=590e12, bandwidth=math.inf, launch=0.0)

#: times are bytes moved
BYTES = LevelCost(low=math.inf, below=math.inf, bandwidth=1e12, launch=0.0)
