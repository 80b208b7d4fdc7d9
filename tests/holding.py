"""What is held in memory: by weights' copies and constants, and by torch's allocator at once; and compiles."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

import amp_fx.compiling
from amp_fx import weights

__all__ = ["Compiles", "Held", "peak_bytes"]


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
