"""Writes the tables of docs/benchmarks.md and of pages for contributors from benchmarks/results: none is typed.

    python -m benchmarks.page

Each section goes between its markers, such as ``<!-- errors:begin -->`` and ``<!-- errors:end -->``. What kind of
results a file has is the first word of its name. matplotlib draws the figures.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import engine_files, engine_precisions, held_out
from benchmarks.cases import CASES
from benchmarks.engine_precisions import PrecisionRow
from benchmarks.long_runs import draw, read_runs, table
from benchmarks.results import TimingRow, read, read_timings, relative
from benchmarks.trained import chart

_ROOT = Path(__file__).resolve().parent.parent
PAGE = _ROOT / "docs" / "benchmarks.md"
ENGINES_PAGE = _ROOT / "docs" / "contributors" / "int8.md"
CPU_PAGE = _ROOT / "docs" / "contributors" / "cpu-times.md"
COUNTS_PAGE = _ROOT / "docs" / "contributors" / "costs.md"
RESULTS = _ROOT / "benchmarks" / "results"

#: arm in the results -> column on the page
_ARMS = {"autocast": "autocast", "off": "amp_fx", "fast": '`"fast"`', "bf16": "bf16 model"}

#: the same for timings, whose table has what a user would run
_TIMED = {
    "training": {
        "fp32": "fp32",
        "amp_fx": "amp_fx",
        "off": '`profile="off"`',
        "fast": '`"fast"`',
        "bf16": "bf16 model",
        "fp8": '`"fp8"`',
        "fp8_rowwise": '`"fp8"`, rowwise',
        "fp8_tensorwise": "tensorwise",
    },
    "inference": {
        "fp32": "fp32",
        "freezing": "freezing",
        "bf16": "bf16 model",
        "amp_fx": "amp_fx",
        "int8": '`"int8"`',
        "int8_all": "int8, all linears",
        "torchao_dynamic": "torchao int8",
        "fp8": '`"fp8"`',
    },
}

#: arms beside other engines -> columns
_BESIDE = {
    "amp_fx": "amp_fx bf16",
    "package": "amp_fx package",
    "freezing": "freezing",
    "openvino": "OpenVINO bf16",
    "int8": "dynamic int8",
    "int8_measured": "static int8",
    "package_int8": "static int8 package",
    "openvino_int8": "OpenVINO int8",
    "onnxruntime_int8": "ONNX Runtime int8",
    "x86_int8": "torchao x86 int8",
}
#: those that the last columns compare
_COMPARED = (
    ("amp_fx", "openvino"),
    ("package", "openvino"),
    ("int8_measured", "openvino_int8"),
    ("package_int8", "openvino_int8"),
)
#: the results of other engines that users are shown: all engines, on the CPU on which amp_fx loses most
_SHOWN = "engines_cpu_x86_64_sapphire_rapids"


def sections(folder: Path) -> dict[str, str]:
    """Name of a section -> what stands in it, as Markdown: the page for users has one table for each question."""
    gpus = joined(sorted(folder.glob("timings_cuda_*.jsonl")))
    shown = _beside(sorted(folder.glob(f"{_SHOWN}_*.jsonl")), threads=2)
    found = {
        "trained": [chart.table(*read_timings(path)) for path in sorted(folder.glob("trained_*.jsonl"))],
        "gpu": [speed(*group) for group in gpus],
        "engines": [beside(*each, without=("freezing",), ratios=False) for each in shown],
    }
    return {name: "\n\n".join(several) for name, several in found.items()}


def count_sections(folder: Path) -> dict[str, str]:
    """The same of the page about counts, for contributors."""
    found = {
        "counts": [_counts(*read(path)) for path in sorted(folder.glob("counts_cpu_*.jsonl"))],
        "target": [_target(*read(path)) for path in sorted(folder.glob("counts_cuda_*.jsonl"))],
        "errors": [_errors(*read(path)) for path in sorted(folder.glob("errors_*.jsonl"))],
        "learning": [table(read_runs(path)) for path in sorted(folder.glob("learning_*.jsonl"))],
    }
    return {name: "\n\n".join(several) for name, several in found.items()}


def engine_sections(folder: Path) -> dict[str, str]:
    """The same of the page about engines."""
    results = [read(path) for path in sorted(folder.glob("precisions_*.jsonl"))]
    tables = [engine_precisions.table(head, [PrecisionRow(**row) for row in rows]) for head, rows in results]
    files = [_files(*read_timings(path)) for path in sorted(folder.glob("files_*.jsonl"))]
    return {"precisions": "\n\n".join(tables), "files": "\n\n".join(files)}


def _files(head: Mapping[str, Any], rows: Sequence[TimingRow]) -> str:
    """Times, sizes and errors of files in the engines that they are written for, one table for a machine."""
    where = f"{head['processor']}, threads: {head['threads']}, torch {head['torch']}"
    versions = f"onnxruntime {head['onnxruntime']}, OpenVINO {head['openvino']}"
    return f"{engine_files.table(rows)}\n\n({where}, {versions}; `python -m benchmarks engines_files`)"


def cpu_sections(folder: Path) -> dict[str, str]:
    """The same of the page about CPUs, for contributors: times by commit, and all tables of other engines."""
    paths = sorted(folder.glob("engines_*.jsonl"))
    found = {
        "speed": [speed(*group) for group in joined(sorted(folder.glob("timings_cpu_*.jsonl")))],
        "engines": [beside(*each) for threads in (2, 1) for each in _beside(paths, threads)],
    }
    return {name: "\n\n".join(several) for name, several in found.items()}


def _beside(paths: Sequence[Path], threads: int) -> list[tuple[dict[str, Any], list[TimingRow]]]:
    return [each for each in map(read_timings, paths) if each[0]["threads"] == threads]


#: page -> what stands in it
PAGES = {
    PAGE: sections,
    ENGINES_PAGE: engine_sections,
    CPU_PAGE: cpu_sections,
    COUNTS_PAGE: count_sections,
}


def source(head: Mapping[str, Any]) -> str:
    """Of one results file, or of several of one run: the machine, torch, the commit and the day."""
    processor = (
        head["processor"]
        if head["hardware"] in head["processor"]
        else f"{head['hardware']}, {head['processor']}"
    )
    threads = f"threads: {head['threads']}, " if "threads" in head else ""
    return f"{processor}, {threads}torch {head['torch']}, commit {head['commit']}, {head['date']}"


def _counts(head: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """On a CPU, where time is measured: from which to which ratio the models go."""
    where = f"{source(head)}, `python -m benchmarks.counts`"
    return f"On a CPU ({where}), in training: {_spans(_moved(rows, 'training'))}."


def _target(head: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    """For a GPU: training of every model, and the spans of inference."""
    where = str(head["hardware"])
    lines = [
        f"{source(head)}; reproduce with `python -m benchmarks.counts --target {where.split()[0]}`.",
        "",
        f"| model | {' | '.join(_ARMS.values())} |",
        "|---" * (1 + len(_ARMS)) + "|",
    ]
    for workload, arms in _moved(rows, "training").items():
        base, *others = (arms[arm] for arm in _ARMS)
        ratios = (f"{other / base:.3f}" for other in others)
        lines.append(f"| {workload} | {base / 1e6:.1f} MB | {' | '.join(ratios)} |")
    return "\n".join([*lines, "", f"In inference: {_spans(_moved(rows, 'inference'))}."])


def _spans(moved: Mapping[str, Mapping[str, int]]) -> str:
    """The smallest and the largest ratio to autocast of each arm."""
    spans = []
    for arm in list(_ARMS)[1:]:
        ratios = [arms[arm] / arms["autocast"] for arms in moved.values()]
        spans.append(f"{_ARMS[arm]} {min(ratios):.3f} to {max(ratios):.3f}")
    return ", ".join(spans)


def _moved(rows: Sequence[dict[str, Any]], mode: str) -> dict[str, dict[str, int]]:
    """Model -> arm -> bytes that a step moves."""
    moved: dict[str, dict[str, int]] = {}
    for row in rows:
        if row["mode"] == mode:
            count = row["forward"]["bytes_moved"] + row["backward"]["bytes_moved"]
            moved.setdefault(row["workload"], {})[row["arm"]] = count
    return moved


def _errors(head: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    found = {(row["workload"], row["arm"]): row["gradient"] for row in rows}
    lines = [
        f"{source(head)}.",
        "",
        "| model | " + " | ".join(_ARMS.values()) + " |",
        "|---" * (1 + len(_ARMS)) + "|",
    ]
    lines += [
        f"| {workload} | " + " | ".join(f"{found[workload, arm]:.2e}" for arm in _ARMS) + " |"
        for workload in dict.fromkeys(name for name, _ in found)
    ]
    return "\n".join(lines)


def joined(paths: Sequence[Path]) -> list[tuple[dict[str, Any], list[TimingRow]]]:
    """The rows of each run: one commit, day, machine, clock and number of threads. No case stands in two of them."""
    groups: dict[tuple[Any, ...], tuple[dict[str, Any], list[TimingRow]]] = {}
    runs: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for path in paths:
        head, rows = read_timings(path)
        machine = tuple(head.get(key) for key in ("hardware", "processor", "clock", "threads"))
        run = (*machine, *(head.get(key) for key in ("torch", "commit", "date")))
        _, known = groups.setdefault(run, (head, []))
        for row in rows:
            if runs.setdefault((*machine, row.workload), run) != run:
                raise ValueError(
                    f"{path} has {row.workload!r}, which another run on this machine has: take one of them"
                )
            if any((row.workload, row.arm) == (other.workload, other.arm) for other in known):
                raise ValueError(
                    f"{path} has {row.workload!r}, {row.arm!r}, which another file of the run has"
                )
        known.extend(rows)
    order = list(CASES)
    return [(head, sorted(rows, key=lambda row: order.index(row.workload))) for head, rows in groups.values()]


def speed(head: Mapping[str, Any], rows: Sequence[TimingRow]) -> str:
    """The timings, as Markdown: times of autocast, and others as ratios to it; of training the memory, too."""
    unit, command = "Milliseconds", "python -m benchmarks"
    if head["clock"] == "cpu":
        unit, command = "Milliseconds of processor time", f"{command} --clock cpu"
    if "clocks" in head:
        command += " --device cuda"
    elif head["threads"] == 1:
        command = f"OMP_NUM_THREADS=1 {command}"
    lines = [
        f"{unit}. {source(head)};",
        f"reproduce with `{command}`. Half of the rounds give a ratio within {_spread(rows):.0%} of its median.",
    ]
    for mode, arms in _TIMED.items():
        if some := [row for row in rows if row.mode == mode]:
            what = ": time, and the peak of memory beyond what is there between steps" * (mode == "training")
            lines += ["", f"{mode.capitalize()}{what}:", "", *_timings_table(some, arms)]
    return "\n".join(lines)


def beside(
    head: Mapping[str, Any], rows: Sequence[TimingRow], without: Sequence[str] = (), ratios: bool = True
) -> str:
    """Times of inference beside other engines, with the errors, and ratios; columns of the arms that were timed."""
    timed = {row.arm for row in rows if row.times}.difference(without)
    shown = {arm: title for arm, title in _BESIDE.items() if arm in timed}
    compared = [pair for pair in _COMPARED if ratios and timed.issuperset(pair)]
    titles = [*shown.values(), *(f"{_BESIDE[one]} / {_BESIDE[other]}" for one, other in compared)]
    lines = [
        f"Milliseconds, and relative error against fp64. {source(head)};",
        f"reproduce with `python -m benchmarks --only engines --threads {head['threads']}`.",
        "",
        "| model | " + " | ".join(titles) + " |",
        "|---" * (1 + len(titles)) + "|",
    ]
    for workload in dict.fromkeys(row.workload for row in rows):
        found = {row.arm: row for row in rows if row.workload == workload and row.times}
        cells = [
            f"{1e3 * found[arm].time.median:.2f}, {found[arm].error or math.nan:.0e}" if arm in found else "-"
            for arm in shown
        ]
        times = [relative([*found.values()], *pair).median for pair in compared]
        cells += ["-" if math.isnan(time) else f"{time:.2f}" for time in times]
        lines.append(f"| {workload.partition('_')[2]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _spread(rows: Sequence[TimingRow]) -> float:
    """Half of the distance between the quartiles over the median, for the ratio in the middle."""
    shown = {arm for arms in _TIMED.values() for arm in arms}
    ratios = [
        relative([other for other in rows if other.workload == row.workload], row.arm)
        for row in rows
        if row.arm in shown
    ]
    return median((r.high - r.low) / 2 / r.median for r in ratios if not math.isnan(r.median))


def _timings_table(rows: Sequence[TimingRow], arms: Mapping[str, str]) -> list[str]:
    present = {row.arm for row in rows if row.times}
    shown = {arm: label for arm, label in arms.items() if arm in present}
    lines = ["| model | autocast | " + " | ".join(shown.values()) + " |", "|---" * (2 + len(shown)) + "|"]
    for row in rows:
        cut_short = any(note.startswith("time was up") for note in row.notes)
        if row.arm != "autocast" or not row.times or cut_short:
            continue
        case = {other.arm: other for other in rows if other.workload == row.workload and other.times}
        memory = row.peak_bytes if row.mode == "training" else None
        cells = [f"{1e3 * row.time.median:.1f}" + (f", {memory / 1e6:.0f} MB" if memory else "")]
        for arm in shown:
            ratio = relative([*case.values()], arm).median
            peak = case[arm].peak_bytes if arm in case else None
            beside_memory = f", {peak / memory:.2f}" if memory and peak is not None else ""
            cells.append("-" if math.isnan(ratio) else f"{ratio:.2f}{beside_memory}")
        lines.append(f"| {row.workload} | " + " | ".join(cells) + " |")
    return lines


def written(text: str, found: Mapping[str, str]) -> str:
    """A page with each section between its markers."""
    for name, section in found.items():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, opened, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not opened or not closed:
            raise ValueError(f"a page has no {begin} ... {end} to write to")
        text = f"{before}{begin}\n{section}\n{end}{after}"
    return text


def main() -> int:
    for path in RESULTS.glob("learning_*.jsonl"):
        draw(read_runs(path), PAGE.parent / "images" / "long-runs.png")
    for path in RESULTS.glob("trained_*.jsonl"):
        chart.draw(read_timings(path)[1], PAGE.parent / "images" / "trained.png")
    for path in RESULTS.glob("held_out_*.jsonl"):
        held_out.draw(held_out.read_rows(path), PAGE.parent / "images" / "held-out.png")
    for page, found in PAGES.items():
        page.write_text(written(page.read_text(encoding="utf-8"), found(RESULTS)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
