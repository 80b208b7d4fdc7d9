"""Which compiled graphs use a scaler, and with which parameters.

A scaler knows a graph by the names of its parameters and the device of its scale. Graphs are held weakly, parameters
from a call to the end of its step; else they are known by their ids, as long as their memory lasts.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from amp_fx._torch import StorageRef, is_wrapper, storage_ref

__all__ = ["CompiledGraph", "Use", "Uses"]


class CompiledGraph(Protocol):
    """What a scaler knows of a compiled graph that asks it for a scale."""

    @property
    def names(self) -> tuple[str, ...]:
        """Of the graph's parameters, in order."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the scale is needed."""
        ...


@dataclass(eq=False)
class Use:
    """One graph with one set of parameters: models of one class share their graphs.

    Attributes:
        ids: of the parameters.
        names: of the parameters.
        memory: of the parameters.
        leaves: the parameters themselves, from a call of the graph to the end of the step.
        entered: the graph was called in this step.
    """

    ids: tuple[int, ...]
    names: tuple[str, ...]
    memory: tuple[StorageRef, ...] = ()
    leaves: Sequence[nn.Parameter] = ()
    entered: bool = False

    def enter(self, leaves: Sequence[nn.Parameter]) -> None:
        """The graph is called with these, which have its ids."""
        self.leaves, self.entered = leaves, True
        if not self.memory or self.is_dead():
            self.memory = tuple(map(storage_ref, leaves))

    def is_dead(self) -> bool:
        """True if a parameter is gone, or has got other memory since the graph was called."""
        return any(memory() is None for memory in self.memory)

    def has(self, parameters: Sequence[Tensor]) -> bool:
        """True if one of these is among its parameters; sharded ones may be, where a graph has been handed none."""
        if not self.ids:
            return any(map(is_wrapper, parameters))
        ids = set(map(id, parameters))
        return any(id(leaf) in ids for leaf in self.leaves)


class Uses:
    """All uses of one scaler, in the order of their first call."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[CompiledGraph, list[Use]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def enter(self, graph: CompiledGraph, leaves: Sequence[nn.Parameter]) -> None:
        """A graph is called with these parameters; the use is going on until :meth:`end_step`."""
        self._known(graph, tuple(map(id, leaves))).enter(leaves)

    def _known(self, graph: CompiledGraph, ids: tuple[int, ...]) -> Use:
        known = self._find(graph, ids)
        if known is not None:
            return known
        new = Use(ids, graph.names)
        with self._lock:
            known = self._find(graph, ids)
            if known is None:
                # a new list: another thread may be looking through the old one
                self._of[graph] = [*(other for other in self._of.get(graph, ()) if not other.is_dead()), new]
        return known or new

    def _find(self, graph: CompiledGraph, ids: tuple[int, ...]) -> Use | None:
        return next((use for use in self._of.get(graph, ()) if use.ids == ids), None)

    def end_step(self) -> None:
        """Keeps no parameters: neither they nor graphs live longer for being scaled."""
        for use in self:
            use.leaves, use.entered = (), False

    def __iter__(self) -> Iterator[Use]:
        for uses in list(self._of.values()):
            yield from uses

    def names(self) -> dict[int, str]:
        """Names of the living parameters by their ids, in the order of the graphs."""
        living = (use for use in self if not use.is_dead())
        return {key: name for use in living for key, name in zip(use.ids, use.names, strict=True)}
