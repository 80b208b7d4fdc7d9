"""All values that amp_fx keeps in a process from one call to the next, each with its function to forget it.

A value that outlives a call is registered here by the file that keeps it. Not here: what a user holds (scalers,
reports), what belongs to a block that is open (listeners, autocast), and what a process is for good (its target).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])

_resets: dict[str, Callable[[], object]] = {}


def register(name: str, forget: Callable[[], object]) -> None:
    """Adds something that is kept, and what makes it what it was when amp_fx was imported."""
    _resets[name] = forget


def cache_results(maxsize: int | None = None) -> Callable[[Function], Function]:
    """As ``functools.lru_cache``: what a function has returned is kept until :func:`reset`."""

    def decorate(function: Function) -> Function:
        wrapped: Any = functools.lru_cache(maxsize=maxsize)(function)
        register(f"results of {function.__module__}.{function.__qualname__}", wrapped.cache_clear)
        return wrapped

    return decorate


def reset() -> None:
    """Forgets what amp_fx keeps in this process, as for a test or another model in a notebook.

    Copies of weights are dropped and made again, and what is said once may be said again. What was compiled stays:
    ``torch.compiler.reset()`` forgets that.
    """
    for forget in list(_resets.values()):
        forget()
