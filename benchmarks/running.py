"""Measuring cases: processes per arm, compiled one after the other, then timed round by round in turn."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.arms import ARMS, Arm, arms_for
from benchmarks.cases import Case
from benchmarks.results import TimingRow

_ROOT = Path(__file__).resolve().parent.parent

#: How an arm's process has its memory. ``kept``: as it is in one that has run for long. Huge pages, so that it matters
#: less where a process's memory lies. And glibc keeps what is freed: how much it hands back depends on the largest
#: block ever freed, such as the fp32 weights of a model that was converted, and handing back costs a step of ResNet-18
#: up to a quarter. ``default``: as glibc has it by itself; what is freed and allocated anew may cost page faults.
MALLOCS: dict[str, dict[str, str]] = {
    "kept": {
        "THP_MEM_ALLOC_ENABLE": "1",
        "MALLOC_TRIM_THRESHOLD_": "4000000000",
        "MALLOC_MMAP_THRESHOLD_": "4000000000",
    },
    "default": {},
}

#: an arm steps for about so long in a round; seconds
_ROUND_SECONDS = 0.1
_MAX_STEPS = 50
#: with less, quartiles mean nothing
_MIN_ROUNDS = 5


@dataclass(frozen=True)
class Settings:
    """What a run is asked for.

    Attributes:
        arms: names in ``ARMS``; those that make no sense for a case are left out.
        processes: that an arm's rounds are spread over, one after the other: where a process's memory lies moves
            its times by several percent.
        clock: a name in ``benchmarks.worker.CLOCKS``.
        malloc: a name in :data:`MALLOCS`.
        caches: a folder for compiled code, kept between runs; arms compile side by side, and how long is not measured.
        deadline: of ``time.monotonic``; after it rounds are cut short, and memory and errors are not measured.
    """

    device: str = "cpu"
    arms: Sequence[str] = tuple(ARMS)
    rounds: int = 15
    processes: int = 3
    clock: str = "wall"
    malloc: str = "kept"
    caches: str = ""
    deadline: float = float("inf")

    @property
    def late(self) -> bool:
        return time.monotonic() > self.deadline


class _StoppedError(Exception):
    """An arm cannot be measured, or not any further; the message says why."""


@dataclass
class _Worker:
    """The parent's end of one arm's process, and of those that follow it."""

    arm: Arm
    folder: Path
    malloc: str = "kept"
    steps: int = 1
    times: list[float] = field(default_factory=list)
    fields: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.process = self._start()

    @property
    def log(self) -> Path:
        return self.folder / f"{self.arm.name}.log"

    def _start(self) -> subprocess.Popen[str]:
        # caches of its own, so that the first compilation is a cold one
        cache = str(self.folder / self.arm.name)
        environment = {**MALLOCS[self.malloc], **os.environ, **self.arm.env, "TORCHINDUCTOR_CACHE_DIR": cache}
        with self.log.open("w", encoding="utf-8") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "benchmarks.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=_ROOT,
                env=environment,
            )

    def restart(self) -> None:
        self.stop()
        self.process = self._start()

    def send(self, do: str, **arguments: Any) -> None:
        """A request; :meth:`reply` waits for what comes back."""
        assert self.process.stdin is not None
        # what has ended is noticed where its reply is read
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self.process.stdin.flush()

    def reply(self) -> dict[str, Any]:
        """Raises _StoppedError where the arm failed."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            said = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = said[-1] if said else "it said nothing"
            raise _StoppedError(f"failed: the process ended with {self.process.wait()}; {last}")
        reply = json.loads(line)
        if "failed" in reply:
            raise _StoppedError(f"failed: {reply['failed']}")
        return reply

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        self.send(do, **arguments)
        return self.reply()

    def stop(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def measure(case: Case, settings: Settings) -> list[TimingRow]:
    """Measures all arms of one case; a row for each, also for those that could not be measured."""
    sensible = arms_for(case.mode, settings.device)
    names = [n for n in settings.arms if n in sensible and case.takes(ARMS[n])]
    workers: list[_Worker] = []
    with contextlib.ExitStack() as stack:
        folder = Path(settings.caches or stack.enter_context(tempfile.TemporaryDirectory()))
        folder.mkdir(parents=True, exist_ok=True)
        try:
            # imports overlap; what is measured does not
            workers += (_Worker(ARMS[name], folder, settings.malloc) for name in names)
            for worker in workers if settings.caches else ():
                worker.send("start", case=case.name, arm=worker.arm.name, device=settings.device)
            running, done = [worker for worker in workers if _compile(worker, case, settings)], 0
            parts = min(settings.processes, settings.rounds)
            for part in range(1, parts + 1):
                if part > 1 and not settings.late:
                    for worker in running:
                        worker.restart()
                    running = [worker for worker in running if _start(worker, case, settings)]
                until = settings.rounds * part // parts
                take_turns(running, range(done, until), settings)
                done = until
            for worker in running:
                _last(worker, "memory", settings)
                if case.mode == "inference" and settings.device == "cpu":
                    _last(worker, "error", settings)
        finally:
            for worker in workers:
                worker.stop()
    template = TimingRow(case.name, case.family, case.mode, "", dict(case.sizes[settings.device]))
    return [
        replace(template, arm=w.arm.name, times=tuple(w.times), notes=tuple(w.notes), **w.fields)
        for w in workers
    ]


def _compile(worker: _Worker, case: Case, settings: Settings) -> bool:
    first = _start(worker, case, settings, sent=bool(settings.caches))
    if first is None:
        return False
    if not settings.caches:
        worker.fields["compile_cold"] = first["compile"]
    worker.notes += first["notes"]
    worker.steps = max(1, min(_MAX_STEPS, round(_ROUND_SECONDS / first["step"])))
    return True


def _start(worker: _Worker, case: Case, settings: Settings, sent: bool = False) -> dict[str, Any] | None:
    """Compiles in a new process, if it has not been told yet; None if that fails."""
    print(f"{case.name}: compile {worker.arm.name}", file=sys.stderr)
    try:
        if not sent:
            worker.send("start", case=case.name, arm=worker.arm.name, device=settings.device)
        return worker.reply()
    except _StoppedError as reason:
        worker.notes.append(str(reason))
        return None


def take_turns(workers: list[_Worker], indices: range, settings: Settings) -> None:
    """Times the arms in turn; each round begins with another, so that none always follows the same."""
    for index in indices:
        if settings.late and index >= _MIN_ROUNDS:
            for worker in workers:
                worker.notes.append(f"time was up before round {index + 1}")
            return
        shift = index % len(workers) if workers else 0
        for worker in workers[shift:] + workers[:shift]:
            try:
                worker.times.append(
                    median(worker.ask("round", steps=worker.steps, clock=settings.clock)["seconds"])
                )
            except _StoppedError as reason:
                worker.notes.append(f"round {index + 1} {reason}")
                workers.remove(worker)


def _last(worker: _Worker, what: str, settings: Settings) -> None:
    """Asks for what is measured once: ``memory``, ``error``."""
    if settings.late:
        worker.notes.append(f"no time for {what}")
        return
    try:
        worker.fields.update(worker.ask(what))
    except _StoppedError as reason:
        worker.notes.append(f"{what} {reason}")
