"""Placements of a whole model with what they cost, plans that were chosen among them, their figure and their text."""

from __future__ import annotations

import functools
import html
import io
import math
import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from amp_fx.graphs.calls import short_source
from amp_fx.instruments.reports.figures import new_figure, save_figure
from amp_fx.instruments.reports.report import Report
from amp_fx.precision.placement.priced import SensitivityTerm
from amp_fx.precision.plans.files import write_text
from amp_fx.precision.plans.plan import NodePlan, Plan, dtype_name
from amp_fx.precision.plans.sensitivity import OUTPUTS, Sensitivity
from amp_fx.precision.policy.levels import LEVELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: roundings that are listed; and of each kind where a level below 16 bits was measured, too
_SHOWN, _SHOWN_EACH = 12, 5
#: above it a prediction says only that the error is large
_LARGE = 5e-2
#: characters of a line
_WIDTH = 100
#: colours that differ in lightness too, for those who do not see them; and a shape each
_MARKS = {
    "autocast": ("#d55e00", "s"),
    "fast": ("#e69f00", "D"),
    "fp32": ("#000000", "^"),
    "fp8": ("#009e73", "v"),
    "int8": ("#009e73", "v"),
}
_LINE = "#0072b2"


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
        least: where nothing is below fp32, the predicted error of the next plan on the frontier that costs less; None
            where there is none, or something is below fp32.
    """

    plans: list[Plan]
    point: Point
    budget: float | None = None
    measured: float | None = None
    tried: tuple[tuple[float, float], ...] = ()
    unverified: str = ""
    least: float | None = None

    @property
    def lowered(self) -> tuple[int, int]:
        """How many calls compute in the low dtype, and how many matmuls below 16 bits."""
        rows = [row for plan in self.plans for row in plan.nodes]
        low = sum(row.dtype is row.low for row in rows if row.low is not None)
        return low, sum(len(row.levels_below) for row in rows)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file that ``options={"plan": path}`` reads."""
        Report(self.plans).save(Path(path)) if len(self.plans) > 1 else self.plans[0].save(path)

    def __str__(self) -> str:
        low, below = self.lowered
        also = f", {below} matmuls below 16 bits" if any(plan.decides_levels for plan in self.plans) else ""
        lines = [
            f"{low} call{'s' * (low != 1)} in 16 bits{also}, predicted {self.point.what} error {self.point.error:.2e}"
        ]
        if not (low or below):
            lines = ["all calls stay in fp32: nothing is gained"]
            if self.least is not None:
                # three digits, rounded up
                lines[0] += f"; the next plan gains, at plan(error={self.least * 1.005:.2e})"
        if self.budget is not None and self.point.error > self.budget * (1 + 1e-6):
            lines.append(f"no placement keeps the budget of {self.budget:.2e}: this one has the least error")
        for predicted, measured in self.tried:
            lines.append(f"a plan predicted at {predicted:.2e} had {measured:.2e} when compiled: not taken")
        if self.measured is not None:
            lines.append(f"a compiled step has {self.measured:.2e}")
        if self.unverified:
            lines += textwrap.wrap(f"not checked by a compiled step: {self.unverified}", _WIDTH)
        return "\n".join(lines)


def save_frontier(points: Sequence[Point], title: str, text: str, path: Path) -> None:
    """Writes the figure of a frontier, or with ``.html`` a page with the figure and the text."""
    figure = _frontier_figure(points, title)
    if path.suffix.lower() != ".html":
        save_figure(figure, path, ".json", ".html")
        return
    drawing = io.StringIO()
    figure.savefig(drawing, format="svg")
    svg = drawing.getvalue()
    page = (
        f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<body>{svg[svg.index('<svg') :]}<pre>{html.escape(text)}</pre></body>\n"
    )
    write_text(path, page)


def _frontier_figure(points: Sequence[Point], title: str) -> Figure:
    """The error over the time of placements, or over bytes where there is no device profile."""
    figure = new_figure(8, 5)
    axes = figure.subplots()
    timed = all(point.time is not None for point in points)
    scale, unit = (1e3, "ms") if timed else (1e-6, "MB")
    errors = [point.error for point in points if 0 < point.error < math.inf]
    # zero and infinity have no place on a logarithmic axis
    floor, ceiling = min(errors, default=1e-8) / 3, max(errors, default=1.0) * 2

    def at(point: Point) -> tuple[float, float]:
        cost = point.time if point.time is not None else point.bytes_moved
        return scale * cost, min(max(point.error, floor), ceiling)

    corners = sorted(at(point) for point in points if point.name is None and point.error < math.inf)
    axes.plot(*zip(*corners, strict=True), "o-", color=_LINE, markersize=5, label="calibrated", zorder=2)
    named = [point for point in points if point.name is not None]
    for index, point in enumerate(named):
        colour, mark = _MARKS[point.name or ""]
        note = "" if point.error else ": no rounding, at the foot of the axis"
        label = f"{point.name}: overflows" if math.isinf(point.error) else f"{point.name}{note}"
        # where several are in one place, the ones below show around the ones on top
        above = sum(at(other) == at(point) for other in named[index + 1 :])
        axes.plot(*at(point), mark, color=colour, markersize=9 + 5 * above, label=label, zorder=3)
    axes.set_yscale("log")
    what = "time of a step by the device profile" if timed else "memory traffic of a step by the cost model"
    axes.set_xlabel(f"{what} [{unit}]")
    axes.set_ylabel(f"relative error of the {points[0].what}, predicted")
    axes.set_title(f"{title}: what accuracy costs")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    return figure


