"""Writes the numbers of docs/benchmarks.md from committed results, so that none is typed.

    python -m benchmarks.page benchmarks/results/counts_cpu_*.jsonl benchmarks/results/errors_*.jsonl \\
        benchmarks/results/counts_cuda_h100_*.jsonl benchmarks/results/timings_*.jsonl \\
        benchmarks/results/learning_*.jsonl

Counts and errors go between ``<!-- numbers:begin -->`` and ``<!-- numbers:end -->``; the counts for a target, if given,
between ``<!-- target:begin -->`` and ``<!-- target:end -->``; the timings, if given, between
``<!-- speed:begin -->`` and ``<!-- speed:end -->``; what long runs learned, if given, between
``<!-- learning:begin -->`` and ``<!-- learning:end -->``.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.long_runs import Run, table
from benchmarks.results import TimingRow, read, read_timings
from benchmarks.tables import relative

__all__ = ["speed", "tables"]

_PAGE = Path(__file__).resolve().parent.parent / "docs" / "benchmarks.md"

#: arm in the results -> column on the page
_ARMS = {
    "autocast": "autocast + compile",
    "off": "amp_fx",
    "fast": 'amp_fx `"fast"`',
    "bf16": "bf16 model + compile",
}


#: the same for timings, whose table has what a user would run
_TIMED = {
    "training": {
        "fp32": "fp32 + compile",
        "amp_fx": "amp_fx",
        "off": 'amp_fx `profile="off"`',
        "fast": 'amp_fx `"fast"`',
        "bf16": "bf16 model + compile",
    },
    "inference": {
        "fp32": "fp32 + compile",
        "freezing": "autocast + freezing",
        "bf16": "bf16 model + compile",
        "amp_fx": "amp_fx",
    },
}


def tables(
    head: Mapping[str, Any], counts: Sequence[dict[str, Any]], errors: Sequence[dict[str, Any]]
) -> str:
    """The counts and the errors, as Markdown, under what the header of the counts says."""
    lines = [
        "Counted, not timed: what all kernels of a step read and write by Inductor's estimate, forward and",
        "backward, and what the forward saves for the backward; ratios to `torch.compile` + autocast.",
        'The bf16 model keeps no fp32 master weights. amp_fx with `profile="off"`: every listed op goes low.',
        f"{head['hardware']}, torch {head['torch']}; reproduce with `python -m benchmarks.counts` and",
        "`python -m benchmarks.errors`.",
        "",
        *_counts_table(counts, "training", ("bytes_moved", "saved_bytes")),
        "",
        "Inference, bytes moved:",
        "",
        *_counts_table(counts, "inference", ("bytes_moved",)),
        "",
        "Accuracy of one step, relative L2 error of all gradients against fp64 (fp32 itself: below 1e-5):",
        "",
        *_errors_table(errors),
    ]
    return "\n".join(lines)


def target_tables(head: Mapping[str, Any], counts: Sequence[dict[str, Any]]) -> str:
    """The counts for a GPU that is not in the machine, as Markdown."""
    target = str(head["hardware"]).partition(" ")[0]
    lines = [
        f"The same for {head['hardware']}, torch {head['torch']}; reproduce with",
        f"`python -m benchmarks.counts --target {target}`. Assumed: {'; '.join(head['assumed'])}.",
        "",
        *_counts_table(counts, "training", ("bytes_moved", "saved_bytes")),
        "",
        "Inference, bytes moved:",
        "",
        *_counts_table(counts, "inference", ("bytes_moved",)),
    ]
    return "\n".join(lines)


def _counts_table(rows: Sequence[dict[str, Any]], mode: str, columns: Sequence[str]) -> list[str]:
    names = {"bytes_moved": "moved", "saved_bytes": "saved"}
    found = {(row["workload"], row["arm"]): row for row in rows if row["mode"] == mode}
    lines = [
        "| model | " + " | ".join(f"{arm}, {names[c]}" for c in columns for arm in _ARMS.values()) + " |",
        "|---" * (1 + len(columns) * len(_ARMS)) + "|",
    ]
    for workload in dict.fromkeys(name for name, _ in found):
        cells = []
        for column in columns:
            values = {arm: _total(found[workload, arm], column) for arm in _ARMS}
            base = values.pop("autocast")
            cells.append(f"{base / 1e6:.1f} MB")
            cells += [f"{value / base:.3f}" for value in values.values()]
        lines.append(f"| {workload} | " + " | ".join(cells) + " |")
    return lines


def _total(row: dict[str, Any], column: str) -> int:
    return row["forward"][column] + row["backward"][column]


def _errors_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    found = {(row["workload"], row["arm"]): row["gradient"] for row in rows}
    lines = ["| model | " + " | ".join(_ARMS.values()) + " |", "|---" * (1 + len(_ARMS)) + "|"]
    return lines + [
        f"| {workload} | " + " | ".join(f"{found[workload, arm]:.2e}" for arm in _ARMS) + " |"
        for workload in dict.fromkeys(name for name, _ in found)
    ]


def speed(head: Mapping[str, Any], rows: Sequence[TimingRow]) -> str:
    """The timings, as Markdown: times of autocast, and everybody else's as ratios to it."""
    clock = " of processor time" if head.get("clock") == "cpu" else ""
    lines = [
        f"Milliseconds{clock} a step takes with `torch.compile` + autocast, and how many times that the others take:",
        "medians over interleaved rounds, each arm in processes of its own. Training steps include backward and SGD;",
        "inference runs under `torch.inference_mode`.",
        f"{head['hardware']}, {head['processor']}, threads: {head['threads']}, torch {head['torch']}; reproduce with",
        f"`{_command(head)}`.",
    ]
    if head.get("sizes") == "cpu":
        lines.append("This CPU has instructions for bf16.")
    lines.append(f"Half of the rounds give a ratio within {_spread(rows):.0%} of its median.")
    if head.get("sizes") == "cpu_no_bf16":
        lines.append("This CPU has no instructions for bf16: autocast loses by it, amp_fx stays in fp32.")
    for mode, arms in _TIMED.items():
        some = [row for row in rows if row.mode == mode and row.family != "depth"]
        if some:
            lines += ["", f"{mode.capitalize()}:", "", *_timings_table(some, arms)]
    depth = [row for row in rows if row.family == "depth" and row.arm == "off"]
    if depth:
        lines += ["", "A small GPT by depth, compiled from nothing, forward and backward:", ""]
        lines += _depth_table(depth, rows)
    return "\n".join(lines)


