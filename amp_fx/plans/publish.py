"""Finished plans go to whoever listens.

The backend does not know its listeners; :func:`amp_fx.record` is one. Listening is process-wide, because Dynamo may
compile from any thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from amp_fx.plans.plan import Plan

__all__ = ["is_heard", "listen", "publish"]

_lock = threading.Lock()
_listeners: list[Callable[[Plan], object]] = []


@contextlib.contextmanager
def listen(listener: Callable[[Plan], object]) -> Iterator[None]:
    """Calls ``listener`` with the plan of every graph that is compiled inside the block."""
    with _lock:
        _listeners.append(listener)
    try:
        yield
    finally:
        with _lock:
            _listeners.remove(listener)


def is_heard() -> bool:
    """True while somebody listens: what only a report needs is worked out then."""
    with _lock:
        return bool(_listeners)


def publish(plan: Plan) -> None:
    """Hands a finished plan to every listener."""
    with _lock:
        listeners = list(_listeners)
    for listener in listeners:
        listener(plan)
