"""Something of each weight, for as long as its memory lasts."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

from torch import Tensor

from amp_fx._torch import StorageRef, storage_ref

__all__ = ["ByWeight"]

Value = TypeVar("Value")


class ByWeight(Generic[Value]):
    """A table by the ids of weights. What it has of a weight goes when the weight's memory is freed.

    A weight that has died may have lain in memory that lives on. Then its id may be another's: whoever gets something
    here makes sure that it fits the weight.
    """

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Value, StorageRef]] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._rows)

    def has_any(self, keys: Iterable[int]) -> bool:
        """True if there is something of one of these; says in little time that there is not."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(keys)

    def get(self, key: int) -> Value | None:
        """What there is of the weight with an id."""
        row = self._rows.get(key)
        return None if row is None else row[0]

    def put(self, weight: Tensor, value: Value) -> Value | None:
        """Keeps this of a weight, and returns what there was."""
        key = id(weight)
        row = value, storage_ref(weight, lambda ref: self._freed(key, ref))
        with self._lock:
            before = self.get(key)
            self._rows[key] = row
        return before

    def values(self) -> Iterator[Value]:
        """All there is now."""
        return iter([value for value, _ in list(self._rows.values())])

    def clear(self) -> None:
        """Keeps nothing."""
        self._rows.clear()

    def _freed(self, key: int, ref: weakref.ref[Any]) -> None:
        row = self._rows.get(key)
        # a weight that has got other memory has another row
        if row is not None and row[1] is ref:
            del self._rows[key]
