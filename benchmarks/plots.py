"""Pictures of timing results. Needs matplotlib: ``pip install 'amp_fx[bench]'``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.results import TimingRow
from benchmarks.tables import relative

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["draw"]

#: arm -> label, colour (of Okabe and Ito, with a darker yellow, and of Tol: for colour-blind readers, too), marker
_STYLES = {
    "fp32": ("fp32 + compile", "#000000", "o"),
    "eager_autocast": ("autocast, eager", "#999999", "v"),
    "autocast": ("autocast + compile", "#D55E00", "s"),
    "autocast_fp16": ("autocast fp16 + compile", "#D55E00", "P"),
    "autocast_scaler": ("autocast fp16 + GradScaler", "#D55E00", "X"),
    "bf16": ("bf16 model + compile", "#CC79A7", "^"),
    "fp16": ("fp16 model + compile", "#CC79A7", "<"),
    "freezing": ("autocast + freezing", "#B59F00", "h"),
    "amp_fx": ("amp_fx", "#0072B2", "D"),
    "off": ("amp_fx, profile off", "#56B4E9", "d"),
    "fast": ("amp_fx fast", "#009E73", "*"),
    "cast": ("amp_fx, weights cast per call", "#332288", "p"),
    "cache": ("amp_fx, packed weights", "#117733", "8"),
    "freeze": ("amp_fx, frozen", "#88CCEE", "H"),
    "no_epilogue": ("amp_fx without gemm epilogue", "#56B4E9", "1"),
    "amp_fx_fp16": ("amp_fx fp16", "#0072B2", "P"),
    "amp_fx_scaler": ("amp_fx fp16 + its scaler", "#0072B2", "X"),
    "floor": ("matmuls alone, low precision", "#777777", "_"),
    "floor32": ("matmuls alone, fp32", "#bbbbbb", "|"),
}

#: arms that are far from the others, and do not decide what the axis shows
_FAR = ("fp32", "eager_autocast", "floor", "floor32")

#: one axis shows what differs by less than this factor
_LOG_FROM = 8


def draw(rows: Sequence[TimingRow], header: Mapping[str, Any], folder: str | os.PathLike[str]) -> list[Path]:
    """Draws what the rows have numbers for and returns the files: PNG, one per plot.

    Raises:
        ModuleNotFoundError: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "plots need matplotlib: pip install 'amp_fx[bench]'", name="matplotlib"
        ) from error
    timed = [row for row in rows if row.times]
    where = f"{header.get('hardware')}, torch {header.get('torch')}"
    plots: list[tuple[str, Callable[[Figure], None]]] = []
    for mode in ("training", "inference"):
        some = [row for row in timed if row.mode == mode]
        # without it there are no ratios
        if any(row.arm == "autocast" for row in some):
            plots.append(
                (f"ratios_{mode}", lambda figure, some=some, mode=mode: _dots(figure, some, mode, where))
            )
        if any(_error(row) for row in some):
            plots.append(
                (
                    f"accuracy_{mode}",
                    lambda figure, some=some, mode=mode: _accuracy(figure, some, mode, where),
                )
            )
    for family in dict.fromkeys(row.family for row in timed):
        some = [row for row in timed if row.family == family]
        size = _swept(some)
        if size is not None:
            plots.append(
                (f"sweep_{family}", lambda figure, some=some, size=size: _sweep(figure, some, size, where))
            )
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, plot in plots:
        figure = Figure(layout="constrained", dpi=120)
        plot(figure)
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1])
    return paths


def _arms(rows: Sequence[TimingRow]) -> list[str]:
    present = {row.arm for row in rows}
    return [arm for arm in _STYLES if arm in present]


