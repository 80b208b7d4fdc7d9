"""Times amp_fx beside what a user would pick instead, in one run.

    python -m benchmarks [--only CASE ...] [--arms ARM ...] [--minutes N] [--device cuda] [--json FILE]
                         [--plots FOLDER]
    python -m benchmarks --compare BEFORE.jsonl AFTER.jsonl

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
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from benchmarks.arms import ARMS
from benchmarks.cases import CASES, SIZES, Case, sizes_for
from benchmarks.compare import comparison
from benchmarks.plots import draw
from benchmarks.results import TimingRow, describe, read_timings, write
from benchmarks.running import MALLOCS, MEASURES, Settings, measure
from benchmarks.tables import case_table
from benchmarks.timing import CLOCKS


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    if args.compare:
        (_, before), (_, after) = map(read_timings, args.compare)
        print(comparison(before, after))
        return 0
    if args.redraw:
        header, rows = read_timings(args.redraw)
        print("\n\n".join(_tables(rows)))
    else:
        header, rows = _run(args)
    if args.plots:
        for path in draw(rows, header, args.plots):
            print(path)
    return 1 if any(note.startswith("failed") for row in rows for note in row.notes) else 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="CASE", help="cases or families of them; default: all")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--sizes", choices=SIZES, help="default: what suits the device")
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    parser.add_argument(
        "--processes", type=int, default=3, help="that an arm's rounds are spread over; default: %(default)s"
    )
    parser.add_argument(
        "--clock",
        choices=CLOCKS,
        default="wall",
        help="cpu: of the process, for a busy machine and one thread",
    )
    parser.add_argument(
        "--malloc",
        choices=MALLOCS,
        default="kept",
        help="default: freed memory goes back to the system as glibc has it; kept: it stays",
    )
    parser.add_argument("--minutes", type=float, default=math.inf, help="end about then; default: no limit")
    parser.add_argument(
        "--measures",
        nargs="*",
        choices=MEASURES,
        default=list(MEASURES),
        metavar="NAME",
        help="beside time and compile time; default: all of " + ", ".join(MEASURES),
    )
    parser.add_argument(
        "--caches", metavar="FOLDER", help="share and keep caches of Inductor; no cold compile times"
    )
    parser.add_argument("--json", metavar="FILE", help="write a header line and one line per case and arm")
    parser.add_argument("--plots", metavar="FOLDER", help="draw PNG files; needs matplotlib")
    parser.add_argument(
        "--compare", nargs=2, metavar="FILE", help="compare two results files and measure nothing"
    )
    parser.add_argument(
        "--redraw", metavar="FILE", help="tables and plots of a results file; measures nothing"
    )
    args = parser.parse_args(argv)
    known = {*CASES, *(case.family for case in CASES.values())}
    unknown = [name for name in args.only or () if name not in known]
    if unknown:
        parser.error(f"unknown case {unknown[0]!r}; valid: {', '.join(CASES)}")
    for name in ("rounds", "processes"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1; got {getattr(args, name)}")
    return args


def _run(args: argparse.Namespace) -> tuple[dict[str, object], list[TimingRow]]:
    started = time.monotonic()
    settings = Settings(
        device=args.device,
        sizes=args.sizes or sizes_for(args.device),
        arms=args.arms,
        rounds=args.rounds,
        processes=args.processes,
        clock=args.clock,
        malloc=args.malloc,
        caches=args.caches,
        measures=args.measures,
        deadline=started + 60 * args.minutes,
    )
    header = {
        **describe(args.device),
        "sizes": settings.sizes,
        "rounds": settings.rounds,
        "processes": settings.processes,
        "clock": settings.clock,
        "malloc": settings.malloc,
    }
    print(", ".join(f"{key} {value}" for key, value in header.items()), flush=True)
    cases = [
        case
        for case in CASES.values()
        if settings.sizes in case.sizes and (not args.only or {case.name, case.family} & set(args.only))
    ]
    rows: list[TimingRow] = []
    bar = _bar(cases)
    for case in bar:
        if settings.late:
            bar.write(f"{case.name}: no time left")
            continue
        bar.set_description(case.name)
        measured = measure(case, settings, lambda doing: bar.set_postfix_str(doing))
        rows += measured
        bar.write(case_table(measured) + "\n", file=sys.stdout)
        if args.json:
            # as it goes: a run may be cut off
            load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
            write(
                args.json, {**header, "load_at_end": load, "minutes": (time.monotonic() - started) / 60}, rows
            )
    return header, rows


class _Quiet:
    """What is used of tqdm's bar where there is none."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self._cases = cases

    def __iter__(self) -> Iterator[Case]:
        return iter(self._cases)

    def write(self, text: str, file: TextIO | None = None) -> None:
        print(text, file=file, flush=True)

    def set_description(self, text: str) -> None:
        pass

    def set_postfix_str(self, text: str) -> None:
        pass


def _bar(cases: Sequence[Case]) -> Any:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return _Quiet(cases)
    return tqdm(cases, unit="case", disable=None)


def _tables(rows: Sequence[TimingRow]) -> list[str]:
    return [
        case_table([row for row in rows if row.workload == name])
        for name in dict.fromkeys(row.workload for row in rows)
    ]


if __name__ == "__main__":
    sys.exit(main())
