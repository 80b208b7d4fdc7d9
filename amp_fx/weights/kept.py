"""What one compiled graph has of its weights, kept as long as these do not change.

Models of one class share their graphs, so there may be several.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from torch import Tensor

from amp_fx._torch import StorageRef, storage_ref
from amp_fx.errors import WeightsError
from amp_fx.state import register
from amp_fx.weights.changes import Check, State, forget, state_of

if TYPE_CHECKING:
    from amp_fx.weights.derived import Derived
    from amp_fx.weights.device_copies import DeviceCopies

__all__ = ["Kept", "Made", "clear"]

Value = TypeVar("Value")

#: which weights, in which order; while somebody checks them they live, and no other tensor has their ids
_Key = tuple[int, ...]


@dataclass(frozen=True)
class Made(Generic[Value]):
    """What was made of the weights of one model.

    Attributes:
        value: what the graph needs.
        states: of each weight, when it was made.
        sources: the values that it consists of.
        renewed: copies in it that are renewed before each call, on their device.
    """

    value: Value
    states: Sequence[State]
    sources: Sequence[Derived] = ()
    renewed: DeviceCopies | None = None


class Kept(Generic[Value]):
    """What is made of the weights that a graph is called with.

    Two threads may make it at the same time; what both make stays once, see :mod:`amp_fx.weights.derived`.

    Args:
        make: makes it of weights. Gets what was made of them before, or None, and what else :meth:`of` was given.
        may_change: False: a changed weight is an error.
    """

    def __init__(self, make: Callable[..., Made[Value]], *, may_change: bool = True) -> None:
        self._make = make
        self._may_change = may_change
        self._entries: dict[_Key, tuple[Check, Made[Value]]] = {}
        #: where weights must not change: what lived when something was made of them
        self._memory: dict[_Key, list[StorageRef]] = {}
        _tables.add(self)

    def of(self, weights: Sequence[Tensor], *more: Any) -> Value:
        """What there is of weights, made or made again if necessary.

        Args:
            weights: plain tensors.
            more: is passed on.

        Raises:
            WeightsError: a weight has changed, and may not.
        """
        entry = self._entries.get((*map(id, weights),))
        if entry is None or not entry[0].is_current(weights):
            return self._renew(weights, *more)
        made = entry[1]
        if made.renewed is not None:
            made.renewed.renew()
        return made.value

    def _renew(self, weights: Sequence[Tensor], *more: Any) -> Value:
        key = (*map(id, weights),)
        if not self._may_change:
            self._forbid_change(key, weights)
        before = self._entries.get(key)
        if before is not None and (moved := before[0].moved(weights)):
            # before others are made: there are never two whole sets of them
            for table in list(_tables):
                table.drop(moved)
            before = self._entries.get(key)
        made = self._make(weights, None if before is None else before[1], *more)
        check = Check(weights, made.states, _OnDeath(self._entries, key))
        check.confirm(weights)
        # other threads find it only now
        self._entries[key] = check, made
        if not self._may_change:
            living = {key: refs for key, refs in self._memory.items() if _are_alive(refs)}
            self._memory = {**living, key: [*map(storage_ref, weights)]}
        return made.value

    def _forbid_change(self, key: _Key, weights: Sequence[Tensor]) -> None:
        # in this order, as another thread notes the memory last
        refs = self._memory.get(key, ())
        entry = self._entries.get(key)
        if entry is not None:
            has_changed = any(state_of(w) is not s for w, s in zip(weights, entry[0].seen, strict=True))
        else:
            # of a model that has died nothing is left; one whose weight has got other memory has that of the others
            has_changed = _are_alive(refs)
        if has_changed:
            raise WeightsError(
                "weights have changed since the graph was frozen, and strict=True forbids to freeze it again. "
                "Use weights='cache' for weights that change, or torch.compiler.reset() after changing them."
            )

    def drop(self, states: Sequence[State]) -> None:
        """Drops what is made of weights in these states, which have got other memory since."""
        gone = {*map(id, states)}
        for key, (check, made) in list(self._entries.items()):
            if not gone.isdisjoint(map(id, check.seen)):
                left = [each for each in made.sources if gone.isdisjoint(map(id, each.states))]
                # the check says from now on that this is not current
                stale: Made[Any] = Made(None, made.states, left)
                self._entries[key] = check, stale

    def clear(self) -> None:
        """All goes."""
        self._entries.clear()


#: of all graphs
_tables: weakref.WeakSet[Kept[Any]] = weakref.WeakSet()


def clear() -> None:
    """Drops all that was made of weights; it is made again before it is used."""
    for table in list(_tables):
        table.clear()
    forget()


class _OnDeath:
    """Drops an entry of a table when the memory of a weight of it is freed."""

    def __init__(self, table: dict[_Key, Any], key: _Key) -> None:
        self._table, self._key = table, key

    def __call__(self, _: object) -> None:
        """The entry goes, and with it the check that called."""
        self._table.pop(self._key, None)


def _are_alive(refs: Sequence[StorageRef]) -> bool:
    return any(ref() is not None for ref in refs)


register("copies of weights", clear)
