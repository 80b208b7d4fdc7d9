"""Placements of a whole model with what they cost, and plans that were chosen among them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from amp_fx.plans.plan import Plan
from amp_fx.reports.report import Report

__all__ = ["CalibratedPlan", "Point"]


@dataclass(frozen=True)
class Point:
    """One placement of the whole model.

    Attributes:
        name: ``"autocast"``, ``"fast"``, ``"fp32"``, ``"fp8"``, or None for a corner of the frontier.
        time: seconds of a step's matmuls, memory traffic and casts by the device profile; None without a profile.
        bytes_moved: what a step's kernels read and write, by the cost model.
        error: predicted relative L2 error of what is judged.
        make: makes the plans.
        what: what is judged, in words: ``"gradient"`` or ``"output"``.
    """

    name: str | None
    time: float | None
    bytes_moved: int
    error: float
    make: Callable[[], list[Plan]] = field(repr=False, compare=False)
    what: str = "gradient"

    @functools.cached_property
    def plan(self) -> CalibratedPlan:
        """The plans of all graphs, not verified."""
        plans = self.make()
        # options are pickled, and what makes plans is not
        return CalibratedPlan(plans, replace(self, make=functools.partial(list, plans)))


@dataclass(frozen=True)
class CalibratedPlan:
    """A plan of every graph of a model.

    Attributes:
        plans: in order of the graphs.
        point: what was predicted.
        budget: the error that was allowed; None where the caller gave none.
        measured: the error of a compiled step; None where none was run.
        tried: (predicted, measured) of plans that missed the budget.
        unverified: why no compiled step could check the plan, or an empty string.
    """

    plans: list[Plan]
    point: Point
    budget: float | None = None
    measured: float | None = None
    tried: tuple[tuple[float, float], ...] = ()
    unverified: str = ""

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file that ``options={"plan": path}`` reads.

        Raises:
            OSError: the file cannot be written.
        """
        Report(self.plans).save(Path(path)) if len(self.plans) > 1 else self.plans[0].save(path)

    def __str__(self) -> str:
        low = sum(row.dtype is row.low for plan in self.plans for row in plan.nodes if row.low is not None)
        below = sum(len(row.levels_below) for plan in self.plans for row in plan.nodes)
        also = f", {below} matmuls below 16 bits" if any(plan.decides_levels for plan in self.plans) else ""
        lines = [f"{low} calls low{also}, predicted {self.point.what} error {self.point.error:.2e}"]
        if self.budget is not None and self.point.error > self.budget * (1 + 1e-6):
            lines.append(f"no placement keeps the budget of {self.budget:.2e}: this one has the least error")
        for predicted, measured in self.tried:
            lines.append(f"a plan predicted at {predicted:.2e} had {measured:.2e} when compiled: not taken")
        if self.measured is not None:
            lines.append(f"a compiled step has {self.measured:.2e}")
        if self.unverified:
            lines.append(f"not checked by a compiled step: {self.unverified}")
        return "\n".join(lines)
