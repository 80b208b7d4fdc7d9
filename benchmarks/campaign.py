"""Everything there is to measure on a device, in slices, for machines that are lent for minutes.

    python -m benchmarks.campaign [--device cuda] [--minutes 9] [--out FOLDER]

Each step is a process of its own and leaves a file in the folder; the next call goes on with the steps that have none.
torch, triton, networkx and graphviz have to be there: what needs more is skipped, and says so. The arms of a case
compile side by side, into a folder that is kept, so that a case that was cut off is quick the next time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.cases import CASES
from benchmarks.workloads import OF_TRANSFORMERS, WORKLOADS

_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Step:
    """One process of the campaign: its file, its command, in which ``{out}`` stands for that file, what it needs."""

    name: str
    command: tuple[str, ...]
    needs: tuple[str, ...] = ()

    @property
    def missing(self) -> list[str]:
        """Packages that are needed and not there."""
        return [name for name in self.needs if importlib.util.find_spec(name) is None]


def steps(device: str, minutes: float) -> list[Step]:
    """All steps, those that matter most first; none takes longer than ``minutes``."""
    # what pytest-benchmark says beside workers would be an error
    workers = ("-n", "8", "-p", "no:benchmark") if importlib.util.find_spec("xdist") else ()
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", *workers, "tests/gpu", "--junit-xml={out}")
    profile = ("-m", "amp_fx", "profile", "--device", device, "-o", "{out}")
    found = [Step("tests.xml", tests, ("pytest",))] if device == "cuda" else []
    found.append(Step("profile.json", profile))
    limit = ("--minutes", str(0.8 * minutes), "--processes", "1", "--caches", "{caches}")
    where = ("--device", device, "--json", "{out}")
    for case in CASES.values():
        if device in case.sizes:
            timings = ("-m", "benchmarks", "--only", case.name, *limit, *where)
            found.append(Step(f"timings_{case.name}.jsonl", timings, _needs(case.build.__name__)))
    for kind in ("errors", "counts"):
        for name in WORKLOADS:
            command = ("-m", f"benchmarks.{kind}", "--only", name, *where)
            found.append(Step(f"{kind}_{name}.jsonl", command, _needs(name)))
    return found


def _needs(build: str) -> tuple[str, ...]:
    return ("transformers",) if build in OF_TRANSFORMERS else ()


def run(step: Step, folder: Path, seconds: float) -> str:
    """Runs one step; returns what became of it."""
    path, log = folder / step.name, folder / f"{step.name}.log"
    # in a file of its own until it is whole
    partial = folder / f"partial_{step.name}"
    caches = str(folder / "caches")
    command = [each.replace("{out}", str(partial)).replace("{caches}", caches) for each in step.command]
    with log.open("w", encoding="utf-8") as output:
        try:
            done = subprocess.run(
                [sys.executable, *command],
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=_ROOT,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            partial.unlink(missing_ok=True)
            return f"took longer than {seconds:.0f} s, see {log.name}"
    if not partial.exists():
        return f"failed with code {done.returncode}, see {log.name}"
    partial.replace(path)
    return "done" if done.returncode == 0 else f"done with code {done.returncode}, see {log.name}"


def main(argv: Sequence[str] | None = None) -> int:
    description = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.campaign", description=description)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call; default: %(default)s")
    parser.add_argument("--out", default="out/campaign", metavar="FOLDER", help="default: %(default)s")
    args = parser.parse_args(argv)
    folder = Path(args.out).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * args.minutes
    left = []
    for step in steps(args.device, args.minutes):
        if (folder / step.name).exists():
            continue
        if step.missing:
            print(f"{step.name}: skipped, as there is no {' and no '.join(step.missing)}")
            continue
        seconds = end - time.monotonic()
        # a step that is cut off has to begin again: none is begun late
        if seconds < 30 * args.minutes:
            left.append(step.name)
            continue
        print(f"{step.name}: {run(step, folder, seconds)}", flush=True)
    print(json.dumps({"folder": str(folder), "left": left}))
    if left:
        print(f"{len(left)} steps are left: run it again")
    return 0


if __name__ == "__main__":
    sys.exit(main())
