"""The cheapest placement found within a limit of sensitivity.

Corners of the hull are exact, but may lie far apart. Between the last that is beyond the limit and the first that is
within it, a variable in which the two differ is given either label, and the same is done in both halves. No placement
is cheaper than the line between the two corners of its half. So a small problem is solved exactly; in a large one the
search ends with the cheapest placement that it has seen.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

from amp_fx.placement.cut import HIGH, Var
from amp_fx.placement.priced import Labels, Priced, choice_of, choose_all
from amp_fx.placement.tradeoff import Choice, bracket

__all__ = ["within"]

#: halves that are looked at: so many, and fewer where they have more variables together than that
_HALVES, _VARIABLES = 100, 5_000

Placement = Choice[list[Labels]]


def within(parts: Sequence[Priced], limit: float, known: Sequence[Labels] | None = None) -> Placement:
    """The cheapest placement found of several graphs within ``limit``; if none is, that of least sensitivity.

    Args:
        parts: the graphs.
        limit: of the sum of their sensitivities.
        known: a placement of each that may be within the limit.
    """
    # a placement is within its own sensitivity
    limit *= 1 + 1e-9
    if known is not None and not all(map(Priced.allows, parts, known)):
        known = None
    search = _Search(parts, limit, None if known is None else choice_of(parts, known))
    search.look([{} for _ in parts])
    if search.best is None:
        return choose_all(parts, math.inf)
    size = sum(len(part.base.variables()) for part in parts)
    search.run(min(_HALVES, _VARIABLES // (size + 1)))
    return search.best


class _Search:
    """Branch and bound.

    Attributes:
        best: the cheapest placement within the limit so far.
    """

    def __init__(self, parts: Sequence[Priced], limit: float, known: Placement | None) -> None:
        self.best: Placement | None = None
        self._known = known
        self._parts = parts
        self._limit = limit
        self._count = itertools.count()
        #: (bound, number, pins, the corner beyond the limit, the one within it)
        self._halves: list[tuple[float, int, list[dict[Var, bool]], Placement, Placement]] = []

    def keep(self, found: Placement) -> None:
        """Remembers a placement if it is within the limit, and cheaper."""
        best = self.best
        if found.sensitivity <= self._limit and (
            best is None or (found.time, found.sensitivity) < (best.time, best.sensitivity)
        ):
            self.best = found

    def look(self, pins: list[dict[Var, bool]]) -> None:
        """Finds the corners around the limit where some variables have the labels that they are given."""
        beyond, inside = bracket(lambda weight: choose_all(self._parts, weight, pins), self._limit)
        self.keep(inside)
        if beyond is None or inside.sensitivity > self._limit:
            return
        for goal in (inside, self._known):
            if goal is not None:
                self.keep(self._towards(beyond, goal))
        slope = (inside.time - beyond.time) / (beyond.sensitivity - inside.sensitivity)
        bound = beyond.time + slope * (beyond.sensitivity - self._limit)
        heapq.heappush(self._halves, (bound, next(self._count), pins, beyond, inside))

    def run(self, most: int) -> None:
        """Halves what may hold a cheaper placement, the lowest bound first."""
        while self._halves and most > 0:
            bound, _, pins, beyond, inside = heapq.heappop(self._halves)
            # times are whole numbers
            if self.best is not None and bound > self.best.time - 1:
                return
            at, var = self._dearest(beyond, inside)
            for label in (True, False):
                self.look(
                    [{**each, var: label} if number == at else each for number, each in enumerate(pins)]
                )
            most -= 1

    def _dearest(self, beyond: Placement, inside: Placement) -> tuple[int, Var]:
        """The variable by which the sensitivity of two placements differs most."""
        pairs = zip(self._parts, beyond.placement, inside.placement, strict=True)
        changes = [
            (abs(part.flipped(first, {var})[1]), number, str(var), var)
            for number, (part, first, second) in enumerate(pairs)
            for var in part.differing(first, second)
        ]
        _, at, _, var = max(changes, key=lambda change: change[:3])
        return at, var

    def _towards(self, start: Placement, goal: Placement) -> Placement:
        """From one placement towards another, until it is within the limit, the best rate first.

        Then, as far as the limit allows, back again: first what gains the most time for its sensitivity.
        """
        parts, state = self._parts, [dict(labels) for labels in start.placement]
        moves = [
            (at, group)
            for at, part in enumerate(parts)
            for group in part.groups(state[at], goal.placement[at])
        ]

        def change(move: tuple[int, set[Var]]) -> tuple[float, float]:
            at, group = move
            return parts[at].flipped(state[at], group)

        def sensitivity_for_time(move: tuple[int, set[Var]]) -> float:
            time, sensitivity = change(move)
            return sensitivity / max(time, 1e-3)

        def time_for_sensitivity(move: tuple[int, set[Var]]) -> float:
            time, sensitivity = change(move)
            return time / max(sensitivity, 1e-30)

        total = start.sensitivity
        for move in sorted(moves, key=sensitivity_for_time):
            if total <= self._limit:
                break
            total += change(move)[1]
            _flip(state, move)
        for move in sorted(moves, key=time_for_sensitivity):
            time, sensitivity = change(move)
            if time < 0 and total + sensitivity <= self._limit:
                total += sensitivity
                _flip(state, move)
        return choice_of(parts, state)


def _flip(state: Sequence[dict[Var, bool]], move: tuple[int, set[Var]]) -> None:
    at, group = move
    for var in group:
        state[at][var] = not state[at].get(var, HIGH)
