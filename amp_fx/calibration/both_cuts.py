"""Both cuts over all graphs of a model: what a placement costs, and the placements that no other beats.

The first cut is between float32 and the low dtype. The second, given the first, is between the low dtype and fp8: only
where fp8 was measured.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

from amp_fx.calibration.points import Point
from amp_fx.calibration.second_cut import Placed, SecondCut
from amp_fx.calibration.traced import TracedGraph
from amp_fx.options import Options
from amp_fx.passes.forward.harm_prices import labels_of
from amp_fx.passes.forward.place_by_harm import Labels, PricedGraph, choose
from amp_fx.passes.forward.place_by_harm import within as first_within
from amp_fx.placement.devices import resolve
from amp_fx.placement.fp8_choice import Chosen
from amp_fx.placement.profile import DeviceProfile
from amp_fx.placement.tradeoff import Choice, hull
from amp_fx.plans.harm import Harm
from amp_fx.plans.plan import NodePlan, Plan
from amp_fx.plans.plan_files import choose_plan, counterparts

__all__ = ["BothCuts"]


class BothCuts:
    """Time, bytes and error of any placement of a model."""

    def __init__(self, graphs: Sequence[TracedGraph], harm: Harm, opts: Options) -> None:
        self._graphs = graphs
        self._harm = harm
        self._opts = opts

    @functools.cached_property
    def priced(self) -> list[list[PricedGraph]]:
        """Prices of every graph and of the bodies inside it."""
        return [
            graph.priced(self._opts, self._profile(graph.device_type), {row.name: row for row in found.calls})
            for graph, found in zip(self._graphs, self._harm.graphs, strict=True)
        ]

    @functools.cached_property
    def parts(self) -> list[PricedGraph]:
        """The same in one list."""
        return [part for parts in self.priced for part in parts]

    def _profile(self, device_type: str) -> DeviceProfile | None:
        return resolve(self._opts.profile, device_type)

    def _choose(self, weight: float) -> Choice[Labels]:
        return choose(self.parts, weight)

    def point(self, name: str | None, placed: Placed, make: Callable[[], list[Plan]]) -> Point:
        """A placement with what it costs.

        Args:
            name: of the point, or None.
            placed: where everything is.
            make: makes its plans.
        """
        pairs = list(zip(self.parts, placed.labels, strict=True))
        fp8 = self.second.of(self.low(placed.labels), placed.fp8)
        time = sum(part.priced.time(chosen) for part, chosen in pairs) + fp8.time
        moved = sum(part.moved(chosen) for part, chosen in pairs)
        return Point(
            name=name,
            time=time * 1e-12 if self.is_timed else None,
            bytes_moved=moved + self.second.moved(self.low(placed.labels), placed.fp8),
            error=math.sqrt(sum(part.priced.harm(chosen) for part, chosen in pairs) + fp8.harm),
            make=make,
        )

    @property
    def is_timed(self) -> bool:
        """True where every device that is planned for has a profile."""
        return all(self._profile(graph.device_type) is not None for graph in self._graphs)

    def corners(self, most: int) -> list[Choice[Placed]]:
        """Placements that no other beats in both time and error, by time."""
        found = [self._with_fp8(first, self._nothing) for first in hull(self._choose, most)]
        if self.second.is_measured:
            first = self._at_autocast
            fp8 = self.second.corners(self.low(first.placement), most)
            found += [self._with_fp8(first, each) for each in fp8]
        found.sort(key=lambda choice: (choice.time, choice.harm))
        best: list[Choice[Placed]] = []
        for choice in found:
            if not best or choice.harm < best[-1].harm:
                best.append(choice)
        return best

    def _with_fp8(self, first: Choice[Labels], fp8: Choice[Chosen]) -> Choice[Placed]:
        placed = Placed(first.placement, fp8.placement)
        return Choice(first.time + fp8.time, first.harm + fp8.harm, first.weight, placed)

    @property
    def _nothing(self) -> Choice[Chosen]:
        return Choice(0, 0.0, math.nan, [frozenset() for _ in self._graphs])

    @property
    def autocast_error(self) -> float:
        """Predicted error of torch.autocast; roundings that overflow are left out."""
        return math.sqrt(sum(part.autocast_harm for part in self.parts))

    @functools.cached_property
    def second(self) -> SecondCut:
        """What may run in fp8."""
        return SecondCut(self._graphs, self._harm)

    @functools.cached_property
    def _at_autocast(self) -> Choice[Labels]:
        """The first cut within torch.autocast's error; what a budget allows beyond it is for fp8."""
        return first_within(self.parts, self.autocast_error**2)

    def within(self, limit: float) -> Choice[Placed]:
        """The cheapest placement found whose squared error is at most ``limit``."""
        if not self.second.is_measured:
            return self._with_fp8(first_within(self.parts, limit), self._nothing)
        above = limit >= self.autocast_error**2
        first = self._at_autocast if above else first_within(self.parts, limit)
        return self._with_fp8(first, self.second.within(self.low(first.placement), limit - first.harm))

    def low(self, labels: Labels) -> list[set[str]]:
        """For each graph, the calls that are low."""
        rest = iter(labels)
        return [
            {name for part in parts for name, (wide, _) in part.placement(next(rest)).items() if not wide}
            for parts in self.priced
        ]

    def placed(self, plans: Sequence[Plan]) -> Placed:
        """What plans have low, and in fp8.

        Raises:
            PlanError: the plans are not of this model, or have what was not measured.
        """
        labels: Labels = []
        named: list[dict[str, NodePlan]] = []
        for parts, found in zip(self.priced, self._harm.graphs, strict=True):
            chosen = choose_plan(plans, found.outline)
            rows = {row.name: saved for saved, row in counterparts(chosen, found.outline)}
            labels += [labels_of(part.graph, rows, part.low) for part in parts]
            named.append(rows)
        return Placed(labels, self.second.chosen_in(named, plans))