def _command(head: Mapping[str, Any]) -> str:
    cpu = " --clock cpu" if head.get("clock") == "cpu" else ""
    malloc = "" if _malloc(head) == "kept" else f" --malloc {_malloc(head)}"
    one = "OMP_NUM_THREADS=1 " if head.get("threads") == 1 else ""
    return f"{one}python -m benchmarks{cpu}{malloc}"


def _malloc(head: Mapping[str, Any]) -> str:
    """What files say of memory that was freed; the first ones say nothing."""
    return head.get("malloc", "kept")


def _depth_table(ours: Sequence[TimingRow], rows: Sequence[TimingRow]) -> list[str]:
    """How compiling grows; ``ours`` are the rows with every listed op low."""
    theirs = {row.workload: row.compile_cold for row in rows if row.arm == "autocast"}
    lines = [
        "| layers | nodes | capture and passes | a node | autocast + compile compiles in | amp_fx, times that |",
        "|---|---|---|---|---|---|",
    ]
    for row in ours:
        base = theirs.get(row.workload)
        if row.nodes and row.pass_seconds and row.compile_cold and base:
            lines.append(
                f"| {row.sizes['layers']} | {row.nodes} | {row.pass_seconds:.2f} s |"
                f" {1e3 * row.pass_seconds / row.nodes:.2f} ms | {base:.1f} s | {row.compile_cold / base:.2f} |"
            )
    return lines