def _dots(figure: Figure, rows: Sequence[TimingRow], mode: str, where: str) -> None:
    """A row per case, a dot per arm: time over autocast's, with quartiles. What is off the axis stands at its end."""
    cases = [c for c in dict.fromkeys(r.workload for r in rows) if any(_times(rows, c, "autocast"))]
    arms = [arm for arm in _arms(rows) if arm != "autocast"]
    found = {
        (arm, case): relative([r for r in rows if r.workload == case], arm, "autocast")
        for arm in arms
        for case in cases
        if _times(rows, case, arm)
    }
    low, high = _window([ratio.median for (arm, _), ratio in found.items() if arm not in _FAR])
    figure.set_size_inches(9, 1.4 + (0.16 + 0.07 * len(arms)) * len(cases))
    axes = figure.add_subplot()
    for index, arm in enumerate(arms):
        label, colour, marker = _STYLES[arm]
        shift = 0.7 * ((index + 0.5) / len(arms) - 0.5)
        axes.plot([], [], color=colour, marker=marker, markersize=5, linestyle="none", label=label)
        for (whose, case), ratio in found.items():
            if whose != arm:
                continue
            y = cases.index(case) + shift
            seen = min(max(ratio.median, low), high)
            axes.plot(
                [max(ratio.low, low), min(ratio.high, high)] if seen == ratio.median else [seen, seen], [y, y],
                color=colour, linewidth=1,
            )  # fmt: skip
            off = "<" if ratio.median < low else ">" if ratio.median > high else marker
            axes.plot(seen, y, color=colour, marker=off, markersize=5, linestyle="none", clip_on=False)
            if off in "<>" and seen != ratio.median:
                # on the left there are names
                axes.annotate(
                    f"{ratio.median:.2f}", (seen, y), (7, 0), textcoords="offset points", va="center", fontsize=6,
                    color=colour, annotation_clip=False,
                )  # fmt: skip
    axes.axvline(1, color=_STYLES["autocast"][1], linewidth=1.2, label="autocast + compile")
    for place in range(0, len(cases), 2):
        axes.axhspan(place - 0.5, place + 0.5, color="#000000", alpha=0.04, linewidth=0)
    axes.set(xlim=(low, high), ylim=(len(cases) - 0.5, -0.5))
    axes.set_yticks(range(len(cases)), cases)
    if high / low > _LOG_FROM:
        axes.set_xscale("log")
        _factors(axes.xaxis)
    axes.set_xlabel(
        "time of a step over that of autocast + compile; left is better. A number at the edge is off the axis"
    )
    axes.set_title(f"{mode}: {where}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=7)


def _window(ratios: Sequence[float]) -> tuple[float, float]:
    """The part of the axis that is shown: 0.8 to 1.2, wider where most of the ratios are outside."""
    ordered = sorted(ratios)
    if not ordered:
        return 0.8, 1.2
    tenth = len(ordered) // 10
    return min(0.8, 0.98 * ordered[tenth]), max(1.2, 1.02 * ordered[-1 - tenth])


def _factors(axis: Axis) -> None:
    """Lets the ticks of a logarithmic axis read 0.1, 0.2, 0.5, 1."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def _times(rows: Sequence[TimingRow], case: str, arm: str) -> tuple[float, ...]:
    return next((row.times for row in rows if row.workload == case and row.arm == arm), ())


def _error(row: TimingRow) -> float | None:
    return row.gradient_error if row.mode == "training" else row.output_error


def _accuracy(figure: Figure, rows: Sequence[TimingRow], mode: str, where: str) -> None:
    """Error against time, both relative to autocast: left and low is better."""
    figure.set_size_inches(7.5, 4.8)
    axes = figure.add_subplot()
    for arm in _arms(rows):
        label, colour, marker = _STYLES[arm]
        points = []
        for row in rows:
            error = _error(row)
            same = [r for r in rows if r.workload == row.workload]
            reference = next((_error(r) for r in same if r.arm == "autocast"), None)
            if row.arm == arm and error and reference:
                points.append((relative(same, arm, "autocast").median, error / reference))
        if points:
            axes.scatter(*zip(*points, strict=True), color=colour, marker=marker, label=label, s=28)
    axes.set_xscale("log")
    _factors(axes.xaxis)
    axes.set_yscale("log")
    axes.axhline(1, color="#cccccc", linewidth=0.8, zorder=0)
    axes.axvline(1, color="#cccccc", linewidth=0.8, zorder=0)
    axes.set_xlabel("time of a step over that of autocast + compile")
    what = "gradients" if mode == "training" else "outputs"
    axes.set_ylabel(f"error of the {what} (against fp64) over autocast's")
    axes.set_title(f"{mode}, a point per case; left and low is better\n{where}", fontsize=10)
    figure.legend(loc="outside right upper", fontsize=7)


def _swept(rows: Sequence[TimingRow]) -> str | None:
    """The one size that differs between the rows of a family."""
    names = rows[0].sizes
    differing = [name for name in names if len({row.sizes[name] for row in rows}) > 1]
    return differing[0] if len(differing) == 1 else None


def _sweep(figure: Figure, rows: Sequence[TimingRow], size: str, where: str) -> None:
    """Time, and what else was measured, against the size that is swept."""
    panels: list[tuple[str, Callable[[TimingRow], float | None]]] = [
        ("time of a step, ms", lambda row: 1e3 * row.time.median),
        ("peak memory of a step, MB", lambda row: None if row.peak_bytes is None else row.peak_bytes / 1e6),
        ("cold compile time, s", lambda row: row.compile_cold),
        ("amp_fx: capture and passes, s", lambda row: row.pass_seconds),
    ]
    panels = [panel for panel in panels if any(panel[1](row) is not None for row in rows)]
    figure.set_size_inches(3.4 * len(panels) + 1.6, 3.4)
    grid: Any = figure.subplots(1, len(panels), squeeze=False)
    for axes, (title, value) in zip(grid[0], panels, strict=True):
        _lines(axes, rows, size, value)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel(size)
    handles, labels = grid[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=7)
    figure.suptitle(f"{rows[0].family}, {rows[0].mode}: {where}", fontsize=10)


def _lines(
    axes: Axes, rows: Sequence[TimingRow], size: str, value: Callable[[TimingRow], float | None]
) -> None:
    for arm in _arms(rows):
        points = sorted((row.sizes[size], y) for row in rows if row.arm == arm and (y := value(row)))
        if points:
            label, colour, marker = _STYLES[arm]
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=4, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    _factors(axes.yaxis)
    values = sorted({row.sizes[size] for row in rows})
    axes.set_xticks(values, [str(value) for value in values])
    axes.minorticks_off()
