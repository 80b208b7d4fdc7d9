"""Two results files beside each other: what became faster or slower, beyond the noise."""

from __future__ import annotations

import math
from collections.abc import Sequence

from benchmarks.results import TimingRow
from benchmarks.tables import relative

__all__ = ["comparison"]

#: a smaller change is no change, however still the machine was
_LEAST_CHANGE = 0.01


def comparison(before: Sequence[TimingRow], after: Sequence[TimingRow]) -> str:
    """A line per case and arm that both have: times and ratios to autocast, before and after.

    A machine drifts between two runs, and its autocast drifts with it: the verdict is on the ratio. It says
    "same" where the quartiles overlap or the change is below 1%. Without an autocast arm, or for it, the verdict
    is on the times.
    """
    lines = [f"{'':44}{'before ms':>12}{'after ms':>12}{'x autocast':>18}  verdict"]
    for new in after:
        old = next((row for row in before if _key(row) == _key(new)), None)
        if old is None or not old.times or not new.times:
            continue
        first = relative([r for r in before if r.workload == old.workload], old.arm, "autocast")
        second = relative([r for r in after if r.workload == new.workload], new.arm, "autocast")
        by_ratio = new.arm != "autocast" and not math.isnan(first.median + second.median)
        one, two = (first, second) if by_ratio else (old.time, new.time)
        change = two.median / one.median - 1
        same = one.overlaps(two) or abs(change) < _LEAST_CHANGE
        verdict = "same" if same else f"{abs(change):.0%} {'slower' if change > 0 else 'faster'}"
        name = f"{new.workload} {new.arm}"
        ratio = f"{first.median:.3f} -> {second.median:.3f}" if by_ratio else "-"
        if old.sizes != new.sizes:
            verdict = "not the same sizes"
        lines.append(
            f"{name:44}{1e3 * old.time.median:>12.3f}{1e3 * new.time.median:>12.3f}{ratio:>18}  {verdict}"
        )
    return "\n".join(lines)


def _key(row: TimingRow) -> tuple[str, str]:
    return row.workload, row.arm
