"""What runs in fp8 in a whole model: the second cut over all graphs, given what the first one has low."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from amp_fx.calibration.traced import TracedGraph
from amp_fx.errors import PlanError
from amp_fx.passes.forward.place_by_harm import Labels
from amp_fx.placement.fp8_choice import Chosen, Fp8Problem, PricedFp8, choice_of, choose_all, within
from amp_fx.placement.tradeoff import Choice, hull
from amp_fx.plans.harm import Harm, as_number
from amp_fx.plans.plan import NodePlan, Plan, dtype_name
from amp_fx.policy.fp8 import FORWARD

__all__ = ["Fp8Harm", "LowCalls", "Placed", "SecondCut"]

#: for each graph: the calls that run in the low dtype
LowCalls = Sequence[Collection[str]]


@dataclass(frozen=True)
class Placed:
    """Where everything in a model is.

    Attributes:
        labels: of the first cut, one mapping for each priced graph or body.
        fp8: for each graph, what runs in fp8.
    """

    labels: Labels
    fp8: Chosen


@dataclass(frozen=True)
class Fp8Harm:
    """What one operand of one matmul adds in fp8.

    Attributes:
        harm: to the squared relative error of the gradient.
        call: whose matmul it is.
        role: a value of :data:`amp_fx.policy.fp8.ROLES`.
        operand: ``"input"``, ``"weight"`` or ``"gradient"``.
    """

    harm: float
    call: str
    role: str
    operand: str


class SecondCut:
    """The matmuls of a model that may run in fp8. Without measured harm of fp8, none may.

    Times are those that fp8 takes more, so negative where it gains: in picoseconds, without a device profile in bytes
    and what a GPU moves while it multiplies.
    """

    def __init__(self, graphs: Sequence[TracedGraph], harm: Harm) -> None:
        self._graphs = graphs
        self._harm = harm

    @property
    def is_measured(self) -> bool:
        """False where only the low dtype was measured."""
        return bool(self._harm.fp8)

    def priced(self, low: LowCalls) -> list[PricedFp8]:
        """The cut's problem of every graph, with harm."""
        found = []
        for graph, measured, calls in zip(self._graphs, self._harm.graphs, low, strict=True):
            rows = {row.name: row for row in measured.calls}
            if graph.fp8 is None:
                found.append(PricedFp8(Fp8Problem({}, ()), {}))
            else:
                found.append(graph.fp8.priced(rows, calls))
        return found

    def all_that_gains(self, low: LowCalls, *, timed: bool) -> Choice[Chosen]:
        """What policy fp8 chooses by itself: whatever gains time, or all that may where time is not known."""
        parts = self.priced(low)
        if timed:
            parts = [PricedFp8(part.problem, dict.fromkeys(part.problem.matmuls, 0.0)) for part in parts]
            return self.of(low, choose_all(parts, 0.0).placement)
        return self.of(low, [frozenset(part.problem.matmuls) for part in parts])

    def of(self, low: LowCalls, chosen: Chosen) -> Choice[Chosen]:
        """Time and harm of a choice."""
        return self._relative(low, choice_of(self.priced(low), chosen))

    def within(self, low: LowCalls, limit: float) -> Choice[Chosen]:
        """The choice of least time whose harm is at most ``limit``."""
        return self._relative(low, within(self.priced(low), limit))

    def corners(self, low: LowCalls, most: int) -> list[Choice[Chosen]]:
        """Choices that no other beats in both time and harm, from the least time on."""
        parts = self.priced(low)
        return [
            self._relative(low, corner) for corner in hull(lambda weight: choose_all(parts, weight), most)
        ]

    def _relative(self, low: LowCalls, choice: Choice[Chosen]) -> Choice[Chosen]:
        nothing = sum(part.problem.time(()) for part in self.priced(low))
        return replace(choice, time=choice.time - nothing)

    def blame(self, chosen: Chosen) -> list[Fp8Harm]:
        """What a choice adds, operand by operand, worst first."""
        found = [
            Fp8Harm(as_number(harm), row.name, role, operand)
            for measured, each in zip(self._harm.graphs, chosen, strict=True)
            for row in measured.calls
            for role, operands in row.fp8.items()
            for operand, harm in operands.items()
            if (row.name, role) in each
        ]
        return sorted(found, key=lambda rounding: -rounding.harm)

    def moved(self, low: LowCalls, chosen: Chosen) -> int:
        """Bytes that a choice moves more than the low dtype."""
        return sum(
            graph.fp8.moved(each, calls)
            for graph, each, calls in zip(self._graphs, chosen, low, strict=True)
            if graph.fp8 is not None
        )

    # --- plans ---

    def chosen_in(self, rows: Sequence[dict[str, NodePlan]], plans: Iterable[Plan]) -> Chosen:
        """What plans run in fp8.

        Args:
            rows: for each graph, call -> what its plan says of it.
            plans: that these are from.

        Raises:
            PlanError: something else was measured.
        """
        chosen: Chosen = [
            frozenset((name, role) for name, row in named.items() for role in row.fp8_roles) for named in rows
        ]
        if not any(chosen):
            return chosen
        recipes = {plan.fp8 for plan in plans if any(row.fp8_roles for row in plan.nodes)}
        if recipes != {self._harm.fp8}:
            raise PlanError(
                f"the plan runs matmuls in fp8 by recipe {', '.join(sorted(recipes))}; measured was "
                f"{self._harm.fp8 or 'nothing of fp8'}. Calibrate with policy='fp8' and that recipe."
            )
        for each, measured in zip(chosen, self._harm.graphs, strict=True):
            known = {(row.name, role) for row in measured.calls for role in row.fp8}
            if unknown := sorted(each - known, key=str):
                name, role = unknown[0]  # type: ignore[misc]  # made above
                raise PlanError(
                    f"the plan runs {name} in fp8, {role}, which was not measured; calibrate again."
                )
        return chosen

    def write(self, plans: Sequence[Plan], low: LowCalls, chosen: Chosen) -> None:
        """Writes into plans what their matmuls multiply, and what that adds to the error."""
        for plan, part, each in zip(plans, self.priced(low), chosen, strict=True):
            plan.fp8 = self._harm.fp8
            rows = {row.name: row for row in plan.nodes}
            for name, role in part.problem.matmuls:  # type: ignore[misc]  # as PlaceFp8 names them
                self._write(rows[name], role, part.harm([(name, role)]), in_fp8=(name, role) in each)

    def _write(self, row: NodePlan, role: str, harm: float, *, in_fp8: bool) -> None:
        if row.low is None:
            raise AssertionError(f"{row.name} multiplies, and has no low dtype")
        row.roles[role] = torch.float8_e4m3fn if in_fp8 else row.low
        if in_fp8 and role == FORWARD:
            row.multiplied = torch.float8_e4m3fn
        what = f"fp8, {self._harm.fp8}, adds" if in_fp8 else f"{dtype_name(row.low)}, fp8 would add"
        row.reason += f"; {role}: {what} {harm**0.5:.1e} to the gradient's error"
