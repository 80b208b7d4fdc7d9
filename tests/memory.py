"""Peak memory without noise: what torch's allocator holds at once, as its profiler counts it."""

from __future__ import annotations

from collections.abc import Callable

import torch

__all__ = ["peak_bytes"]


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that are held at once of all that a function allocates on the CPU."""
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
