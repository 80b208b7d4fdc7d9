"""Results files: a header line that says where the numbers come from, then one line of JSON per row."""

from __future__ import annotations

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch

from amp_fx.instruments.targets import TARGETS


@dataclass(frozen=True)
class Spread:
    """Median and quartiles; not a number where nothing was measured."""

    low: float
    median: float
    high: float


def spread(values: Sequence[float]) -> Spread:
    """The quartiles of some values, between neighbours where they fall between two."""
    if not values:
        return Spread(math.nan, math.nan, math.nan)
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    return Spread(*quantiles(values, n=4, method="inclusive"))


@dataclass(frozen=True)
class TimingRow:
    """What was measured of one case and arm. None: not measured, or not to be had on this device.

    Attributes:
        times: seconds of a step, one number per round; rounds of one case belong together across arms.
        compile_cold: seconds of the first step beyond a later one, with empty caches.
        peak_bytes: what a step needs beyond what is there between steps: activations, gradients, casts.
        error: relative L2 error of what inference on a CPU returns, against fp64.
        measures: of the model's task, by name.
        notes: reasons that the row does not measure what its name says, or is not there.
    """

    workload: str
    family: str
    mode: str
    arm: str
    sizes: Mapping[str, int] = field(default_factory=dict)
    times: tuple[float, ...] = ()
    compile_cold: float | None = None
    peak_bytes: int | None = None
    error: float | None = None
    measures: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def time(self) -> Spread:
        """Median and quartiles of a step, in seconds."""
        return spread(self.times)


def relative(rows: Sequence[TimingRow], arm: str, reference: str = "autocast") -> Spread:
    """Times of an arm over those of another, round by round, for the rows of one case.

    Neighbours in time share the machine's state, so the quartiles of their quotients are narrower than the
    quotients of quartiles. What one of the two has more rounds of is left out.
    """
    times = {row.arm: row.times for row in rows}
    pairs = zip(times.get(arm, ()), times.get(reference, ()), strict=False)
    return spread([time / other for time, other in pairs])


_CLOCKS = ("--query-gpu=clocks.sm,clocks.mem,clocks.max.sm", "--format=csv,noheader", "--id=0")


def describe(device: str) -> dict[str, Any]:
    """What a results file has to say about where it comes from."""
    return {
        "hardware": _hardware(device),
        "processor": _processor(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _output("git", "describe", "--always", "--dirty") or "unknown",
        "date": datetime.date.today().isoformat(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        # SM and memory clocks now, and the highest SM clock, in MHz
        **({"clocks": _output("nvidia-smi", *_CLOCKS)} if device == "cuda" else {}),
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def _hardware(device: str) -> str:
    if device in TARGETS:
        target = TARGETS[device]
        return f"{device} ({target.gpu.name}, {target.architecture}), not in the machine"
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def arguments(module: str, doc: str | None, *, device: bool = True) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.MODULE``, with where it writes and, unless told, where it runs."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write a header line and one line per row")
    if device:
        parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return parser


def write(path: str | os.PathLike[str], header: Mapping[str, Any], rows: Iterable[Any]) -> None:
    """Writes dataclass rows under a header."""
    lines = ({"header": dict(header)}, *map(asdict, rows))
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header and the rows of a file, as they were written."""
    first, *rest = map(json.loads, Path(path).read_text(encoding="utf-8").splitlines())
    return first["header"], rest


def read_timings(path: str | os.PathLike[str]) -> tuple[dict[str, Any], list[TimingRow]]:
    """The header and the rows of a file of ``python -m benchmarks``."""
    header, rows = read(path)
    return header, [
        TimingRow(**{**row, "times": tuple(row["times"]), "notes": tuple(row["notes"])}) for row in rows
    ]
