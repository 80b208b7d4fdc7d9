"""The frontier as a figure: what accuracy costs in time, or in bytes where there is no device profile."""

from __future__ import annotations

import html
import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from amp_fx.calibration.points import Point
from amp_fx.errors import AmpFxError
from amp_fx.plans.files import write_text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["frontier_figure", "save_figure"]

#: colours that differ in lightness too, for those who do not see them; and a shape each
_MARKS = {
    "autocast": ("#d55e00", "s"),
    "fast": ("#e69f00", "D"),
    "fp32": ("#000000", "^"),
    "fp8": ("#009e73", "v"),
    "int8": ("#009e73", "v"),
}
_LINE = "#0072b2"


def frontier_figure(points: Sequence[Point], title: str) -> Figure:
    """The error over the time of placements.

    Args:
        points: of a frontier.
        title: name of the model.

    Raises:
        AmpFxError: matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AmpFxError(
            "the figure needs matplotlib: pip install 'amp_fx[plot]'. The numbers do without it."
        ) from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    timed = all(point.time is not None for point in points)
    scale, unit = (1e3, "ms") if timed else (1e-6, "MB")
    drawn = [point for point in points if 0 < point.error < math.inf]
    # an error of zero has no place on a logarithmic axis
    floor = min((point.error for point in drawn), default=1e-8) / 3

    def at(point: Point) -> tuple[float, float]:
        cost = point.time if point.time is not None else point.bytes_moved
        return scale * cost, max(point.error, floor)

    corners = sorted(at(point) for point in points if point.name is None and point.error < math.inf)
    axes.plot(*zip(*corners, strict=True), "o-", color=_LINE, markersize=5, label="calibrated", zorder=2)
    named = [point for point in points if point.name is not None]
    for index, point in enumerate(named):
        colour, mark = _MARKS[point.name or ""]
        over = math.isinf(point.error)
        x, y = at(point) if not over else (at(point)[0], max(y for _, y in corners) * 2)
        name = f"{point.name}: overflows" if over else point.name
        exact = point.name if point.error else f"{point.name}: no rounding, at the foot of the axis"
        # where several are in one place, the ones below show around the ones on top
        above = sum(at(other) == at(point) for other in named[index + 1 :])
        axes.plot(x, y, mark, color=colour, markersize=9 + 5 * above, label=name if over else exact, zorder=3)
    axes.set_yscale("log")
    what = "time of a step by the device profile" if timed else "memory traffic of a step by the cost model"
    axes.set_xlabel(f"{what} [{unit}]")
    axes.set_ylabel(f"relative error of the {points[0].what}, predicted")
    axes.set_title(f"{title}: what accuracy costs")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend()
    return figure


def save_figure(points: Sequence[Point], title: str, text: str, path: Path) -> None:
    """Writes the figure, or with ``.html`` a page with the figure and the text.

    Args:
        points: of a frontier.
        title: name of the model.
        text: what a page says below the figure.
        path: its suffix is the format.

    Raises:
        AmpFxError: matplotlib is missing, or does not write that suffix.
        OSError: the file cannot be written.
    """
    figure = frontier_figure(points, title)
    suffix = path.suffix.lower().removeprefix(".")
    if suffix == "html":
        drawing = io.StringIO()
        figure.savefig(drawing, format="svg")
        svg = drawing.getvalue()
        page = (
            f'<!doctype html><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f"<body>{svg[svg.index('<svg') :]}<pre>{html.escape(text)}</pre></body>\n"
        )
        write_text(path, page)
        return
    valid = figure.canvas.get_supported_filetypes()
    if suffix not in valid:
        raise AmpFxError(
            f"cannot write {path.name!r}; valid suffixes: .json, .html, .{', .'.join(sorted(valid))}."
        )
    figure.savefig(path)
