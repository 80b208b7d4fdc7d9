"""The findings of a calibration: the calls that err most, the price of accuracy, and the plan to take."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from amp_fx.compiler.settings import Options
from amp_fx.errors import OptionsError, one_of
from amp_fx.instruments.calibration.cuts import NEVER, Cuts, Placed
from amp_fx.instruments.calibration.frontier import CalibratedPlan, Point, blame_lines, save_frontier
from amp_fx.instruments.calibration.traced import MeasuredGraph
from amp_fx.instruments.calibration.verifying import SLACK, Verifier
from amp_fx.instruments.progress import progress
from amp_fx.instruments.step import Step
from amp_fx.precision.placement.level_cost import multiplies
from amp_fx.precision.placement.priced import Choice
from amp_fx.precision.placement.tradeoff import BYTES, MINIMISED, TIME
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.plans.sensitivity import INPUT, CallSensitivity, Sensitivity
from amp_fx.precision.policy import Policy
from amp_fx.precision.policy.engines import ENGINES, Engine
from amp_fx.precision.policy.levels import AUTO, FORWARD, LEVELS

#: corners of the frontier that are shown
_CORNERS = 12
#: times of the squared error of scales that are found in each call, that a measured one may add
_MORE = math.inf, 4.0, 1.0
#: plans that are compiled to find one that keeps its budget
_TRIES = 3
#: placements to compare with: name -> policy; listed ops low, whatever the device
_KNOWN = {
    "autocast": Policy("autocast"),
    "fast": Policy("fast"),
    "fp32": Policy.parse({"rules": [{"module": ".*", "precision": "fp32"}]}),
}


class Calibration:
    """The findings of :func:`amp_fx.calibrate`; ``sensitivity`` has the measurements, as plain data."""

    def __init__(
        self,
        sensitivity: Sensitivity,
        graphs: Sequence[MeasuredGraph],
        opts: Options,
        steps: Sequence[Step],
        *,
        engine: Engine | None = None,
    ) -> None:
        self.sensitivity = sensitivity
        #: what multiplies in integers; None: the compiled model
        self._engine = engine
        self._graphs = list(graphs)
        self._opts = opts
        self._steps = list(steps)

    @staticmethod
    def worst(*calibrations: Calibration) -> Calibration:
        """One calibration for several states of a model: of each rounding, the largest sensitivity found.

        Sensitivity changes while a model trains. A plan made from this keeps its budget in all of the states::

            early, late = (amp_fx.calibrate(load(path), batches) for path in paths)
            plan = amp_fx.Calibration.worst(early, late).plan()

        They are of one program, with the same low dtype, else PlanError; profile, target and rules are those of the
        last. Plans are checked in each state that is a module of its own. Calls whose channels the states would divide
        in other ways for int8 stay in 16 bits. OptionsError where no calibration is given.
        """
        if not calibrations:
            raise OptionsError("worst takes at least one calibration; got none.")
        last = calibrations[-1]
        steps = [step for calibration in calibrations for step in calibration._steps]
        sensitivity = Sensitivity.worst([calibration.sensitivity for calibration in calibrations])
        return Calibration(sensitivity, last._graphs, last._opts, steps)

    @functools.cached_property
    def cuts(self) -> Cuts:
        """Prices of the placements that plans are chosen from."""
        rounds = self._engine is not None and self._engine.rounds_results
        return Cuts(self._graphs, self.sensitivity, self._opts, rounds_results=rounds)

    @functools.cached_property
    def _by_limit(self) -> dict[float, Cuts]:
        """How many times more a measured scale may add than those found in each call -> the cuts; fastest first."""
        measured = any(call.scales for graph in self.sensitivity.graphs for call in graph.calls)
        return {most: self.cuts.reading(most) for most in (*(_MORE if measured else ()), NEVER)}

    @property
    def _usual(self) -> Cuts:
        return self._by_limit.get(_MORE[1], self._by_limit[NEVER])

    def _within(self, limit: float, aim: str) -> Choice[Placed]:
        """The cheapest placement found whose squared error is at most ``limit``."""
        found = [cuts.within(limit, aim) for cuts in self._by_limit.values()]
        return min(found, key=lambda each: (each.sensitivity > limit, each.time, each.sensitivity))

    @functools.cached_property
    def _verifier(self) -> Verifier:
        return Verifier(self._steps, self._opts, self.sensitivity.scale)

    @functools.cached_property
    def _known(self) -> dict[str, Point]:
        plain = replace(self._opts, profile="off", sensitivity=None)
        plans_of = {
            name: [graph.plan(replace(plain, policy=policy)) for graph in self._graphs]
            for name, policy in _KNOWN.items()
        }
        if self.sensitivity.level:
            # the policy below 16 bits by itself, of what was measured: what is low as autocast has it, or nothing
            base = replace(plain, policy=_KNOWN["autocast"])
            plans = [graph.plan(replace(base, profile=graph.wide or "off")) for graph in self._graphs]
            own = self._by_limit[NEVER]
            own.write(plans, own.by_policy(own.placed(plans)))
            plans_of[LEVELS[self.sensitivity.level].policy] = plans
        return {name: self._predicted(plans, name) for name, plans in plans_of.items()}

    def _point(self, choice: Choice[Placed]) -> Point:
        cuts = self._by_limit[choice.placement.most]
        return cuts.point(None, choice.placement, lambda: self._plans_of(choice.placement))

    def _predicted(self, plans: list[Plan], name: str | None = None) -> Point:
        """The cost of plans, each call by the scales that they have."""
        cuts = self.cuts.reading(NEVER, plans)
        return cuts.point(name, cuts.placed(plans), functools.partial(list, plans))

    def _plans_of(self, choice: Placed) -> list[Plan]:
        """The plans of a placement, made by the passes."""
        placements = self.cuts.placements(choice.sides)
        plans = [
            graph.plan(replace(self._opts, sensitivity=replace(self.sensitivity, graphs=[found])), placement)
            for graph, found, placement in zip(self._graphs, self.sensitivity.graphs, placements, strict=True)
        ]
        if self.sensitivity.level:
            self._by_limit[choice.most].write(plans, choice)
        return plans

    @property
    def autocast_error(self) -> float:
        """Predicted error of torch.autocast; roundings that overflow are left out."""
        return self.cuts.autocast_error

    def frontier(self, minimise: str = TIME) -> list[Point]:
        """Placements that no other beats in both cost and error, by cost, with autocast, fast and fp32 among them.

        And fp8, where that was measured: what the policy would choose by itself. ``minimise`` is as in :meth:`plan`.
        """
        aim = one_of("minimise", MINIMISED, minimise)
        points = [*map(self._point, self._usual.corners(_CORNERS, aim)), *self._known.values()]
        by_bytes = aim == BYTES or not self.cuts.is_timed
        return sorted(points, key=lambda point: point.bytes_moved if by_bytes else point.time or 0.0)

    def predict(self, plan: object) -> float:
        """The relative L2 error that a plan would have, of the gradient or of the outputs.

        ``plan`` is a :class:`Plan`, a list of them, what :meth:`plan` returned, or the path of a plan file. PlanError
        where it is not about this model: the message names what has moved.
        """
        return self._predicted([*(Options.parse(None, {"plan": plan}).plan or ())]).error

    def plan(
        self,
        budget: str | float | None = None,
        *,
        error: float | None = None,
        time: float | None = None,
        minimise: str = TIME,
        verify: bool = True,
        engine: str | None = None,
    ) -> CalibratedPlan:
        """The cheapest plan whose error is within a budget; give one of the three, or none for ``budget="autocast"``.

        Where fp8 was measured, what a budget allows beyond torch.autocast's error is for matmuls in fp8.

        Args:
            budget: ``"autocast"``, or a number: times torch.autocast's error.
            error: relative L2 error, of the gradient or of the outputs.
            time: seconds of a step or call; the plan of least error within them.
            minimise: ``"time"`` by the device profile, or ``"bytes"``, what kernels read and write. Without a profile,
                time is bytes and, for arithmetic, those that an H100 moves meanwhile.
            verify: run one compiled step or call of the plan against fp32 (fp64 where that fits). A plan that misses
                its budget by more than 1.3 times gives way to the next on the frontier. Where equal steps give other
                results, nothing can be checked, and the plan says so (``unverified``).
            engine: what the plan is exported for, as in :func:`amp_fx.export`: one that multiplies in integers by
                measured scales alone gets no others, and for ``"onnxruntime"`` results of convolutions that are added
                are rounded to uint8 as well.

        Raises:
            OptionsError: more than one limit, one that is no positive number, another aim or engine; or fp8 that
                cannot be checked here.
        """
        if sum(limit is not None for limit in (budget, error, time)) > 1:
            raise OptionsError("plan takes one of budget, error and time.")
        if time is not None and minimise != TIME:
            raise OptionsError(f"plan(time=...) has the least error; minimise={minimise!r} is for a budget.")
        level, device = self.sensitivity.level, next(self._steps[0].model.parameters()).device.type
        if verify and level and not multiplies(LEVELS[level], device):
            # a compiled step runs where the model is, whatever device is planned for
            raise OptionsError(
                f"a {device} does not multiply in {level!r}, so that no compiled step can check a plan; give "
                "verify=False."
            )
        aim = one_of("minimise", MINIMISED, minimise)
        row = None if engine is None else ENGINES[one_of("engine", tuple(ENGINES), engine)]
        if row is not None and row is not self._engine:
            of_engine = self._for(row)
            return of_engine.plan(
                budget, error=error, time=time, minimise=minimise, verify=verify, engine=engine
            )
        with torch.enable_grad(), progress("plan") as say:
            say("prices and searches placements")
            limit = None
            if time is not None:
                chosen = self._within_time(_positive("time", time))
            else:
                if error is not None:
                    limit = _positive("error", error)
                else:
                    factor = 1.0 if budget in (None, "autocast") else _positive("budget", budget)
                    limit = factor * self.autocast_error
                chosen = self._within(limit**2, aim)
            found = self._finish(chosen, limit, verify, aim, say)
            return found if any(found.lowered) else replace(found, least=self._least(chosen, aim))

    def _least(self, wide: Choice[Placed], aim: str) -> float | None:
        """The least predicted error on the frontier of what costs less than this placement; None if nothing does."""
        corners = self._usual.corners(8 * _CORNERS, aim)
        least = min((corner.sensitivity for corner in corners if corner.time < wide.time), default=math.inf)
        return math.sqrt(least) if math.isfinite(least) else None

    def _for(self, engine: Engine) -> Calibration:
        """The same calibration for an engine; it may multiply in integers by measured scales alone, or not at all."""

        def left(call: CallSensitivity) -> CallSensitivity:
            if engine.int8 == AUTO:
                return call
            if engine.int8 is None:
                return replace(call, roles={})
            operands = call.roles.get(FORWARD, {})
            # as what overflows, it is never chosen
            found = {FORWARD: {**operands, INPUT: None}} if INPUT in operands else {}
            return replace(call, roles={**call.roles, **found})

        graphs = [replace(graph, calls=[*map(left, graph.calls)]) for graph in self.sensitivity.graphs]
        sensitivity = replace(self.sensitivity, graphs=graphs)
        return Calibration(sensitivity, self._graphs, self._opts, self._steps, engine=engine)

    def _within_time(self, time: float) -> Choice[Placed]:
        if not self.cuts.is_timed:
            raise OptionsError("plan(time=...) needs a device profile, which is off.")
        corners = self._usual.corners(8 * _CORNERS, TIME)
        fitting = [corner for corner in corners if corner.time * 1e-12 <= time]
        return min(fitting, key=lambda corner: corner.sensitivity) if fitting else corners[0]

    def _finish(
        self, chosen: Choice[Placed], limit: float | None, verify: bool, aim: str, say: Callable[..., None]
    ) -> CalibratedPlan:
        """The plan of a placement, or of a stricter one where a compiled step misses the limit."""
        tried: list[tuple[float, float]] = []
        while True:
            point = self._point(chosen)
            found = replace(point.plan, budget=limit, tried=tuple(tried))
            if not verify:
                return found
            allowed = point.error if limit is None else limit
            say("runs the model in float32 and float64")
            if doubt := self._verifier.doubt(allowed):
                return replace(found, unverified=doubt)
            say("compiles the model with the plan, and runs it")
            measured = self._verifier.error(found.plans)
            # where that misses, others are compiled to say why, or stricter
            say("looks at what the compiled model has found")
            if measured > SLACK * allowed and (doubt := self._verifier.doubt_compiled(allowed)):
                return replace(found, unverified=doubt)
            found = replace(found, measured=measured)
            if limit is None or self._verifier.keeps(measured, limit, self.autocast_error):
                return found
            tried.append((point.error, measured))
            stricter = self._within(chosen.sensitivity * min(0.5, (limit / measured) ** 2), aim)
            if len(tried) == _TRIES or stricter.sensitivity >= chosen.sensitivity:
                return found
            chosen = stricter

    def __str__(self) -> str:
        below = None
        if self.sensitivity.level:
            plans = self._known[LEVELS[self.sensitivity.level].policy].plan.plans
            below = self._by_limit[NEVER].blame(self._by_limit[NEVER].placed(plans))
        return "\n".join(blame_lines(self.sensitivity, self.cuts.blame(), self._known, below))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes ``.json``, the sensitivity, or the frontier as ``.png``, ``.svg``, ``.pdf`` or ``.html``."""
        path = Path(path)
        if path.suffix.lower() == ".json":
            self.sensitivity.save(path)
        else:
            save_frontier(self.frontier(), self.sensitivity.model, str(self), path)
        return path


def _positive(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        valid = "'autocast' or a number" if name == "budget" else "a number"
        raise OptionsError(f"{name} must be {valid} from 0 on; got {value!r}.")
    return float(value)
