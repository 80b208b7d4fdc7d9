"""What is held in memory, by weights' copies and by torch's allocator at once; compiles; and processes of their own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import amp_fx.compiling
from amp_fx import weights


class Compiles:
    """Counts how often Inductor is asked for a graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = amp_fx.compiling.compile_with_inductor

        def count(*args: Any) -> Any:
            self.count += 1
            return original(*args)

        monkeypatch.setattr(amp_fx.compiling, "compile_with_inductor", count)


class Held:
    """Bytes that the models of one test make the process hold."""

    def __init__(self) -> None:
        # models of other tests that are garbage
        gc.collect()
        self._before = weights.held_bytes()

    def bytes(self) -> int:
        return weights.held_bytes() - self._before


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that are held at once of all that a function allocates on the CPU, as torch's profiler counts."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as found:
        run()
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]  # of memory events
        most = max(most, held)
    return most


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own, which imports what this one does and must succeed."""
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,  # what hangs, hangs forever
    )
    assert done.returncode == 0, done.stderr
    return done