def blame_lines(
    sensitivity: Sensitivity,
    terms: Sequence[SensitivityTerm],
    known: Mapping[str, Point],
    below: Sequence[SensitivityTerm] | None = None,
) -> list[str]:
    """The lines of ``print(calibration)``: who is to blame for the error of torch.autocast, on one screen.

    ``terms`` are the roundings of torch.autocast, and ``below`` what the policy below 16 bits would add, if that was
    measured, worst first.
    """
    calls = {row.name: row for graph in sensitivity.graphs for row in graph.outline.nodes}
    measured = sum(len(graph.calls) for graph in sensitivity.graphs)
    shown = _SHOWN if below is None else _SHOWN_EACH
    lines = [
        f"{sensitivity.model} in {dtype_name(sensitivity.dtype)}: {measured} calls, graphs: "
        f"{len(sensitivity.graphs)}, batches: {sensitivity.batches}"
        + (f", the worst of {sensitivity.states} states" if sensitivity.states > 1 else "")
        + (f", loss scale {sensitivity.scale:g}" if sensitivity.scale != 1 else ""),
        "",
        f"{sensitivity.what} error, predicted",
        *_points(list(known.values())),
        "",
        "what torch.autocast's error is made of",
        *_shares(terms, calls, shown),
    ]
    if below is not None:
        policy = LEVELS[sensitivity.level].policy
        lines += ["", f"what policy {policy} adds ({sensitivity.level})"]
        lines += _shares(below, calls, shown) or [f"  nothing: it would run nothing in {policy}"]
    notes = (line for note in _notes(sensitivity, known) for line in textwrap.wrap(note, _WIDTH))
    return [*lines, "", *notes]


def _shares(terms: Sequence[SensitivityTerm], calls: Mapping[str, NodePlan], shown: int) -> list[str]:
    """Roundings, worst first -> lines."""

    def finite(terms: Sequence[SensitivityTerm]) -> float:
        return sum(term.sensitivity for term in terms if math.isfinite(term.sensitivity))

    if not terms:
        return []
    total, lines = finite(terms) or 1, [f"  {'share':>8}  {'rounded value':<32}  {'module':<20}  source"]
    for term in terms[:shown]:
        call = calls[term.call]
        # below 16 bits the slot says of which matmul, too
        of_call = f"{'gradient of ' * term.backward}{call.op} {term.slot or 'result'}"
        what = term.slot if ": " in term.slot else of_call
        share = "overflow" if math.isinf(term.sensitivity) else f"{term.sensitivity / total:.1%}"
        line = f"  {share:>8}  {what:<32.32}  {_end(call.module_path, 20):<20}  {short_source(call.source)}"
        lines.append(line[:_WIDTH].rstrip())
    if len(terms) > shown:
        lines.append(f"  {finite(terms[shown:]) / total:>8.1%}  {len(terms) - shown} other roundings")
    return lines


def _points(points: Sequence[Point]) -> list[str]:
    """A table of placements: relative error, time where there is a profile, and memory traffic."""
    timed = all(point.time is not None for point in points)
    head = f"{'time [ms]':>12}" * timed
    lines = [f"  {'policy':<10}{'error':>10}{head}{'memory traffic [MB]':>22}"]
    for point in points:
        time = f"{point.time * 1e3:>12.3f}" if timed and point.time is not None else ""
        error = "overflows" if math.isinf(point.error) else f"{point.error:.2e}"
        lines.append(f"  {point.name!s:<10}{error:>10}{time}{point.bytes_moved / 1e6:>22.1f}")
    return lines


def _end(path: str, most: int) -> str:
    """The end of a module's path, which tells more than its beginning."""
    return path if len(path) <= most else f"...{path[3 - most :]}"


def _notes(sensitivity: Sensitivity, known: Mapping[str, Point]) -> list[str]:
    if sensitivity.of == OUTPUTS:
        notes = ["Sensitivity is that of these batches: take some that are like those to come."]
    else:
        notes = [
            "Sensitivity changes while a model trains: calibrate a trained checkpoint, and again when it has moved on."
            + ("" if sensitivity.states > 1 else " Calibration.worst plans for several.")
        ]
    if sensitivity.kinks:
        notes.append(
            f"{sensitivity.kinks} calls have a derivative that jumps (ReLU): flips are predicted within a factor of "
            "about three for ReLU, and not for the others. The check of a plan by a compiled step counts them."
        )
    if known["autocast"].error > _LARGE:
        notes.append(f"An error above {_LARGE:g} is only known to be large.")
    return notes