def _spread(rows: Sequence[TimingRow]) -> float:
    """Half of the distance between the quartiles over the median, for the ratio in the middle."""
    cases = {name: [row for row in rows if row.workload == name] for name in {row.workload for row in rows}}
    arms = {arm for arms in _TIMED.values() for arm in arms}
    found = [
        (ratio.high - ratio.low) / 2 / ratio.median
        for case in cases.values()
        for ratio in (relative(case, row.arm, "autocast") for row in case if row.arm in arms)
        if not math.isnan(ratio.median)
    ]
    return median(found)


def _timings_table(rows: Sequence[TimingRow], arms: Mapping[str, str]) -> list[str]:
    present = {row.arm for row in rows if row.times}
    shown = {arm: label for arm, label in arms.items() if arm in present}
    lines = [
        "| model | autocast + compile | " + " | ".join(shown.values()) + " |",
        "|---" * (2 + len(shown)) + "|",
    ]
    for row in rows:
        if (
            row.arm != "autocast"
            or not row.times
            or any(note.startswith("time was up") for note in row.notes)
        ):
            continue
        case = [other for other in rows if other.workload == row.workload]
        ratios = [relative(case, arm, "autocast").median for arm in shown]
        cells = [f"{1e3 * row.time.median:.1f} ms", *("-" if math.isnan(r) else f"{r:.2f}" for r in ratios)]
        lines.append(f"| {row.workload} | " + " | ".join(cells) + " |")
    return lines


def _joined(paths: Sequence[str]) -> list[tuple[dict[str, Any], list[TimingRow]]]:
    """The rows of several files of one kind of machine, by what was measured: wall or processor time, and the threads.

    A case that is in several files has the rows of the last.

    Raises:
        ValueError: the machines differ.
    """
    files = [read_timings(path) for path in paths]
    head = files[0][0]
    for path, (other, _) in zip(paths, files, strict=True):
        for key in ("hardware", "processor", "torch", "sizes"):
            if other.get(key) != head.get(key):
                raise ValueError(f"{path} has {key} {other.get(key)!r}, {paths[0]} has {head.get(key)!r}")
    last = {row.workload: rows for _, rows in files for row in rows}
    groups: dict[tuple[Any, ...], tuple[dict[str, Any], list[TimingRow]]] = {}
    for head, rows in files:
        kept = [row for row in rows if last[row.workload] is rows]
        if kept:
            key = head.get("clock"), head.get("threads"), _malloc(head)
            groups.setdefault(key, (head, []))[1].extend(kept)
    return list(groups.values())


def _replace(text: str, name: str, section: str) -> str:
    """Puts a section between its markers.

    Raises:
        ValueError: the text has no such markers.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, found, rest = text.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"{_PAGE.name} has no {begin} ... {end} to write to")
    return f"{before}{begin}\n{section}\n{end}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    paths = list(sys.argv[1:] if argv is None else argv)
    if len(paths) < 2:
        print(
            "usage: python -m benchmarks.page COUNTS.jsonl ERRORS.jsonl [TARGET_COUNTS.jsonl] [TIMINGS.jsonl ...]",
            file=sys.stderr,
        )
        return 2
    head, counts = read(paths[0])
    text = _replace(_PAGE.read_text(encoding="utf-8"), "numbers", tables(head, counts, read(paths[1])[1]))
    timed = []
    for path in paths[2:]:
        head, rows = read(path)
        if "assumed" in head:
            text = _replace(text, "target", target_tables(head, rows))
        elif "steps" in head:
            runs = [Run(**{**row, "curve": tuple(row["curve"])}) for row in rows]
            text = _replace(text, "learning", table(runs))
        else:
            timed.append(path)
    if timed:
        text = _replace(text, "speed", "\n\n".join(speed(*group) for group in _joined(timed)))
    _PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
