"""Cuts with a second price: placements of least time and weighted sensitivity.

Both cuts are here: fp32 against the low dtype, and the low dtype against a level below. In either, sensitivity is a
sum of terms of one variable, or of two in a submodular way, so that a cut stays exact for any weight of it.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import ChainMap
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

from amp_fx.precision.placement.cut import HIGH, Problem, Shared, Var, solve

#: variable -> its side; what has none is HIGH
Sides = Mapping[Var, bool]

T = TypeVar("T")


@dataclass(frozen=True)
class Choice(Generic[T]):
    """A placement, in whatever form the caller has it, with its time and its sensitivity."""

    time: float
    sensitivity: float
    placement: T


@dataclass(frozen=True)
class SensitivityTerm:
    """``sensitivity`` is added if ``var`` has ``side`` and ``against`` (where given) has the other one."""

    #: what it adds to the squared relative error; infinite where something overflows
    sensitivity: float
    side: bool
    var: Var
    against: Var | None = None
    #: name of the call whose result, operand or, ``backward``, gradient is rounded
    call: str = ""
    #: the operand, as :func:`amp_fx.precision.plans.sensitivity.slots` names it; empty for the result
    slot: str = ""
    backward: bool = False

    def is_done(self, sides: Sides) -> bool:
        """True where the sides round here."""
        if sides.get(self.var, HIGH) is not self.side:
            return False
        return self.against is None or sides.get(self.against, HIGH) is not self.side


class Priced:
    """A cut's problem with sensitivity: placements of least ``time + weight * sensitivity``, exactly, for any weight.

    ``scale`` units of the problem are one unit of time; less than that only breaks ties. ``relative``: times are those
    beyond everything HIGH, so negative where LOW gains.
    """

    def __init__(
        self,
        problem: Problem,
        terms: Sequence[SensitivityTerm] = (),
        scale: int = 1,
        *,
        relative: bool = False,
    ) -> None:
        self.base = problem
        self.terms = terms
        self._scale = scale
        self._all = sum(map(max, problem.unary.values())) + sum(term.cost for term in problem.shared) + 1
        finite = [term.sensitivity for term in terms if math.isfinite(term.sensitivity)]
        self._smallest = max(finite, default=1.0) * 1e-12
        self._shared_of = _by_variable((term, (*term.readers, term.value)) for term in problem.shared)
        self._terms_of = _by_variable((term, _pair(term)) for term in terms)
        #: pins -> weights, ascending, each with its placement
        self._solved: dict[frozenset[tuple[Var, bool]], list[tuple[float, Sides]]] = {}
        self._start = 0
        self._start = self.time({}) if relative else 0

    def choose(self, weight: float, pins: Sides = MappingProxyType({})) -> Choice[Sides]:
        """The placement of least cost where some sides are given, which the constraints allow.

        ``weight`` is the time that a squared relative error of 1 is worth; infinite: the least sensitivity.
        """
        sides = dict(pins)
        for island, names in self._islands:
            sides.update(island._sides(weight, {var: side for var, side in pins.items() if var in names}))
        return Choice(self.time(sides), self.sensitivity(sides), sides)

    @functools.cached_property
    def _islands(self) -> list[tuple[Priced, Collection[Var]]]:
        """The variables by terms and constraints that they have in common: each part is solved by itself."""
        import networkx as nx

        ties: nx.Graph = nx.Graph(self.base.implies)
        ties.add_nodes_from(self.base.variables())
        for names in (*((term.value, *term.readers) for term in self.base.shared), *map(_pair, self.terms)):
            nx.add_path(ties, [var for var in names if var is not None])
        islands = [*nx.connected_components(ties)]
        number = {var: at for at, names in enumerate(islands) for var in names}
        problems, terms = [Problem() for _ in islands], [list[SensitivityTerm]() for _ in islands]
        for name in ("unary", "pins", "preferred"):
            for var, given in getattr(self.base, name).items():
                getattr(problems[number[var]], name)[var] = given
        for shared in self.base.shared:
            if shared.readers:
                problems[number[shared.readers[0]]].shared.append(shared)
        for pair in self.base.implies:
            problems[number[pair[0]]].implies.append(pair)
        for term in self.terms:
            terms[number[term.var]].append(term)
        rows = zip(problems, terms, islands, strict=True)
        return [(Priced(problem, found, self._scale), names) for problem, found, names in rows]

    def _sides(self, weight: float, pins: Sides) -> Sides:
        """The placement of one island. One that is the best for two weights is for all between them."""
        known = self._solved.setdefault(frozenset(pins.items()), [])
        at = bisect.bisect_left(known, weight, key=lambda each: each[0])
        near = known[max(at - 1, 0) : at + 1]
        if any(each[0] == weight for each in near) or (len(near) == 2 and near[0][1] == near[1][1]):
            return near[-1][1]
        sides = solve(self.problem(weight, pins))
        known.insert(at, (weight, sides))
        return sides

    def problem(self, weight: float, pins: Sides = MappingProxyType({})) -> Problem:
        """The quantity that :meth:`choose` minimises."""
        base = self.base
        prices = [self._price(term.sensitivity, weight) for term in self.terms]
        # an overflow is dearer than everything else together
        beyond = self._all + sum(price for price in prices if price is not None)
        added = [
            Shared(beyond if price is None else price, term.side, (term.var,), term.against)
            for term, price in zip(self.terms, prices, strict=True)
        ]
        return Problem(base.unary, {**base.pins, **pins}, [*base.shared, *added], base.implies)

    def _price(self, sensitivity: float, weight: float) -> int | None:
        """None for an overflow."""
        if not sensitivity or math.isinf(sensitivity):
            return None if sensitivity else 0
        if math.isinf(weight):
            # the smallest difference of sensitivities that counts beats any time
            return round(sensitivity / self._smallest) * self._all
        return round(sensitivity * weight * self._scale)

    def time(self, sides: Sides) -> int:
        """Time of a placement, whether or not the constraints allow it; casts that tie are left out."""
        return self.base.cost(sides) // self._scale - self._start

    def sensitivity(self, sides: Sides) -> float:
        """The squared relative error that a placement adds."""
        return sum(term.sensitivity for term in self.terms if term.is_done(sides))

    def blame(self, sides: Sides) -> list[SensitivityTerm]:
        """The roundings of a placement, worst first."""
        done = [term for term in self.terms if term.is_done(sides)]
        return sorted(done, key=lambda term: -term.sensitivity)

    def differing(self, first: Sides, second: Sides) -> set[Var]:
        """The variables in which two placements differ."""
        return {var for var in self.base.variables() if first.get(var, HIGH) is not second.get(var, HIGH)}

    def groups(self, first: Sides, second: Sides) -> list[set[Var]]:
        """The variables in which two placements differ, those together that constraints tie."""
        import networkx as nx

        differ = self.differing(first, second)
        ties = nx.Graph()
        ties.add_nodes_from(sorted(differ, key=str))
        ties.add_edges_from((a, b) for a, b in self.base.implies if a in differ and b in differ)
        return list(nx.connected_components(ties))

    def flipped(self, sides: Sides, group: set[Var]) -> tuple[float, float]:
        """How time and sensitivity change when the variables of a group take their other sides."""
        after = ChainMap({var: not sides.get(var, HIGH) for var in group}, sides)  # type: ignore[arg-type]  # only read
        time = 0
        for var in group:
            high, low = self.base.unary.get(var, (0, 0))
            time += (high - low) if after[var] is HIGH else (low - high)
        copies = {id(term): term for var in group for term in self._shared_of.get(var, ())}
        terms = {id(term): term for var in group for term in self._terms_of.get(var, ())}
        time += sum(term.cost * (term.is_paid(after) - term.is_paid(sides)) for term in copies.values())
        sensitivity = sum(t.sensitivity * (t.is_done(after) - t.is_done(sides)) for t in terms.values())
        return time / self._scale, sensitivity


def choose_all(parts: Sequence[Priced], weight: float, pins: Sequence[Sides] = ()) -> Choice[list[Sides]]:
    """The placement of several graphs of least time and weighted sensitivity; ``pins`` of each graph, or none."""
    pairs = zip(parts, pins or [{}] * len(parts), strict=True)
    return choice_of(parts, [part.choose(weight, each).placement for part, each in pairs])


def choice_of(parts: Sequence[Priced], sides: Sequence[Sides]) -> Choice[list[Sides]]:
    """A placement of several graphs with its time and sensitivity."""
    pairs = list(zip(parts, sides, strict=True))
    time = sum(part.time(each) for part, each in pairs)
    return Choice(time, sum(part.sensitivity(each) for part, each in pairs), list(sides))


def _pair(term: SensitivityTerm) -> tuple[Var | None, ...]:
    return term.var, term.against


def _by_variable(rows: Iterable[tuple[T, tuple[Var | None, ...]]]) -> dict[Var, list[T]]:
    found: dict[Var, list[T]] = {}
    for term, variables in rows:
        for var in dict.fromkeys(variables):
            if var is not None:
                found.setdefault(var, []).append(term)
    return found
