"""Timing results as text: for the terminal, and as Markdown for the docs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from benchmarks.results import TimingRow
from benchmarks.spread import Spread, ratios

__all__ = ["case_table", "ratio_of", "relative"]


def relative(rows: Sequence[TimingRow], arm: str, reference: str) -> Spread:
    """Times of an arm over those of another, for the rows of one case; not a number where one is missing."""
    times = {row.arm: row.times for row in rows}
    return ratios(times.get(arm, ()), times.get(reference, ()))


def ratio_of(spread: Spread) -> str:
    """``0.93 (0.92-0.95)``, or a dash."""
    if math.isnan(spread.median):
        return "-"
    return f"{spread.median:.2f} ({spread.low:.2f}-{spread.high:.2f})"


def _milliseconds(row: TimingRow) -> str:
    time = row.time
    if math.isnan(time.median):
        return "-"
    digits = 1 if time.median > 0.01 else 3
    low, median, high = (f"{1e3 * value:.{digits}f}" for value in (time.low, time.median, time.high))
    return f"{median} ({low}-{high})"


def _number(form: str, scale: float = 1.0) -> Callable[[float | None], str]:
    return lambda value: "-" if value is None else format(value / scale, form)


_SECONDS, _MB, _ERROR, _COUNT = _number(".1f"), _number(".1f", 1e6), _number(".1e"), _number(".0f")


def case_table(rows: Sequence[TimingRow]) -> str:
    """The rows of one case: a line per arm, then the notes.

    Ratios are medians with quartiles: to ``autocast``, and to the faster of the two floors.
    """
    floor = min(
        (row for row in rows if row.arm.startswith("floor") and row.times),
        key=lambda row: row.time.median,
        default=None,
    )
    first = rows[0]
    sizes = ", ".join(f"{name} {value}" for name, value in first.sizes.items())
    head = ["", "ms", "x autocast", "x floor", "cold s", "warm s", "peak MB", "moved MB", "saved MB"]
    head += ["casts", "cast MB", "error", "grad error", "reads", "passes ms"]
    lines = [head]
    for row in rows:
        if not row.times:
            continue
        counts = row.counts or {}
        lines.append(
            [
                row.arm,
                _milliseconds(row),
                ratio_of(relative(rows, row.arm, "autocast")),
                "-" if floor is None else ratio_of(relative(rows, row.arm, floor.arm)),
                _SECONDS(row.compile_cold),
                _SECONDS(row.compile_warm),
                _MB(row.peak_bytes),
                _MB(counts.get("bytes_moved")),
                _MB(counts.get("saved_bytes")),
                _COUNT(counts.get("casts")),
                _MB(counts.get("cast_bytes")),
                _ERROR(row.output_error),
                _ERROR(row.gradient_error),
                _COUNT(row.host_reads),
                "-" if row.pass_seconds is None else f"{1e3 * row.pass_seconds:.0f}",
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [f"{first.workload}, {first.mode}: {sizes}"]
    text += [
        "  ".join(
            [line[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True))]
        )
        for line in lines
    ]
    text += [f"note: {row.arm}: {note}" for row in rows for note in row.notes]
    return "\n".join(text)
