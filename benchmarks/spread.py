"""Medians, quartiles and paired ratios: what noise leaves of repeated timings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

__all__ = ["Spread", "ratios", "spread"]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles; not a number where nothing was measured."""

    low: float
    median: float
    high: float

    def overlaps(self, other: Spread) -> bool:
        """True where the quartiles leave it open which is larger."""
        return self.low <= other.high and other.low <= self.high


def spread(values: Sequence[float]) -> Spread:
    """The quartiles of some values, between neighbours where they fall between two."""
    if not values:
        return Spread(math.nan, math.nan, math.nan)
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*quantiles(values, n=4, method="inclusive"))


def ratios(times: Sequence[float], references: Sequence[float]) -> Spread:
    """How often longer than the reference, round by round.

    Neighbours in time share the machine's state, so the quartiles of their quotients are narrower than the
    quotients of quartiles. What one of the two has more rounds of is left out.
    """
    return spread([time / reference for time, reference in zip(times, references, strict=False)])
