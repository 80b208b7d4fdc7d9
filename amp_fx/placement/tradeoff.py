"""Two prices in one cut: the placements that no other beats in both time and sensitivity.

For a weight w, a cut gives the placement of least ``time + w * sensitivity``. Those are the corners of the lower
convex hull
of all placements; sensitivity falls along it as w grows. A placement inside the hull is never the best for any
weight, and is not found.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["BYTES", "MINIMISED", "TIME", "Choice", "bracket", "hull"]

#: what a placement is to be the cheapest in
MINIMISED = TIME, BYTES = "time", "bytes"

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """One corner.

    Attributes:
        time: of the placement.
        sensitivity: the same.
        weight: for which it is the best; infinite for the least sensitivity.
        placement: whatever the caller calls one.
    """

    time: float
    sensitivity: float
    weight: float
    placement: T


Solve = Callable[[float], Choice[T]]


def bracket(solve: Solve[T], limit: float) -> tuple[Choice[T] | None, Choice[T]]:
    """The two corners around a limit of the sensitivity: the last beyond it, and the first, the cheapest, within it.

    Args:
        solve: weight -> its corner.
        limit: of the sensitivity.

    Returns:
        The first is None where the cheapest placement of all is within. Where nothing is within, the second is the
        placement of least sensitivity.
    """
    cheap = solve(0.0)
    if cheap.sensitivity <= limit:
        return None, cheap
    exact = solve(math.inf)
    while exact.sensitivity <= limit and (middle := _between(solve, cheap, exact)) is not None:
        if middle.sensitivity <= limit:
            exact = middle
        else:
            cheap = middle
    return cheap, exact


def hull(solve: Solve[T], most: int) -> list[Choice[T]]:
    """Corners from the least time to the least sensitivity: all, or ``most`` of them where the hull bends most.

    Args:
        solve: weight -> its corner.
        most: at least 2.
    """
    corners = [solve(0.0), solve(math.inf)]
    flat: set[int] = set()
    while len(corners) < most:
        gaps = [at for at in range(len(corners) - 1) if id(corners[at]) not in flat]
        if not gaps:
            break
        at = max(gaps, key=lambda at: _gap(corners[at], corners[at + 1], corners))
        middle = _between(solve, corners[at], corners[at + 1])
        if middle is None:
            flat.add(id(corners[at]))
        else:
            corners.insert(at + 1, middle)
    return [
        corner
        for at, corner in enumerate(corners)
        if at == 0 or corner.sensitivity < corners[at - 1].sensitivity
    ]


def _between(solve: Solve[T], cheap: Choice[T], exact: Choice[T]) -> Choice[T] | None:
    """A corner between two, or None where the hull runs straight."""
    if not (
        exact.sensitivity < cheap.sensitivity and cheap.time < exact.time and math.isfinite(cheap.sensitivity)
    ):
        return None
    weight = (exact.time - cheap.time) / (cheap.sensitivity - exact.sensitivity)
    found = solve(weight)
    line = cheap.time + weight * cheap.sensitivity
    below = line - (found.time + weight * found.sensitivity)
    # what is below by no more than rounding lies on the line
    if below <= 1e-9 * abs(line) or not exact.sensitivity < found.sensitivity < cheap.sensitivity:
        return None
    return found


def _gap(cheap: Choice[T], exact: Choice[T], corners: list[Choice[T]]) -> float:
    """How far apart two neighbours are, sensitivity by its logarithm."""
    span = max(corners[-1].time - corners[0].time, 1e-30)
    ratio = math.log(max(cheap.sensitivity, 1e-300) / max(exact.sensitivity, 1e-300))
    return (exact.time - cheap.time) / span + ratio
