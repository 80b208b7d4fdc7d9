"""Models with trained weights beside other engines: a table for docs/benchmarks.md, and its figure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import TimingRow, relative

#: arm -> its name, and its colour in the figure
SHOWN = {
    "autocast": ("autocast", "#9aa0a6"),
    "amp_fx": ("amp_fx", "#1a73e8"),
    "package": ("amp_fx package", "#8ab4f8"),
    "openvino": ("OpenVINO bf16", "#f9ab00"),
    "int8_calibrated": ("static int8", "#188038"),
    "package_calibrated": ("static int8 package", "#81c995"),
    "openvino_int8": ("OpenVINO int8, NNCF", "#e37400"),
}


def cases(rows: Sequence[TimingRow]) -> dict[str, dict[str, TimingRow]]:
    """Model -> arm -> what was timed of it."""
    found: dict[str, dict[str, TimingRow]] = {}
    for row in rows:
        if row.arm in SHOWN and row.times:
            found.setdefault(row.workload.partition("_")[2], {})[row.arm] = row
    return found


def table(head: Mapping[str, Any], rows: Sequence[TimingRow]) -> str:
    """Milliseconds, and of autocast's the time and the error."""
    lines = [
        "Each cell: milliseconds, then time and error against fp64, both relative to autocast's.",
        f"{head['processor']} with AMX, threads: {head['threads']}, torch {head['torch']},",
        f"commit {head['commit']}, {head['date']};",
        f"reproduce with `python -m benchmarks --only trained --threads {head['threads']}`.",
        "",
        "| model | " + " | ".join(name for name, _ in SHOWN.values()) + " |",
        "|---" * (1 + len(SHOWN)) + "|",
    ]
    for model, arms in cases(rows).items():
        lines.append(f"| {model} | " + " | ".join(_cell(arms, arm) for arm in SHOWN) + " |")
    return "\n".join(lines)


def _cell(arms: Mapping[str, TimingRow], arm: str) -> str:
    if arm not in arms:
        return "-"
    milliseconds = f"{1e3 * arms[arm].time.median:.1f}"
    if arm == "autocast":
        return f"{milliseconds}, error {arms[arm].error or math.nan:.1e}"
    return f"{milliseconds}, {_time(arms, arm):.2f}, {_error(arms, arm):.2f}"


def _time(arms: Mapping[str, TimingRow], arm: str) -> float:
    return relative([*arms.values()], arm).median


def _error(arms: Mapping[str, TimingRow], arm: str) -> float:
    return (arms[arm].error or math.nan) / (arms["autocast"].error or math.nan)


def draw(rows: Sequence[TimingRow], path: Path) -> None:
    """Times and errors of autocast's, a group of bars for each model."""
    from matplotlib.figure import Figure

    found = cases(rows)
    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = zip(
        figure.subplots(1, 2), ("time", "error against fp64"), (_time, _error), (False, True), strict=True
    )
    for axes, what, value, is_log in panels:
        for place, (arm, (name, colour)) in enumerate(SHOWN.items()):
            heights = [value(arms, arm) if arm in arms else math.nan for arms in found.values()]
            at = [group + (place - len(SHOWN) / 2 + 0.5) / (len(SHOWN) + 1) for group in range(len(found))]
            axes.bar(at, heights, width=1 / (len(SHOWN) + 1), color=colour, label=name)
        axes.axhline(1, color="#5f6368", linewidth=0.8)
        axes.set(xticks=range(len(found)), xticklabels=found, title=f"{what}, of torch.autocast's, compiled")
        if is_log:
            axes.set_yscale("log")
        axes.grid(axis="y", alpha=0.3)
    figure.legend(
        *figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False
    )
    figure.savefig(path, dpi=150)
