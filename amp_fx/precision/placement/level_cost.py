"""The meaning of a policy below 16 bits on a device: its level, and the cost of matmuls in it beside the low dtype.

Costs are terms of a second minimum cut, over what is low already. Three labels in one cut would not be exact: the low
copy is charged for the label in the middle, which is not submodular. Two labels over the low matmuls are exact, given
the first cut: here LOW is the level below, HIGH the low dtype. Every matmul is a variable of its own: the one of the
forward, the one that gives the gradient of its input, and the one that gives the gradient of its weight.

What the cut believes:

* A copy is a value, a dtype and what its scales stand for: all of it, or one row as a matmul reads it. All matmuls
  that read the same copy share it, forward and backward.
* A copy costs what Inductor makes of it, :func:`copy_traffic`: a pass that finds the largest magnitudes and a pass that
  converts; where a scale stands for what lies in memory in one piece, both are one pass.
* A library kernel wants both operands with the contracted dimension last in memory. A copy for a whole tensor that lies
  otherwise is written once more.
* What is in memory in the low dtype anyway costs nothing more there.
* A product writes its result in one form. Who reads another, bytes or the low dtype, waits for a kernel that makes it.
* On a CPU a copy takes arithmetic, too, and the product before it no longer applies the activation in between.

Sizes are in elements, times in picoseconds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from amp_fx.precision.placement.devices import builtin
from amp_fx.precision.placement.gpus import NOMINAL
from amp_fx.precision.placement.profile import DEVICE_TYPES, DeviceProfile
from amp_fx.precision.plans.plan import dtype_name
from amp_fx.precision.policy.levels import AUTO, Kernel, Level, level_named, levels_of
from amp_fx.runtime.state import cache_results

logger = logging.getLogger(__name__)

#: bytes of an element with scales, and of a scale
NARROW, _FP32 = 1, torch.float32.itemsize


def copy_traffic(elements: int, itemsize: int, *, in_rows: bool, block: int | None = None) -> tuple[int, int]:
    """The cost of a copy of a value that is in memory, by Inductor: bytes read and written, and kernels.

    In rows (what a scale stands for lies in memory in one piece, and is not all of the value), one kernel reads the
    value, finds the scales and writes the copy. Else there are three kernels, and two of them read the value: long
    reductions, over columns or over all, are split in two; and with a scale of one byte for each block, the third puts
    scales into the order that libraries read. The scale of a row, or of all, is no traffic.
    """
    scales = 0
    if block is not None:
        # not in rows, they are kept in fp32 in between: written once, read twice
        scales = elements // block * (1 if in_rows else 1 + 3 * _FP32)
    passes, kernels = (1, 1) if in_rows else (2, 3)
    return elements * (passes * itemsize + NARROW) + scales, kernels


#: bytes that a CPU moves in the time of the arithmetic of a copied element: largest magnitude, rounding, activation.
#: Measured on a Zen 4 with one thread: 0.45 ns in all, behind gelu 0.95 ns
_ARITHMETIC = 8
#: what a CPU takes for a call in int8 beside one in bf16, in launches: 40 us on a Sapphire Rapids, over 13 shapes;
#: half of it for a convolution
_CALL = 8
#: a CPU with tiles multiplies in bf16 at least so many times as fast as in fp32, others half as fast (see ``devices``)
_TILES = 6.0
#: bytes of a value in the low dtype that a CPU still has in a cache, as the kernel before has written it; measured on a
#: Sapphire Rapids: linears gain by int8 where they read 1.2 MB, and not where they read 600 kB
_CACHE = 2**20


@dataclass(frozen=True)
class LevelCost:
    """Rates of a device.

    FLOP/s in the low dtype and in a level below, bytes/s, seconds of a kernel at least, the bytes that are moved in the
    time of the arithmetic of a copied element, seconds of a call in the level beside one in the low dtype, whether
    products in the level are made of tiles, the bytes of a value that is still in a cache when it is read, and FLOP/s
    of matmuls that are in fp32.
    """

    low: float
    below: float
    bandwidth: float
    launch: float
    arithmetic: int = 0
    call: float = 0.0
    tiles: bool = False
    cache: int = 0
    wide: float = math.inf

    @classmethod
    def of(cls, profile: DeviceProfile, low: torch.dtype, level: Level) -> LevelCost | None:
        """The costs on a device; None where it has no rate for the level."""
        rate = profile.peak.get(level.rate)
        if rate is None:
            return None
        rates = profile.peak[dtype_name(low)], rate, profile.bandwidth, profile.launch
        if profile.device_type != "cpu":
            return cls(*rates)
        wide = profile.peak["float32"]
        tiles = rates[0] >= _TILES * wide
        return cls(*rates, _ARITHMETIC, _CALL * profile.launch, tiles, _CACHE, wide)

    def matmul(self, flops: int, elements: int, itemsize: int, *, grouped: bool = False) -> tuple[int, int]:
        """One matmul and the reads of its operands: in a dtype of so many bytes, low or fp32, and in the level below.

        ``grouped``: a convolution in groups. Tiles are of no use to it: with AMX in int8 it takes 1.0 to 1.5 of its
        time in bf16 with one thread, and 0.9 to 2.1 with two (10 shapes, most of them depthwise; 1.17 in the middle).
        """
        rate = self.low if itemsize < _FP32 else self.wide
        low = self.moving(elements * itemsize) + _ps(flops / rate)
        below = self.moving(elements * NARROW) + _ps(flops / self.below)
        return low, low * 7 // 6 if grouped and self.tiles else below

    def moving(self, nbytes: int, kernels: int = 0) -> int:
        """Reads and writes so many bytes, in kernels of their own or in others."""
        return _ps(nbytes / self.bandwidth + kernels * self.launch)

    def copying(
        self, elements: int, itemsize: int, *, in_rows: bool = False, block: int | None = None
    ) -> int:
        """Makes a copy of a value that is in memory."""
        nbytes, kernels = copy_traffic(elements, itemsize, in_rows=in_rows, block=block)
        return self.moving(nbytes + elements * self.arithmetic, kernels)

    def rounding(self, elements: int) -> int:
        """Writes bytes by a scale that is known, in a kernel that has the value: 0.12 ns for an element on a CPU."""
        return self.moving(elements * (NARROW + self.arithmetic // 4))

    def calling(self, kernel: Kernel, sizes: Sequence[int | torch.SymInt], *, convolves: bool = False) -> int:
        """The cost of a call in the level beside one in the low dtype; sizes are rows, contracted, columns.

        A time of its own, and that in which a kernel lays out the weight. A single row takes neither.
        """
        rows, *matrix = sizes
        if _is_one(rows):
            return 0
        known = [size for size in matrix if isinstance(size, int)]
        lays_out = kernel.packs and len(known) == len(matrix)
        return _ps(self.call) // (1 + convolves) + lays_out * self.moving(2 * NARROW * math.prod(known))

    def cheapest(self, kernels: Sequence[Kernel], sizes: Sequence[int | torch.SymInt]) -> Kernel:
        """The kernel that takes the least for a product of these sizes; of equal ones the first."""
        gains = _is_one(sizes[0])
        return min(kernels, key=lambda kernel: self.calling(kernel, sizes) - gains * _ps(kernel.one_row))


def _is_one(rows: int | torch.SymInt) -> bool:
    # a size that is not known is no single row, and must not be compared with one: that would make a guard
    return isinstance(rows, int) and rows == 1


def _ps(seconds: float) -> int:
    return round(seconds * 1e12)


#: without a profile nobody knows whether a level gains time: as many operations as may be are multiplied in it. A time
#: is the bytes that the nominal GPU moves while it multiplies in fp8
OPERATIONS = LevelCost(
    low=1e12 * NOMINAL.flops_a_byte("bfloat16"),
    below=1e12 * NOMINAL.flops_a_byte("float8"),
    bandwidth=math.inf,
    launch=0.0,
)

#: times are bytes moved
BYTES = LevelCost(low=math.inf, below=math.inf, bandwidth=1e12, launch=0.0)


@dataclass(frozen=True)
class Meaning:
    """The meaning of a policy on a device."""

    text: str  # for the reader of a plan: the level's name, or why there is none
    level: Level | None = None  # None: the policy means autocast
    cost: LevelCost | None = None  # None: everything that may run in the level does


def meaning(
    base: str, choice: str, profile: DeviceProfile | None, device: str, low: torch.dtype, *, training: bool
) -> Meaning:
    """The meaning of a policy below 16 bits on a device; the log says once if it means autocast.

    ``choice`` is the name of a level or of a kernel, or ``"auto"``. Without a profile, all that may run in the
    level does.
    """
    if not levels_of(base, training=training):
        return as_autocast("it is about graphs without gradients", base)
    hardware = profile or (builtin(device) if device in DEVICE_TYPES else None)
    name = device if hardware is None else f"{device} {hardware.name}"
    level = auto_level(base, choice, device)
    is_forced = profile is None and any(kernel.device == device for kernel in level.kernels)
    if not is_forced and (hardware is None or level.rate not in hardware.peak):
        return as_autocast(f"{name} has no {level.policy} rate", level.policy)
    if not multiplies(level, device, choice):
        named = level.name if choice == AUTO else choice
        return as_autocast(f"{name} does not multiply in {named}", level.policy)
    if not training and level.evaluated:
        level = levels_of(base)[level.evaluated]
    return Meaning(level.name, level, None if profile is None else LevelCost.of(profile, low, level))


@cache_results()  # so that it is said once
def as_autocast(why: str, policy: str) -> Meaning:
    """A policy below 16 bits that means autocast; the log says so, and why."""
    logger.warning("policy %r means 'autocast' here: %s", policy, why)
    return Meaning(f"as autocast: {why}")


def auto_level(base: str, choice: str, device: str, capability: tuple[int, int] | None = None) -> Level:
    """The level that an option of a policy means, on a GPU of this capability, or of the one in this machine."""
    if choice != AUTO and (named := level_named(choice)) is not None:
        return named
    found = capability or capability_of(device)
    rows = [level for level in levels_of(base).values() if level.auto is not None]
    return next(level for level in rows if not level.auto or found in level.auto)


def multiplies(level: Level, device: str, choice: str = AUTO) -> bool:
    """True where a device that has the rate has one of the kernels that are left to choose from."""
    return any(
        kernel.device in (None, device)
        and (kernel.capabilities is None or capability_of(device) in kernel.capabilities)
        for kernel in level.chosen(choice)
    )


def capability_of(device: str) -> tuple[int, int] | None:
    """The compute capability of an NVIDIA device; None for other devices."""
    if device != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_capability()
