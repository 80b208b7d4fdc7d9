"""What one step costs: its time, and the memory it needs."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import re
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

__all__ = ["CLOCKS", "peak_bytes", "seconds"]

Step = Callable[[], object]

#: what the user waits, or what the processor works for this process: on a CPU that others use as well, the
#: second is what can be repeated, with one thread
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def seconds(step: Step, device: str, steps: int, clock: str = "wall") -> list[float]:
    """Times of some steps, in seconds, launches included; ``clock`` is a name in ``CLOCKS``.

    On a GPU the L2 cache is emptied before each step, and the clock is read with the device idle.
    """
    now = CLOCKS[clock]
    flush = _flush_buffer() if device == "cuda" else None
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


def _flush_buffer() -> Tensor:
    return torch.empty(
        2 * torch.cuda.get_device_properties(0).L2_cache_size, dtype=torch.uint8, device="cuda"
    )


def peak_bytes(step: Step, device: str) -> int | None:
    """The most memory that a step holds beyond what is held before it; None where nobody counts.

    The CUDA allocator's own count; on Linux, the resident pages of the process.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
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
