"""Which low matmuls run in fp8: a second minimum cut, over what the first one has put in the low dtype.

Three labels in one cut would not be exact: the low copy is charged for the label in the middle, which is not
submodular. Two labels over the low matmuls are exact, given the first cut. Every matmul is a variable of its own: the
one of the forward, the one that gives the gradient of its input, and the one that gives the gradient of its weight.

What the cut believes:

* An fp8 copy is a value, a dtype and what its scales stand for: all of it, or one row as a matmul reads it. All matmuls
  that read the same copy share it, forward and backward.
* A copy costs what Inductor makes of it, :func:`copy_traffic`: a pass that finds the largest magnitudes and a pass that
  converts; where a scale stands for what lies in memory in one piece, both are one pass.
* A library kernel for fp8 wants both operands with the contracted dimension last in memory. A copy for a whole tensor
  that lies otherwise is written once more.
* What is in memory in the low dtype anyway costs nothing more there.

Sizes are in elements, times in picoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from amp_fx.placement.cut import HIGH, LOW, Problem, Shared, Var, solve
from amp_fx.placement.profile import FLOAT8, DeviceProfile
from amp_fx.plans.plan import dtype_name

__all__ = ["Copy", "Fp8Cost", "Times", "Traffic", "Value", "choose", "copy_traffic"]

_FP8, _FP32 = torch.float8_e4m3fn.itemsize, torch.float32.itemsize


@dataclass(frozen=True)
class Times:
    """What one matmul takes.

    Attributes:
        low: in the low dtype, copies of operands not included.
        fp8: in fp8, likewise.
    """

    low: int
    fp8: int


@dataclass(frozen=True)
class Copy:
    """Something that is made once if one of its readers runs in fp8: an fp8 copy, or its transposition."""

    time: int
    readers: tuple[Var, ...]


@dataclass(frozen=True)
class Value:
    """One value that matmuls read.

    Attributes:
        low: time of the low copy, which is made once if one of the readers stays low; 0 where it is there anyway.
        readers: the matmuls that may run in fp8.
        copies: what each of them needs for that.
    """

    low: int
    readers: tuple[Var, ...]
    copies: tuple[Copy, ...]


def choose(
    matmuls: Mapping[Var, Times], values: Sequence[Value], prices: Mapping[Var, int] | None = None
) -> frozenset[Var]:
    """The matmuls that run in fp8 where the whole takes least; a tie stays in the low dtype.

    Args:
        matmuls: those that may.
        values: what they read.
        prices: what a matmul costs in fp8 besides time; nothing where it is missing.
    """
    problem = Problem()
    for matmul, times in matmuls.items():
        problem.add_unary(matmul, times.low, times.fp8 + (prices or {}).get(matmul, 0))
    for value in values:
        problem.shared.append(Shared(value.low, HIGH, value.readers))
        problem.shared += [Shared(copy.time, LOW, copy.readers) for copy in value.copies]
    labels = solve(problem)
    return frozenset(matmul for matmul in matmuls if labels[matmul] is LOW)


@dataclass(frozen=True)
class Traffic:
    """What so many kernels of their own read and write, in bytes."""

    nbytes: int
    kernels: int


def copy_traffic(elements: int, itemsize: int, *, in_rows: bool, block: int | None = None) -> Traffic:
    """What Inductor makes of an fp8 copy of a value that is in memory.

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
    return Traffic(elements * (passes * itemsize + _FP8) + scales, kernels)


@dataclass(frozen=True)
class Fp8Cost:
    """What low and fp8 matmuls and their copies take on a device.

    Attributes:
        low: FLOP/s in the low dtype.
        fp8: FLOP/s in fp8.
        bandwidth: bytes/s, reads and writes together.
        launch: seconds that a kernel takes at least.
    """

    low: float
    fp8: float
    bandwidth: float
    launch: float

    @classmethod
    def of(cls, profile: DeviceProfile, low: torch.dtype) -> Fp8Cost | None:
        """The costs on a device; None where it has no rate for fp8."""
        rate = profile.peak.get(FLOAT8)
        if rate is None:
            return None
        return cls(profile.peak[dtype_name(low)], rate, profile.bandwidth, profile.launch)

    def matmul(self, flops: int, elements: int, itemsize: int) -> Times:
        """One matmul and the reads of its operands.

        Args:
            flops: of the matmul.
            elements: of both operands.
            itemsize: bytes of an element in the low dtype.
        """
        fp8 = self._time(elements * _FP8, 0) + _ps(flops / self.fp8)
        return Times(self._time(elements * itemsize, 0) + _ps(flops / self.low), fp8)

    def low_copy(self, elements: int, itemsize: int) -> int:
        """Writes a value in the low dtype, in the kernel that computes it."""
        return self._time(elements * itemsize, 0)

    def cast(self, elements: int, itemsize: int) -> int:
        """A kernel that reads and writes a value, at so many bytes an element in all."""
        return self._time(elements * itemsize, 1)

    def fp8_copy(self, elements: int, itemsize: int, *, in_rows: bool, block: int | None = None) -> int:
        """Reads a value and writes it in fp8: the time of :func:`copy_traffic`."""
        traffic = copy_traffic(elements, itemsize, in_rows=in_rows, block=block)
        return self._time(traffic.nbytes, traffic.kernels)

    def transposition(self, elements: int, itemsize: int | None) -> int:
        """Writes an fp8 copy the other way round.

        Args:
            elements: of the value.
            itemsize: of one element, where it is read again; None where the kernel that makes the copy writes both.
        """
        return self._time(elements * (_FP8 + (itemsize or 0)), int(itemsize is not None))

    def _time(self, nbytes: int, kernels: int) -> int:
        return _ps(nbytes / self.bandwidth + kernels * self.launch)


def _ps(seconds: float) -> int:
    return round(seconds * 1e12)
