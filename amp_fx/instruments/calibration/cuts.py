"""Both cuts over all graphs of a model: what a placement costs, and the placements that no other beats.

The first cut is between float32 and the low dtype. The second, given the first, is between the low dtype and the level
below: only where that was measured.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from amp_fx.compiler.settings import Options
from amp_fx.errors import PlanError
from amp_fx.instruments.calibration.frontier import Point
from amp_fx.instruments.calibration.second_cut import PricedMatmuls, price_matmuls
from amp_fx.instruments.calibration.traced import MeasuredGraph
from amp_fx.passes.forward.place_by_sensitivity import Placement, PricedGraph
from amp_fx.precision.placement.cut import HIGH, LOW, Var
from amp_fx.precision.placement.devices import resolve
from amp_fx.precision.placement.priced import Choice, Priced, SensitivityTerm, Sides, choose_all
from amp_fx.precision.placement.tradeoff import BYTES, hull, within
from amp_fx.precision.plans.label import Reason, ReasonKind
from amp_fx.precision.plans.matching import choose_plan
from amp_fx.precision.plans.plan import NodePlan, Plan, with_choice
from amp_fx.precision.plans.sensitivity import (
    ADDED,
    INPUT,
    MEASURED,
    OUTPUTS,
    GraphSensitivity,
    Sensitivity,
)
from amp_fx.precision.policy.levels import LEVELS

#: of measured scales: none is read by
NEVER = -1.0


@dataclass(frozen=True)
class Placed:
    """Where everything in a model is."""

    #: of the first cut, for each priced graph or body
    sides: list[Sides]
    #: of the second, for each graph
    below: list[Sides]
    #: which of these read by measured scales, see :meth:`Cuts.reading`
    most: float = NEVER


class Cuts:
    """Time, bytes and error of any placement of a model."""

    def __init__(
        self,
        graphs: Sequence[MeasuredGraph],
        sensitivity: Sensitivity,
        opts: Options,
        *,
        rounds_results: bool = False,
    ) -> None:
        self._graphs = graphs
        #: whether plans have the scales of results
        self._rounds_results = rounds_results
        self._sensitivity = sensitivity
        self._opts = opts
        self._most = NEVER
        #: (limit, aim) -> the first cut: budgets beyond torch.autocast's error have the same one
        self._firsts: dict[tuple[float, str], Choice[list[Sides]]] = {}

    def reading(self, most: float, plans: Sequence[Plan] = ()) -> Cuts:
        """Cuts in which a call has its measured scales if they add at most ``most``, or if its plan has them."""
        graphs = []
        for graph in self._sensitivity.graphs:
            rows = _rows_of(plans, graph) if plans else {}
            calls = []
            for call in graph.calls:
                known = rows.get(call.name)
                reads = most != NEVER and call.fits(most) if known is None else bool(known.scales)
                rounds = self._rounds_results if known is None else ADDED in known.scales
                left_out = set() if rounds else {ADDED}
                scales = {of: scale for of, scale in call.scales.items() if reads and of not in left_out}
                calls.append(replace(call, scales=scales))
            graphs.append(replace(graph, calls=calls))
        cuts = copy.copy(self)
        # sides of the first cut are of one capture
        cuts._priced = self._priced
        cuts._sensitivity, cuts._most = replace(self._sensitivity, graphs=graphs), most
        return cuts

    @functools.cached_property
    def _priced(self) -> list[list[PricedGraph]]:
        """Prices of every graph and of the bodies inside it."""
        found = []
        for graph, measured in zip(self._graphs, self._sensitivity.graphs, strict=True):
            profile = resolve(self._opts.profile, graph.device_type)
            found.append(graph.priced(self._opts, profile, {row.name: row for row in measured.calls}))
        return found

    @functools.cached_property
    def parts(self) -> list[PricedGraph]:
        """The priced graphs of all states in one list."""
        return [part for parts in self._priced for part in parts]

    @property
    def is_timed(self) -> bool:
        """True where every device that is planned for has a profile."""
        return all(resolve(self._opts.profile, graph.device_type) is not None for graph in self._graphs)

    @property
    def autocast_error(self) -> float:
        """Predicted error of torch.autocast; roundings that overflow are left out."""
        return math.sqrt(sum(part.autocast_sensitivity for part in self.parts))

    def placements(self, sides: Sequence[Sides]) -> list[Placement]:
        """The first cut in a form that holds for the same graphs captured again, one for each graph."""
        rest = iter(sides)
        return [
            {name: at for part in parts for name, at in part.placement(next(rest)).items()}
            for parts in self._priced
        ]

    def _below(self, sides: Sequence[Sides]) -> list[PricedMatmuls]:
        """The calls of each graph that may run below 16 bits, given the first cut."""
        rows = zip(self._graphs, self._sensitivity.graphs, self.placements(sides), self._priced, strict=True)
        rest, found = iter(sides), []
        for graph, measured, placed, parts in rows:
            rounded = {
                call: each for part in parts for call, each in part.operands_rounded(next(rest)).items()
            }
            if self._sensitivity.of != OUTPUTS:
                # the backward reads what was rounded
                rounded = {}
            low = {call for call, at in placed.items() if at == (LOW, LOW) or graph.wide is not None}
            found.append(price_matmuls(graph.below, measured.calls, low, rounded))
        return found

    def point(self, name: str | None, placed: Placed, make: Callable[[], list[Plan]]) -> Point:
        """A placement with what it costs, and what makes its plans."""
        parts = [*self.parts, *self._below(placed.sides)]
        pairs = list(zip(parts, [*placed.sides, *placed.below], strict=True))
        return Point(
            name=name,
            time=sum(part.priced.time(each) for part, each in pairs) * 1e-12 if self.is_timed else None,
            bytes_moved=sum(part.by_bytes.time(each) for part, each in pairs),
            error=math.sqrt(sum(part.priced.sensitivity(each) for part, each in pairs)),
            make=make,
            what=self._sensitivity.what,
        )

    def corners(self, most: int, aim: str) -> list[Choice[Placed]]:
        """Placements that no other beats in both error and what is minimised, by that."""

        def corners_of(parts: Sequence[PricedGraph | PricedMatmuls]) -> list[Choice[list[Sides]]]:
            priced = _prices(parts, aim)
            return hull(lambda weight: choose_all(priced, weight), most)

        found = [self._both(each) for each in corners_of(self.parts)]
        if self._sensitivity.level:
            first = self._first(math.inf, aim)
            found += [self._both(first, each) for each in corners_of(self._below(first.placement))]
        best: list[Choice[Placed]] = []
        for choice in sorted(found, key=lambda choice: (choice.time, choice.sensitivity)):
            if not best or choice.sensitivity < best[-1].sensitivity:
                best.append(choice)
        return best

    def within(self, limit: float, aim: str) -> Choice[Placed]:
        """The cheapest placement found whose squared error is at most ``limit``."""
        first = self._first(limit, aim)
        if not self._sensitivity.level:
            return self._both(first)
        second = _prices(self._below(first.placement), aim)
        return self._both(first, within(second, limit - first.sensitivity))

    def _first(self, limit: float, aim: str) -> Choice[list[Sides]]:
        """The cut between fp32 and the low dtype.

        Where a level below was measured, what a budget allows beyond torch.autocast's error is for that, and all of it
        where what the level leaves is in fp32.
        """
        if self._sensitivity.level:
            is_wide = all(graph.wide is not None for graph in self._graphs)
            limit = 0.0 if is_wide else min(limit, self.autocast_error**2)
        if (limit, aim) not in self._firsts:
            known = [part.autocast for part in self.parts]
            self._firsts[limit, aim] = within(_prices(self.parts, aim), limit, known)
        return self._firsts[limit, aim]

    def _both(self, first: Choice[list[Sides]], below: Choice[list[Sides]] | None = None) -> Choice[Placed]:
        """Both cuts together; without the second, nothing is below 16 bits."""
        if below is None:
            below = Choice(0, 0.0, [{} for _ in self._graphs])
        placed = Placed(first.placement, below.placement, self._most)
        return Choice(first.time + below.time, first.sensitivity + below.sensitivity, placed)

    def placed(self, plans: Sequence[Plan]) -> Placed:
        """The values that plans have low, and below 16 bits; PlanError for plans of another model, or with more."""
        sides: list[Sides] = []
        below: list[Sides] = []
        for parts, found in zip(self._priced, self._sensitivity.graphs, strict=True):
            rows = _rows_of(plans, found)
            sides += [part.sides_in(rows) for part in parts]
            below.append(self._sides_below(found, rows))
        return Placed(sides, below, self._most)

    def _sides_below(self, measured: GraphSensitivity, rows: Mapping[str, NodePlan]) -> Sides:
        """The matmuls of one graph that the rows of a plan run below 16 bits."""
        known = {(row.name, role) for row in measured.calls for role in row.roles}
        found: dict[Var, bool] = {}
        for name, row in rows.items():
            for role, level in row.levels_below.items():
                what = f"the plan runs {name} in {level.name}, {role}"
                if level.name != self._sensitivity.level:
                    raise PlanError(
                        f"{what}; measured was {self._sensitivity.level or 'no such level'}. Calibrate with "
                        f"policy={level.policy!r} and {level.policy}={level.name!r}."
                    )
                if (name, role) not in known:
                    raise PlanError(f"{what}, which was not measured; calibrate again.")
                found[name, role] = LOW
        return found

    def by_policy(self, placed: Placed) -> Placed:
        """The matmuls that the policy itself runs below 16 bits: those that gain time, or all if time is unknown."""
        problems = [part.priced.base for part in self._below(placed.sides)]
        below: list[Sides] = [dict.fromkeys(problem.unary, LOW) for problem in problems]
        if self.is_timed:
            below = choose_all([Priced(problem) for problem in problems], 0.0).placement
        graphs = (graph.calls for graph in self._sensitivity.graphs)
        known = ({(row.name, role) for row in calls for role in row.roles} for calls in graphs)
        pairs = zip(below, known, strict=True)
        below = [{var: at for var, at in sides.items() if var in names} for sides, names in pairs]
        return Placed(placed.sides, below, self._most)

    def write(self, plans: Sequence[Plan], placed: Placed) -> None:
        """Writes into plans in which level their matmuls run, and what that adds to the error."""
        level = LEVELS[self._sensitivity.level]
        priced = zip(self._sensitivity.graphs, self._below(placed.sides), placed.below, strict=True)
        for plan, (measured, part, sides) in zip(plans, priced, strict=True):
            plan.meaning = level.name
            calls = {row.name: row for row in measured.calls}
            rows = {row.name: row for row in plan.nodes}
            for var in part.priced.base.unary:
                name, role = var  # type: ignore[misc]  # as PlaceLevels names them
                error = math.sqrt(part.priced.sensitivity({var: LOW}))
                if is_below := sides.get(var, HIGH) is LOW:
                    why = Reason.of(ReasonKind.LEVEL_ADDS, policy=level.policy, level=level.name, error=error)
                else:
                    why = Reason.of(
                        ReasonKind.LEVEL_WOULD_ADD,
                        low=self._sensitivity.dtype,
                        policy=level.policy,
                        error=error,
                    )
                levels, reasons = with_choice(rows[name], role, level if is_below else None, why)
                rows[name] = replace(rows[name], levels=levels, reasons=reasons)
                is_measured = is_below and name in part.measured
                if is_measured:
                    rows[name].scales = dict(calls[name].scales)
                if is_below and name in calls:
                    rows[name].equalisation = calls[name].equalisation.get(
                        MEASURED if is_measured else INPUT, ()
                    )
            plan.nodes = [*rows.values()]

    def blame(self, placed: Placed | None = None) -> list[SensitivityTerm]:
        """The roundings of torch.autocast, or what a placement adds below 16 bits by operand, worst first."""
        parts: list[tuple[Priced, Sides]] = [(part.priced, part.autocast) for part in self.parts]
        if placed is not None:
            priced = [part.priced for part in self._below(placed.sides)]
            parts = list(zip(priced, placed.below, strict=True))
        terms = [term for part, sides in parts for term in part.blame(sides)]
        return sorted(terms, key=lambda term: -term.sensitivity)


def _rows_of(plans: Sequence[Plan], found: GraphSensitivity) -> dict[str, NodePlan]:
    """The rows that plans have for the calls of a graph, by the names there."""
    _, matched = choose_plan(plans, found.outline)
    return {row.name: saved for saved, row in matched.pairs}


def _prices(parts: Sequence[PricedGraph | PricedMatmuls], aim: str) -> list[Priced]:
    """The quantity to minimise, one of :data:`amp_fx.precision.placement.tradeoff.MINIMISED`."""
    return [part.by_bytes if aim == BYTES else part.priced for part in parts]
