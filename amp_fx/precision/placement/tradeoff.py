"""Two prices in one cut: placements that no other beats in both time and sensitivity, and the cheapest within a limit.

For a weight w, a cut gives the placement of least ``time + w * sensitivity``. Those are the corners of the lower
convex hull of all placements; sensitivity falls along it as w grows. A placement inside the hull is the best for no
weight, and is not found so.

:func:`within` searches there, too. Between the last corner beyond the limit and the first within it, a variable in
which the two differ is given either side, and the same is done in both halves. No placement is cheaper than the line
between the two corners of its half. So a small problem is solved exactly; in a large one the search ends with the
cheapest placement that it has seen, or within a thousandth of what there is to gain.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from amp_fx.precision.placement.cut import HIGH, Var
from amp_fx.precision.placement.priced import Choice, Priced, Sides, choice_of, choose_all

#: what a placement is to be the cheapest in
MINIMISED = TIME, BYTES = "time", "bytes"
#: halves that are searched: so many, and fewer where they have more variables together than that
HALVES, _VARIABLES = 100, 5_000
#: problems of more variables are solved up to such a share of what the cheapest placement gains over the most exact one
LARGE, NEAR = 30, 1e-3

T = TypeVar("T")

#: weight -> its corner
Solve = Callable[[float], Choice[T]]

Placement = Choice[list[Sides]]


def bracket(solve: Solve[T], limit: float) -> tuple[Choice[T] | None, Choice[T]]:
    """The two corners around a limit of the sensitivity: the last beyond it, and the first, the cheapest, within it.

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
    """Corners from the least time to the least sensitivity: all, or ``most`` (2 or more) where the hull bends most."""
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
    falls = [True, *(after.sensitivity < before.sensitivity for before, after in itertools.pairwise(corners))]
    return list(itertools.compress(corners, falls))


def _between(solve: Solve[T], cheap: Choice[T], exact: Choice[T]) -> Choice[T] | None:
    """A corner between two, or None where the hull runs straight."""
    falls = exact.sensitivity < cheap.sensitivity < math.inf
    if not (falls and cheap.time < exact.time):
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


def within(parts: Sequence[Priced], limit: float, known: Sequence[Sides] | None = None) -> Placement:
    """The cheapest placement found of several graphs within ``limit``; if none is, that of least sensitivity.

    The limit is of the sum of their sensitivities; ``known``: a placement of each that may be within. Branch and bound:
    what may hold a cheaper placement is halved, the lowest bound first.
    """
    # a placement is within its own sensitivity
    limit *= 1 + 1e-9
    is_known = known is not None and all(
        part.base.allows(each) for part, each in zip(parts, known, strict=True)
    )
    goals = [choice_of(parts, known)] if known is not None and is_known else []
    best: Placement | None = None
    count = itertools.count()
    #: (bound, number, pins, the corner beyond the limit, the one within it)
    halves: list[tuple[float, int, list[dict[Var, bool]], Placement, Placement]] = []

    def look(pins: list[dict[Var, bool]]) -> Placement | None:
        """Finds the corners around the limit where some variables have given sides; the best placement so far."""
        beyond, inside = bracket(lambda weight: choose_all(parts, weight, pins), limit)
        found = [inside]
        if beyond is not None and inside.sensitivity <= limit:
            found += [_towards(parts, limit, beyond, goal) for goal in (inside, *goals)]
            slope = (inside.time - beyond.time) / (beyond.sensitivity - inside.sensitivity)
            bound = beyond.time + slope * (beyond.sensitivity - limit)
            heapq.heappush(halves, (bound, next(count), pins, beyond, inside))
        fitting = [each for each in (best, *found) if each is not None and each.sensitivity <= limit]
        return min(fitting, key=lambda each: (each.time, each.sensitivity), default=None)

    best = look([{} for _ in parts])
    if best is None:
        return choose_all(parts, math.inf)
    size = sum(len(part.base.variables()) for part in parts)
    # times are whole numbers
    near = 1.0
    if halves and size > LARGE:
        near = max(near, NEAR * (choose_all(parts, math.inf).time - choose_all(parts, 0.0).time))
    for _ in range(min(HALVES, _VARIABLES // (size + 1))):
        if not halves or halves[0][0] > best.time - near:
            break
        _, _, pins, beyond, inside = heapq.heappop(halves)
        at, var = _dearest(parts, beyond, inside)
        for side in (True, False):
            best = (
                look([{**each, var: side} if part == at else each for part, each in enumerate(pins)]) or best
            )
    return best


def _dearest(parts: Sequence[Priced], beyond: Placement, inside: Placement) -> tuple[int, Var]:
    """The variable by which the sensitivity of two placements differs most."""
    pairs = zip(parts, beyond.placement, inside.placement, strict=True)
    changes = [
        (abs(part.flipped(first, {var})[1]), number, str(var), var)
        for number, (part, first, second) in enumerate(pairs)
        for var in part.differing(first, second)
    ]
    _, at, _, var = max(changes, key=lambda change: change[:3])
    return at, var


def _towards(parts: Sequence[Priced], limit: float, start: Placement, goal: Placement) -> Placement:
    """From one placement towards another, until it is within the limit, the best rate first.

    Then, as far as the limit allows, back again: first what gains the most time for its sensitivity.
    """
    state = [dict(sides) for sides in start.placement]
    total = start.sensitivity
    moves = [
        (at, group) for at, part in enumerate(parts) for group in part.groups(state[at], goal.placement[at])
    ]

    def change(move: tuple[int, set[Var]]) -> tuple[float, float]:
        at, group = move
        return parts[at].flipped(state[at], group)

    def rate(move: tuple[int, set[Var]], back: bool) -> float:
        """Sensitivity for time, and on the way back time for sensitivity."""
        time, sensitivity = change(move)
        return time / max(sensitivity, 1e-30) if back else sensitivity / max(time, 1e-3)

    for back in (False, True):
        for at, group in sorted(moves, key=functools.partial(rate, back=back)):
            time, sensitivity = change((at, group))
            if (time < 0 and total + sensitivity <= limit) if back else total > limit:
                total += sensitivity
                state[at].update({var: not state[at].get(var, HIGH) for var in group})
    return choice_of(parts, state)
