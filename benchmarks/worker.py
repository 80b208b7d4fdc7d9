"""One arm in a process of its own, told what to do line by line; ``benchmarks.running`` is the other end.

A process has its own compiled code (Dynamo shares it between instances of one class), its own settings, its
own caches and a memory that is nobody else's. Requests and replies are JSON, one per line.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from dataclasses import asdict
from statistics import median
from typing import Any

import torch
from torch import Tensor

import amp_fx
import amp_fx.lowering as lowering
from amp_fx.errors import FallbackWarning, OptionsError
from amp_fx.options import Options
from amp_fx.placement.devices import builtin
from benchmarks import counts, errors, passes, predicted, timing
from benchmarks.arms import ARMS, Arm, Prepared, prepare
from benchmarks.cases import CASES, Case
from benchmarks.floor import only_matmuls
from benchmarks.workloads import Batch

__all__ = ["Trial", "main"]

#: so small that weights stay what they are, whatever the step is timed for
_LEARNING_RATE = 1e-6


class Trial:
    """One case and arm: compiled once, stepped as often as asked."""

    def __init__(self, case: Case, arm: Arm, sizes: str, device: str) -> None:
        self.case, self.arm, self.device = case, arm, device
        if arm.backend is not None:
            # what compiling imports and sets up once is nobody's compile time
            with counts.counting():
                torch.compile(torch.sin)(torch.zeros(8))
        self.workload = case.workload(sizes)
        if arm.backend == "amp_fx":
            Options.parse(None, arm.options)
        if not arm.epilogue:
            lowering.JOINT_PIPELINES = {**lowering.JOINT_PIPELINES, "cuda": ()}
        self._make_step()

    def _make_step(self) -> None:
        prepared = prepare(self.workload, self.arm, self.case.mode, self.device)
        if self.case.mode == "training":
            self.step = _Training(prepared, self.case.micro_batches)
        else:
            self.step = prepared.forward
        if self.arm.floor:
            self.step = only_matmuls(self.step)

    def first(self) -> dict[str, Any]:
        """Compiles. Seconds of the first step beyond a later one, seconds of a later one, and notes."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", FallbackWarning)
            [first] = timing.seconds(self.step, self.device, 1)
        later = median(timing.seconds(self.step, self.device, 3))
        notes = [str(w.message) for w in caught if issubclass(w.category, FallbackWarning)]
        return {"compile": self._compile_time(first, later), "step": later, "notes": notes}

    def _compile_time(self, first: float, later: float) -> float | None:
        return None if self.arm.backend is None else first - later

    def round(self, steps: int, clock: str) -> list[float]:
        """Seconds of so many steps."""
        return timing.seconds(self.step, self.device, steps, clock)

    # --- measures, by name; each returns fields of a row ---

    def memory(self) -> dict[str, Any]:
        return {"peak_bytes": timing.peak_bytes(self.step, self.device)}

    def reads(self) -> dict[str, Any]:
        return {"host_reads": timing.host_reads(self.step)}

    def warm(self) -> dict[str, Any]:
        """Compiles again, with the caches that the first time filled."""
        self._make_step()
        found = self.first()
        return {"compile_warm": found["compile"]}

    def passes(self) -> dict[str, Any]:
        if self.arm.backend != "amp_fx":
            return {}
        seconds, nodes = passes.pass_cost(self.workload, self.arm, self.case.mode, self.device)
        return {"pass_seconds": seconds, "nodes": nodes}

    def counts(self) -> dict[str, Any]:
        if self.arm.backend is None:
            return {}
        row, counter = counts.count(self.workload, self.arm, self.case.mode, self.device)
        seconds = predicted.seconds([lowered for _, lowered in counter.graphs], builtin(self.device))
        return {"counts": asdict(row.total), "predicted": self.case.micro_batches * seconds}

    def errors(self) -> dict[str, Any]:
        if self.arm.floor or self.arm.scaler:
            return {}
        [row] = errors.measure(self.workload, [self.arm], self.case.mode, self.device)
        return {"output_error": row.loss, "gradient_error": row.gradient}


class _Training:
    """A step as a training loop has it."""

    def __init__(self, prepared: Prepared, micro_batches: int) -> None:
        self.prepared = prepared
        self.batches = _split(prepared.batch, micro_batches)
        fused = prepared.device == "cuda"
        self.optimizer = torch.optim.SGD(prepared.model.parameters(), lr=_LEARNING_RATE, fused=fused)
        arm = prepared.arm
        self.scaler: torch.amp.GradScaler | None = None
        if arm.scaler:
            scaler_class = amp_fx.GradScaler if arm.backend == "amp_fx" else torch.amp.GradScaler
            self.scaler = scaler_class(prepared.device)

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        for batch in self.batches:
            loss = self.prepared.forward(batch)
            if len(self.batches) > 1:
                loss = loss / len(self.batches)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def _split(batch: Batch, parts: int) -> list[dict[str, Tensor]]:
    columns = {name: value.chunk(parts) for name, value in batch.items()}
    return [{name: chunks[i] for name, chunks in columns.items()} for i in range(parts)]


def main() -> int:
    # whatever prints must not get between the replies
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    trial: Trial | None = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "start":
                case, arm = CASES[request["case"]], ARMS[request["arm"]]
                trial = Trial(case, arm, request["sizes"], request["device"])
                reply = trial.first()
            elif trial is None:
                raise RuntimeError(f"{request['do']!r} before 'start'")
            elif request["do"] == "round":
                reply = {"seconds": trial.round(request["steps"], request["clock"])}
            else:
                reply = getattr(trial, request["do"])()
        except OptionsError as error:
            reply = {"skipped": str(error)}
        except Exception as error:  # the other arms are worth having
            traceback.print_exc()
            reply = {"failed": f"{type(error).__name__}: {error}".splitlines()[0]}
        replies.write(json.dumps(reply) + "\n")
        replies.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
