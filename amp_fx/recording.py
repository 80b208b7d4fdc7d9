"""``with amp_fx.record() as rec:`` collects the plans of everything compiled inside.

The string backend gives users no handle on what it did; this is the handle. It is process-wide, because
Dynamo may compile from any thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from amp_fx.plan import Plan
from amp_fx.report import Report

__all__ = ["Recording", "is_recording", "publish", "record"]

_lock = threading.Lock()


@dataclass(eq=False)
class Recording:
    """What :func:`record` yields.

    Attributes:
        plans: one per compiled graph, in order of compilation.
    """

    plans: list[Plan] = field(default_factory=list)

    @property
    def reports(self) -> list[Report]:
        """One report per compiled graph, in order of compilation. ``Report(recording.plans)`` is one of all.

        They show the forward; :func:`amp_fx.explain` shows the backward, too.
        """
        return [Report([plan]) for plan in self.plans]


_active: list[Recording] = []


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Collects the plan of every graph that amp_fx compiles inside the block."""
    recording = Recording()
    with _lock:
        _active.append(recording)
    try:
        yield recording
    finally:
        with _lock:
            _active.remove(recording)


def is_recording() -> bool:
    """True while somebody wants plans: what only a report needs is worked out then."""
    with _lock:
        return bool(_active)


def publish(plan: Plan) -> None:
    """Hands a finished plan to every open recording."""
    with _lock:
        for recording in _active:
            recording.plans.append(plan)
