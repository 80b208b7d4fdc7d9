"""Times amp_fx beside what a user would pick instead, in one run.

    python -m benchmarks [--only CASE ...] [--arms ARM ...] [--minutes N] [--device cuda] [--json FILE]
    python -m benchmarks --only engines   # inference beside OpenVINO and others, those that are installed
    python -m benchmarks --only trained   # with weights that somebody trained: benchmarks/trained/requirements.txt
    python -m benchmarks peaks            # memory at the peak of a training step, on a CPU
    python -m benchmarks engines_files    # files of amp_fx.export_onnx in the engines that they are written for

Every arm has processes of its own, several one after the other, and all arms take turns, round by round, so that
what else the machine does, and where memory happens to lie, meets all of them alike. Cases come in the order of
how much they matter, and ``--minutes`` ends the run in time. What is measured is said at
:class:`benchmarks.results.TimingRow`.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks import engine_files, peaks
from benchmarks.arms import ARMS
from benchmarks.cases import CASES
from benchmarks.results import Spread, TimingRow, arguments, describe, relative, write
from benchmarks.running import MALLOCS, Settings, measure
from benchmarks.worker import CLOCKS

#: the arm that others are compared with beside autocast
_ENGINE = "openvino"


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["engines_files"]:
        return engine_files.main(argv[1:])
    if argv[:1] == ["peaks"]:
        return peaks.main(argv[1:])
    args = _arguments(argv)
    if args.threads:
        # of this process, which says how many in the header, and of the arms'
        torch.set_num_threads(args.threads)
        os.environ["OMP_NUM_THREADS"] = str(args.threads)
    settings = Settings(
        device=args.device,
        arms=args.arms,
        rounds=args.rounds,
        processes=args.processes,
        clock=args.clock,
        malloc=args.malloc,
        caches=args.caches,
        deadline=time.monotonic() + 60 * args.minutes,
    )
    asked = {name: getattr(settings, name) for name in ("rounds", "processes", "clock", "malloc")}
    header = {**describe(args.device), **asked}
    print(", ".join(f"{key} {value}" for key, value in header.items()), flush=True)
    rows: list[TimingRow] = []
    for case in CASES.values():
        if args.device not in case.sizes or (args.only and not {case.name, case.family} & set(args.only)):
            continue
        if settings.late:
            print(f"{case.name}: no time left")
            continue
        measured = measure(case, settings)
        rows += measured
        print(case_table(measured) + "\n", flush=True)
        if args.json:
            # as it goes: a run may be cut off
            write(args.json, header, rows)
    return 1 if any(note.startswith("failed") for row in rows for note in row.notes) else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = arguments("benchmarks", __doc__)
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases or families of them; default: all")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--threads", type=int, help="default: those of torch")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    processes = "that an arm's rounds are spread over; default: %(default)s"
    parser.add_argument("--processes", type=int, default=3, help=processes)
    clock = "cpu: of the process, for a busy machine and one thread"
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help=clock)
    malloc = "default: freed memory goes back to the system as glibc has it; kept: it stays"
    parser.add_argument("--malloc", choices=MALLOCS, default="kept", help=malloc)
    caches = "of compiled code, kept: arms compile side by side, which is quick, and not measured"
    parser.add_argument("--caches", default="", metavar="FOLDER", help=caches)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end about then; default: no limit")
    args = parser.parse_args(argv)
    known = {*CASES, *(case.family for case in CASES.values())}
    unknown = [name for name in args.only or () if name not in known]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; valid: {', '.join(CASES)}")
    for name in ("rounds", "processes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(args, name)}")
    return args


def case_table(rows: Sequence[TimingRow]) -> str:
    """The rows of one case: a line per arm, with medians and quartiles, then the notes."""
    first = rows[0]
    sizes = ", ".join(f"{name} {value}" for name, value in first.sizes.items())
    lines = [f"{first.workload}, {first.mode}: {sizes}"]
    titles = f"{'':24}{'ms':>28}{'x autocast':>20}{'cold s':>10}{'peak MB':>10}"
    has_errors = any(row.error is not None for row in rows)
    beside = _ENGINE if any(row.arm == _ENGINE and row.times for row in rows) else ""
    lines.append(titles + f"{'error':>10}" * has_errors + (f"{f'x {beside}':>20}" if beside else ""))
    for row in rows:
        if row.times:
            ratio = _quartiles(relative(rows, row.arm))
            compiled = "-" if row.compile_cold is None else f"{row.compile_cold:.1f}"
            peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.1f}"
            line = f"{row.arm:24}{_quartiles(row.time, 1e3):>28}{ratio:>20}{compiled:>10}{peak:>10}"
            if has_errors:
                line += f"{'-' if row.error is None else f'{row.error:.1e}':>10}"
            if beside:
                line += f"{_quartiles(relative(rows, row.arm, beside)):>20}"
            lines.append(line)
    for row in rows:
        measures = ", ".join(f"{name} {value:.4g}" for name, value in row.measures.items())
        lines += [f"{row.arm}: {measures}"] * bool(measures)
    lines += [f"note: {row.arm}: {note}" for row in rows for note in row.notes]
    return "\n".join(lines)


def _quartiles(spread: Spread, scale: float = 1.0) -> str:
    """``0.93 (0.92-0.95)``, or a dash."""
    if math.isnan(spread.median):
        return "-"
    low, median, high = (f"{scale * value:.2f}" for value in (spread.low, spread.median, spread.high))
    return f"{median} ({low}-{high})"


if __name__ == "__main__":
    sys.exit(main())
