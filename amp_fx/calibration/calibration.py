"""What a calibration knows: who is to blame, what accuracy costs, and which plan to take."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from amp_fx.calibration.blame import blame_lines
from amp_fx.calibration.figure import save_figure
from amp_fx.calibration.points import CalibratedPlan, Point
from amp_fx.calibration.step import Step
from amp_fx.calibration.traced import TracedGraph
from amp_fx.calibration.verifying import Verifier
from amp_fx.errors import OptionsError, PlanError
from amp_fx.options import Options
from amp_fx.passes.forward.harm_prices import labels_of
from amp_fx.passes.forward.place_by_harm import Labels, PricedGraph, choose, within
from amp_fx.placement.devices import resolve
from amp_fx.placement.profile import DeviceProfile
from amp_fx.placement.tradeoff import Choice, hull
from amp_fx.plans.harm import Harm
from amp_fx.plans.plan import NodePlan, Plan
from amp_fx.plans.plan_files import choose_plan, load_plans
from amp_fx.policy import Policy

__all__ = ["Calibration"]

#: corners of the frontier that are shown
_CORNERS = 12

#: plans that are compiled to find one that keeps its budget
_TRIES = 3

#: placements to compare with: name -> policy; listed ops low, whatever the device
_KNOWN = {
    "autocast": Policy("autocast"),
    "fast": Policy("fast"),
    "fp32": Policy.parse({"rules": [{"module": ".*", "precision": "fp32"}]}),
}


class Calibration:
    """What :func:`amp_fx.calibrate` found.

    Attributes:
        harm: what was measured, as plain data.
    """

    def __init__(
        self, harm: Harm, graphs: Sequence[TracedGraph], opts: Options, steps: Sequence[Step]
    ) -> None:
        self.harm = harm
        self._graphs = list(graphs)
        self._opts = opts
        self._steps = list(steps)

    @staticmethod
    def worst(*calibrations: Calibration) -> Calibration:
        """One calibration for several states of a model: of each rounding, the largest harm that any of them found.

        Harm changes while a model trains. A plan made from this keeps its budget in all of the states::

            early, late = (amp_fx.calibrate(load(path), batches) for path in paths)
            plan = amp_fx.Calibration.worst(early, late).plan()

        Args:
            *calibrations: of one program, at least one, with the same low dtype; profile, target and rules are those of
                the last. Plans are checked in each state that is a module of its own.

        Raises:
            PlanError: they are not of one program; names what differs.
        """
        if not calibrations:
            raise OptionsError("worst takes at least one calibration; got none.")
        last = calibrations[-1]
        steps = [step for calibration in calibrations for step in calibration._steps]
        harm = Harm.worst([calibration.harm for calibration in calibrations])
        return Calibration(harm, last._graphs, last._opts, steps)

    # --- what any placement costs ---

    @functools.cached_property
    def _priced(self) -> list[list[PricedGraph]]:
        """Prices of every graph and of the bodies inside it."""
        return [
            graph.priced(self._opts, self._profile(graph.device_type), {row.name: row for row in found.calls})
            for graph, found in zip(self._graphs, self.harm.graphs, strict=True)
        ]

    @functools.cached_property
    def _parts(self) -> list[PricedGraph]:
        return [part for parts in self._priced for part in parts]

    def _profile(self, device_type: str) -> DeviceProfile | None:
        return resolve(self._opts.profile, device_type)

    def _choose(self, weight: float) -> Choice[Labels]:
        return choose(self._parts, weight)

    def _point(self, name: str | None, labels: Labels, make: Callable[[], list[Plan]]) -> Point:
        pairs = list(zip(self._parts, labels, strict=True))
        time = sum(part.priced.time(chosen) for part, chosen in pairs)
        timed = all(self._profile(graph.device_type) is not None for graph in self._graphs)
        return Point(
            name=name,
            time=time * 1e-12 if timed else None,
            bytes_moved=sum(part.moved(chosen) for part, chosen in pairs),
            error=math.sqrt(sum(part.priced.harm(chosen) for part, chosen in pairs)),
            make=make,
        )

    def _corner(self, choice: Choice[Labels]) -> Point:
        return self._point(None, choice.placement, lambda: self._plans_of(choice.placement))

    def _labels(self, plans: Sequence[Plan]) -> Labels:
        """The labels that plans give, one mapping for each priced graph or body.

        Raises:
            PlanError: the plans are not of this model.
        """
        labels: Labels = []
        for parts, found in zip(self._priced, self.harm.graphs, strict=True):
            chosen = choose_plan(plans, found.outline)
            rows: dict[str, NodePlan] = {
                row.name: saved for row, saved in zip(found.outline.nodes, chosen.nodes, strict=True)
            }
            labels += [labels_of(part.graph, rows, part.low) for part in parts]
        return labels

    # --- plans ---

    @functools.cached_property
    def _known(self) -> dict[str, Point]:
        plans_of = {
            name: [
                graph.plan(replace(self._opts, policy=policy, profile="off", harm=None))
                for graph in self._graphs
            ]
            for name, policy in _KNOWN.items()
        }

        return {
            name: self._point(name, self._labels(plans), lambda plans=plans: plans)
            for name, plans in plans_of.items()
        }

    def _plans_of(self, labels: Labels) -> list[Plan]:
        """The plans of a placement, made by the passes."""
        placed: list[dict[str, tuple[bool, bool]]] = []
        rest = iter(labels)
        for parts in self._priced:
            placed.append({})
            for part in parts:
                placed[-1].update(part.placement(next(rest)))
        with torch.enable_grad():
            return [
                graph.plan(replace(self._opts, harm=replace(self.harm, graphs=[found])), placement)
                for graph, found, placement in zip(self._graphs, self.harm.graphs, placed, strict=True)
            ]

    @property
    def autocast_error(self) -> float:
        """Predicted error of torch.autocast; roundings that overflow are left out."""
        return math.sqrt(sum(part.autocast_harm for part in self._parts))

    def frontier(self) -> list[Point]:
        """Placements that no other beats in both time and error, with autocast, fast and fp32 among them, by time."""
        corners = [self._corner(each) for each in hull(self._choose, _CORNERS)]
        points = [*corners, *self._known.values()]
        return sorted(points, key=lambda point: point.bytes_moved if point.time is None else point.time)

    def predict(self, plan: object) -> float:
        """The relative L2 error of the gradient that a plan would have.

        Args:
            plan: a :class:`Plan`, a list of them, what :meth:`plan` returned, or the path of a plan file.

        Raises:
            PlanError: it is not about this model; the message names what has moved.
        """
        if isinstance(plan, CalibratedPlan):
            plans: Sequence[Plan] = plan.plans
        elif isinstance(plan, (str, os.PathLike)):
            plans = load_plans(plan)
        else:
            plans = [plan] if isinstance(plan, Plan) else plan  # type: ignore[assignment]  # checked below
        if not isinstance(plans, (list, tuple)) or not all(isinstance(each, Plan) for each in plans):
            raise PlanError(
                f"predict takes a plan, a list of plans or the path of a plan file; got {plan!r}."
            )
        return self._point(None, self._labels(plans), lambda: list(plans)).error

    def plan(
        self,
        budget: str | float | None = None,
        *,
        error: float | None = None,
        time: float | None = None,
        verify: bool = True,
    ) -> CalibratedPlan:
        """The cheapest plan whose error is within a budget; give one of the three, or none for ``budget="autocast"``.

        Args:
            budget: ``"autocast"``, or a number: times torch.autocast's error.
            error: relative L2 error of the gradient.
            time: seconds of a step; the plan of least error within them.
            verify: run one compiled step of the plan, forward and backward, against fp32 (fp64 where that fits). A plan
                that misses its budget by more than 1.3 times gives way to the next on the frontier.

        Raises:
            OptionsError: more than one limit, or one that is no positive number.
        """
        if sum(limit is not None for limit in (budget, error, time)) > 1:
            raise OptionsError("plan takes one of budget, error and time.")
        with torch.enable_grad():
            if time is not None:
                chosen = self._within_time(_positive("time", time))
                return self._finish(chosen, None, verify)
            if error is not None:
                limit = _positive("error", error)
            else:
                factor = 1.0 if budget in (None, "autocast") else _positive("budget", budget)
                limit = factor * self.autocast_error
            chosen = within(self._parts, limit**2)
            return self._finish(chosen, limit, verify)

    def _within_time(self, time: float) -> Choice[Labels]:
        if any(self._profile(graph.device_type) is None for graph in self._graphs):
            raise OptionsError("plan(time=...) needs a device profile, which is off.")
        corners = hull(self._choose, 8 * _CORNERS)
        fitting = [corner for corner in corners if corner.time * 1e-12 <= time]
        return min(fitting, key=lambda corner: corner.harm) if fitting else corners[0]

    def _finish(self, chosen: Choice[Labels], limit: float | None, verify: bool) -> CalibratedPlan:
        tried: list[tuple[float, float]] = []
        while True:
            point = self._corner(chosen)
            found = replace(point.plan, budget=limit, tried=tuple(tried))
            if not verify:
                return found
            measured = self._verifier.error(found.plans)
            found = replace(found, measured=measured)
            if limit is None or self._verifier.keeps(measured, limit, self.autocast_error):
                return found
            tried.append((point.error, measured))
            stricter = within(self._parts, chosen.harm * min(0.5, (limit / measured) ** 2))
            if len(tried) == _TRIES or stricter.harm >= chosen.harm:
                return found
            chosen = stricter

    @functools.cached_property
    def _verifier(self) -> Verifier:
        return Verifier(self._steps, self._opts, self.harm.scale)

    # --- what a reader sees ---

    def __str__(self) -> str:
        return "\n".join(blame_lines(self.harm, self._parts, self._sources(), self._known))

    def _sources(self) -> dict[str, NodePlan]:
        return {row.name: row for graph in self.harm.graphs for row in graph.outline.nodes}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes ``.json``, the harm, or the frontier as ``.png``, ``.svg``, ``.pdf`` or ``.html``.

        Raises:
            AmpFxError: matplotlib is missing, or does not write that suffix.
            OSError: the file cannot be written.
        """
        path = Path(path)
        if path.suffix.lower() == ".json":
            self.harm.save(path)
        else:
            save_figure(self.frontier(), self.harm.model, str(self), path)
        return path


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        valid = "'autocast' or a number" if name == "budget" else "a number"
        raise OptionsError(f"{name} must be {valid} from 0 on; got {value!r}.")
    return float(value)
