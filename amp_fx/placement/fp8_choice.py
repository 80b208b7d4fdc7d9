"""Which matmuls run in fp8 where that costs accuracy, too: the second cut, weighed with harm, within a limit.

A matmul in fp8 adds its harm to the squared relative error of the gradient, whatever else runs in fp8. So harm is a
term of one variable, and the cut of :mod:`amp_fx.placement.fp8` stays exact for any weight of it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from amp_fx.placement.cut import Var
from amp_fx.placement.fp8 import Copy, Fp8Cost, Times, Value, choose
from amp_fx.placement.tradeoff import Choice, bracket

__all__ = [
    "BYTES",
    "FP8_BUDGET",
    "OPERATIONS",
    "Chosen",
    "Fp8Budget",
    "Fp8Problem",
    "PricedFp8",
    "choice_of",
    "choose_all",
    "within",
]

#: gm.meta key of a rewritten graph that is placed by harm under policy fp8: the :class:`Fp8Budget` of its matmuls
FP8_BUDGET = "amp_fx_fp8_budget"

#: what runs in fp8, of several graphs
Chosen = list[frozenset[Var]]

#: without a profile nobody knows whether fp8 gains time: as many operations as may be are multiplied in it. A time is
#: the bytes that an H100 moves while it multiplies (datasheet, SXM5)
OPERATIONS = Fp8Cost(low=295e12, fp8=590e12, bandwidth=math.inf, launch=0.0)

#: times are bytes moved
BYTES = Fp8Cost(low=math.inf, fp8=math.inf, bandwidth=1e12, launch=0.0)


@dataclass(frozen=True)
class Fp8Problem:
    """What the second cut minimises.

    Attributes:
        matmuls: those that may run in fp8.
        values: what they read.
    """

    matmuls: Mapping[Var, Times]
    values: tuple[Value, ...]

    def time(self, chosen: Collection[Var]) -> int:
        """What the matmuls and their copies take where these run in fp8."""
        time = sum(times.fp8 if var in chosen else times.low for var, times in self.matmuls.items())
        return time + sum(_time(value, chosen) for value in self.values)

    def only(self, kept: Collection[Var]) -> Fp8Problem:
        """The problem where all other matmuls run in fp32, and read no copies."""
        values = []
        for value in self.values:
            copies = [Copy(copy.time, tuple(r for r in copy.readers if r in kept)) for copy in value.copies]
            readers = tuple(reader for reader in value.readers if reader in kept)
            values.append(Value(value.low, readers, tuple(copy for copy in copies if copy.readers)))
        matmuls = {var: times for var, times in self.matmuls.items() if var in kept}
        return Fp8Problem(matmuls, tuple(value for value in values if value.readers))


@dataclass(frozen=True)
class Fp8Budget:
    """What the matmuls of a graph may add to the error.

    Attributes:
        harms: matmul -> what it adds to the squared relative error of the gradient in fp8; what is missing was not
            measured, and stays low.
        limit: of their sum.
    """

    harms: tuple[tuple[Var, float], ...]
    limit: float


@dataclass(frozen=True)
class PricedFp8:
    """A problem with harms.

    Attributes:
        problem: of the second cut.
        harms: matmul -> what it adds to the squared relative error of the gradient in fp8; infinite if missing.
    """

    problem: Fp8Problem
    harms: Mapping[Var, float]

    def harm(self, chosen: Collection[Var]) -> float:
        """What these add in fp8."""
        return sum(self.harms.get(var, math.inf) for var in chosen)

    def choose(self, weight: float) -> frozenset[Var]:
        """The matmuls in fp8 of least time and weighted harm.

        Args:
            weight: units of time that a squared relative error of 1 is worth; infinite: the least harm.
        """
        prices = {var: self._price(self.harms.get(var, math.inf), weight) for var in self.problem.matmuls}
        return choose(self.problem.matmuls, self.problem.values, prices)

    def flipped(self, chosen: Collection[Var], var: Var) -> int:
        """How the time changes when a matmul changes its dtype."""
        after = {*chosen} ^ {var}
        times = self.problem.matmuls[var]
        change = times.fp8 - times.low if var in after else times.low - times.fp8
        return change + sum(
            _time(value, after) - _time(value, chosen) for value in self._values_of.get(var, ())
        )

    def _price(self, harm: float, weight: float) -> int:
        if not harm:
            return 0
        beyond = math.isinf(harm) or math.isinf(weight)
        return self._dearest if beyond else min(round(harm * weight), self._dearest)

    @functools.cached_property
    def _dearest(self) -> int:
        """More than anything could gain."""
        copies = sum(copy.time for value in self.problem.values for copy in value.copies)
        matmuls = sum(max(times.low, times.fp8) for times in self.problem.matmuls.values())
        return 1 + copies + matmuls + sum(value.low for value in self.problem.values)

    @functools.cached_property
    def _values_of(self) -> dict[Var, list[Value]]:
        found: dict[Var, list[Value]] = {}
        for value in self.problem.values:
            for reader in value.readers:
                found.setdefault(reader, []).append(value)
        return found


def choose_all(parts: Sequence[PricedFp8], weight: float) -> Choice[Chosen]:
    """The choice of several graphs of least time and weighted harm."""
    return choice_of(parts, [part.choose(weight) for part in parts], weight)


def within(parts: Sequence[PricedFp8], limit: float) -> Choice[Chosen]:
    """The fastest choice found of several graphs whose harm is at most ``limit``.

    Corners of the hull are exact, but may lie far apart. From the last that is beyond the limit towards the first that
    is within it, as few matmuls as possible go back to the low dtype.
    """
    limit *= 1 + 1e-9
    beyond, exact = bracket(lambda weight: choose_all(parts, weight), limit)
    if beyond is None or exact.harm > limit:
        return exact
    state = [set(chosen) for chosen in beyond.placement]
    _go_back(parts, state, exact.placement, limit)
    _fill(parts, state, limit)
    moved = choice_of(parts, [frozenset(chosen) for chosen in state])
    return min(
        (each for each in (exact, moved) if each.harm <= limit), key=lambda each: (each.time, each.harm)
    )


def _go_back(parts: Sequence[PricedFp8], state: Sequence[set[Var]], exact: Chosen, limit: float) -> None:
    """Matmuls go back to the low dtype, first what does the most harm for its time, until the limit is kept."""

    def gain(move: tuple[int, Var]) -> float:
        at, var = move
        return parts[at].harms[var] / max(parts[at].flipped(state[at], var), 1e-3)

    moves = [(at, var) for at, chosen in enumerate(exact) for var in sorted(state[at] - chosen, key=str)]
    for at, var in sorted(moves, key=gain, reverse=True):
        if _harm(parts, state) <= limit:
            return
        state[at].discard(var)


def _fill(parts: Sequence[PricedFp8], state: Sequence[set[Var]], limit: float) -> None:
    """Changes single matmuls, first what gains the most time for its harm, while that keeps the limit."""
    moves = [
        (at, var)
        for at, part in enumerate(parts)
        for var in sorted(part.problem.matmuls, key=str)
        if math.isfinite(part.harms.get(var, math.inf))
    ]
    changed = True
    while changed:
        changed, total = False, _harm(parts, state)
        gains = {(at, var): -parts[at].flipped(state[at], var) for at, var in moves}
        for at, var in sorted(
            moves, key=lambda move: -gains[move] / max(parts[move[0]].harms[move[1]], 1e-30)
        ):
            harm = parts[at].harms[var] * (-1 if var in state[at] else 1)
            if total + harm <= limit and parts[at].flipped(state[at], var) < 0:
                state[at].symmetric_difference_update({var})
                total += harm
                changed = True


def _harm(parts: Sequence[PricedFp8], state: Sequence[Collection[Var]]) -> float:
    return sum(part.harm(chosen) for part, chosen in zip(parts, state, strict=True))


def choice_of(parts: Sequence[PricedFp8], chosen: Chosen, weight: float = math.nan) -> Choice[Chosen]:
    """A choice with its time and harm."""
    pairs = list(zip(parts, chosen, strict=True))
    time = sum(part.problem.time(each) for part, each in pairs)
    return Choice(time, sum(part.harm(each) for part, each in pairs), weight, chosen)


def _time(value: Value, chosen: Collection[Var]) -> int:
    """What the copies of a value take."""
    low = value.low if any(reader not in chosen for reader in value.readers) else 0
    made = [copy.time for copy in value.copies if any(reader in chosen for reader in copy.readers)]
    return low + sum(made)
