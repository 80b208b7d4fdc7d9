"""The most memory that a step holds beyond what is held before it."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import re
from collections.abc import Callable
from pathlib import Path

import torch


def allocated_peak(step: Callable[[], object], device: str = "cpu") -> int:
    """By torch's own allocators, in bytes: the same each time."""
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as found:
        step()
    assert found.profiler is not None
    assert found.profiler.kineto_results is not None
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()  # pyright: ignore[reportAttributeAccessIssue]  # of memory events
        most = max(most, held)
    return most


def resident_peak(step: Callable[[], object]) -> int | None:
    """By resident pages of the process, for libraries with memory of their own; None where nobody counts."""
    gc.collect()
    reset = Path("/proc/self/clear_refs")
    libc = ctypes.util.find_library("c")
    if not reset.exists() or libc is None:
        return None
    # pages that freed tensors left behind would hide what the step asks for
    ctypes.CDLL(libc).malloc_trim(0)
    before = _resident("VmRSS")
    reset.write_text("5", encoding="ascii")  # the peak is now the present
    step()
    return max(_resident("VmHWM") - before, 0)


def _resident(what: str) -> int:
    found = re.search(rf"{what}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return 1024 * int(found[1]) if found else 0
