"""Which compiled graphs use a scaler, and with which parameters.

A scaler knows a graph by the names of its parameters and the device of its scale. It holds graphs and parameters
weakly: neither lives longer for being scaled.
"""

from __future__ import annotations

import operator
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from amp_fx._torch import is_wrapper

__all__ = ["CompiledGraph", "OwnScale", "Use", "Uses"]


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


@dataclass
class OwnScale:
    """The loss scale of one graph alone.

    Attributes:
        value: fp32, 0-d.
        growth_tracker: updates since the scale last changed; int32, 0-d.
    """

    value: Tensor
    growth_tracker: Tensor

    def fill(self, value: float | Tensor, growth_tracker: int | None = None) -> None:
        """Sets the scale, and the tracker too if it is given."""
        self.value.fill_(value)
        if growth_tracker is not None:
            self.growth_tracker.fill_(growth_tracker)


@dataclass(eq=False)
class Use:
    """One graph with one set of parameters: models of one class share their graphs.

    Attributes:
        leaves: the parameters, weakly.
        names: of the parameters.
        own: the graph's own scale, if it has one.
        entered: the graph was called in this step.
    """

    leaves: tuple[weakref.ref[nn.Parameter], ...]
    names: tuple[str, ...]
    own: OwnScale | None
    entered: bool = False

    def is_of(self, leaves: Sequence[nn.Parameter]) -> bool:
        """True if these are the parameters."""
        return all(map(operator.is_, [ref() for ref in self.leaves], leaves))

    def is_dead(self) -> bool:
        """True if a parameter is gone."""
        return any(ref() is None for ref in self.leaves)

    def has(self, parameters: Sequence[Tensor]) -> bool:
        """True if one of these is among its parameters; sharded ones may be, where a graph has been handed none."""
        if not self.leaves:
            return any(map(is_wrapper, parameters))
        ids = set(map(id, parameters))
        return any(id(leaf) in ids for leaf, _ in self.living())

    def living(self) -> Iterator[tuple[nn.Parameter, str]]:
        """The parameters that are left, with their names."""
        for ref, name in zip(self.leaves, self.names, strict=True):
            leaf = ref()
            if leaf is not None:
                yield leaf, name


class Uses:
    """All uses of one scaler, in the order of their first call."""

    def __init__(self) -> None:
        self._of: weakref.WeakKeyDictionary[CompiledGraph, list[Use]] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    def of(
        self,
        graph: CompiledGraph,
        leaves: Sequence[nn.Parameter],
        own_scale: Callable[[torch.device], OwnScale] | None,
    ) -> Use:
        """The use of a graph with these parameters.

        Args:
            graph: the graph.
            leaves: its parameters in this call.
            own_scale: makes the scale of a use that is new; None where graphs have none.
        """
        for use in self._of.get(graph, ()):
            if use.is_of(leaves):
                return use
        with self._lock:
            own = None if own_scale is None else own_scale(graph.device)
            use = Use(tuple(weakref.ref(leaf) for leaf in leaves), graph.names, own)
            # a new list: another thread may be looking through the old one
            self._of[graph] = [*(other for other in self._of.get(graph, ()) if not other.is_dead()), use]
            return use

    def __iter__(self) -> Iterator[Use]:
        for uses in list(self._of.values()):
            yield from uses

    def names(self) -> dict[int, str]:
        """Names of the living parameters by their ids, in the order of the graphs."""
        return {id(leaf): name for use in self for leaf, name in use.living()}
