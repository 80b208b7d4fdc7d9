"""One arm in a process of its own, told what to do line by line; ``benchmarks.running`` is the other end.

A process has its own compiled code (Dynamo shares it between instances of one class), its own settings, its
own caches and a memory that is nobody else's. Requests and replies are JSON, one per line.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from statistics import mean, median
from typing import Any

import torch

import amp_fx
from amp_fx.errors import FallbackWarning
from benchmarks.arms import ARMS, Arm, Prepared, prepare
from benchmarks.cases import CASES, Case
from benchmarks.counts import counting
from benchmarks.errors import EXACT, distance
from benchmarks.memory import allocated_peak, resident_peak

Step = Callable[[], object]

#: what the user waits, or what the processor works for this process: on a CPU that others use as well, the
#: second is what can be repeated, with one thread
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(step: Step, device: str, steps: int, clock: str = "wall") -> list[float]:
    """Times of some steps, in seconds, launches included; ``clock`` is a name in ``CLOCKS``.

    On a GPU the L2 cache is emptied before each step, and the clock is read with the device idle.
    """
    now = CLOCKS[clock]
    flush = None
    if device == "cuda":
        cache = torch.cuda.get_device_properties(0).L2_cache_size
        flush = torch.empty(2 * cache, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(steps):
        if flush is not None:
            flush.zero_()
            torch.cuda.synchronize()
        start = now()
        step()
        if flush is not None:
            torch.cuda.synchronize()
        times.append(now() - start)
    return times


#: so small that weights stay what they are, whatever the step is timed for
_LEARNING_RATE = 1e-6


class Trial:
    """One case and arm: compiled once, stepped as often as asked."""

    def __init__(self, case: Case, arm: Arm, device: str) -> None:
        self.case, self.arm, self.device = case, arm, device
        if arm.backend is not None:
            # what compiling imports and sets up once is nobody's compile time
            with counting():
                torch.compile(torch.sin)(torch.zeros(8))
        self.prepared = prepare(case.workload(device), arm, case.mode, device)
        self.step = _Training(self.prepared) if case.mode == "training" else self.prepared.forward

    def first(self) -> dict[str, Any]:
        """Compiles. Seconds of the first step beyond a later one, seconds of a later one, and notes."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FallbackWarning)
            [first] = seconds(self.step, self.device, 1)
        later = median(seconds(self.step, self.device, 3))
        compiles = self.arm.backend is not None and not self.arm.engine
        notes = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
        if self.device == "cuda":
            torch.cuda.empty_cache()
        return {"compile": first - later if compiles else None, "step": later, "notes": notes}

    def round(self, steps: int, clock: str) -> dict[str, Any]:
        """Seconds of so many steps."""
        if self.device != "cuda":
            return {"seconds": seconds(self.step, self.device, steps, clock)}
        # memory goes back to the arms beside it, and is asked for anew before anything is timed
        self.step()
        found = seconds(self.step, self.device, steps, clock)
        torch.cuda.empty_cache()
        return {"seconds": found}

    def memory(self) -> dict[str, Any]:
        """What a step needs beyond what is there between steps."""
        peak = resident_peak(self.step) if self.arm.engine else allocated_peak(self.step, self.device)
        return {"peak_bytes": peak}

    def error(self) -> dict[str, Any]:
        """How far what inference returns is from fp64, and the task's own measure, means over what was held out."""
        workload = self.case.workload(self.device)
        batches = workload.held_out or [workload.batch]
        results = [self.prepared.forward(batch).double() for batch in batches]
        # forgets what was compiled
        exact = prepare(workload, EXACT, self.case.mode, self.device)
        wanted = [exact.forward(batch) for batch in batches]
        measures: dict[str, float] = {}
        if workload.measure is not None:
            rows = [workload.measure(*pair) for pair in zip(wanted, results, strict=True)]
            measures = {name: mean(row[name] for row in rows) for name in rows[0]}
        return {"error": distance(results, wanted), "measures": measures}


class _Training:
    """A step as a training loop has it."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        fused = prepared.device == "cuda"
        self.optimizer = torch.optim.SGD(prepared.model.parameters(), lr=_LEARNING_RATE, fused=fused)
        arm = prepared.arm
        self.scaler: torch.amp.GradScaler | None = None
        if arm.scaler:
            scaler_class = amp_fx.GradScaler if arm.backend == "amp_fx" else torch.amp.GradScaler
            self.scaler = scaler_class(prepared.device)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        loss = self.prepared.forward()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()


def main() -> int:
    # whatever prints must not get between the replies
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    trial: Trial | None = None
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        try:
            if do == "start":
                trial = Trial(CASES[request["case"]], ARMS[request["arm"]], request["device"])
                reply = trial.first()
            elif trial is None:
                raise RuntimeError(f"{do!r} before 'start'")
            else:
                reply = getattr(trial, do)(**request)
        except Exception as error:  # the other arms are worth having
            traceback.print_exc()
            reply = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
