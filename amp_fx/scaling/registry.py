"""Scalers by name: graphs carry a name, which is plain data, and find the scaler when they run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from amp_fx._torch import UNTRACED
from amp_fx.errors import ScalerError, did_you_mean
from amp_fx.scaling.uses import CompiledGraph

__all__ = ["Scaler", "find_scaler", "register", "scaler_of"]


@runtime_checkable
class Scaler(Protocol):
    """What a compiled graph, and whoever finds a scaler by its name, knows of it."""

    @property
    def name(self) -> str:
        """What graphs find it by."""
        ...

    def enter_graph(self, graph: CompiledGraph, leaves: Sequence[nn.Parameter]) -> Tensor:
        """The scale for one call of a graph with these parameters: fp32, 0-d, on the graph's device."""
        ...

    def get_scale(self) -> float:
        """The scale now; waits for the device."""
        ...

    def scales(self, parameters: Sequence[Tensor]) -> bool:
        """Whether its graphs were called with some of these since its last ``update``."""
        ...

    @property
    def has_looked(self) -> bool:
        """Whether it has looked at gradients since its last ``update``."""
        ...


_lock = threading.Lock()
_scalers: weakref.WeakValueDictionary[str, Scaler] = weakref.WeakValueDictionary()


def register(scaler: Scaler, *, replace: bool) -> None:
    """Makes a scaler findable, while it lives.

    Args:
        scaler: under its name.
        replace: whether it takes the place of a living one of that name.
    """
    UNTRACED.install()
    with _lock:
        if replace or scaler.name not in _scalers:
            _scalers[scaler.name] = scaler


def scaler_of(parameters: Sequence[Tensor]) -> Scaler | None:
    """The living scaler whose graphs were called with some of the parameters since its last ``update``."""
    return next((scaler for scaler in list(_scalers.values()) if scaler.scales(parameters)), None)


def find_scaler(name: str) -> Scaler:
    """The living scaler that was made last under a name.

    Raises:
        ScalerError: there is none.
    """
    scaler = _scalers.get(name)
    if scaler is None:
        known = sorted(_scalers.keys())
        raise ScalerError(
            f"No amp_fx.GradScaler is called {name!r}; known: {', '.join(map(repr, known)) or 'none'}."
            f"{did_you_mean(name, known)} Make one before the first forward, and keep it: "
            f"scaler = amp_fx.GradScaler(device, name={name!r})."
        )
    return scaler
