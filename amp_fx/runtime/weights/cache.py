"""The cache of what graphs read of their weights: tensors for each part of a graph and its weights, shared by graphs.

Models of one class share their graphs, so that a graph has a cache entry for each model. An entry is used as long as
its fingerprint says that the weights are as they were. Copies on a GPU are renewed there before each call.
"""

from __future__ import annotations

import importlib.util
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from amp_fx._torch import StorageRef, modes_disabled, packed_memory, storage_ref
from amp_fx.errors import WeightsError
from amp_fx.precision.policy.forms import ScaledRows
from amp_fx.precision.policy.levels import LEVELS
from amp_fx.runtime.state import register
from amp_fx.runtime.weights.changes import Fingerprint, address, addresses_left, forget, storages
from amp_fx.runtime.weights.lift import Part, Prepare

if TYPE_CHECKING:
    from amp_fx.runtime.weights.renewal import Renewal

Value = TypeVar("Value")

#: what the kernel that renews copies on a GPU reads, and in which dtypes it writes rows with a scale
_RENEWED = (torch.float32, torch.float16, torch.bfloat16)
_RENEWED_ROWS = (torch.float8_e4m3fn,)


class PreparedTensors:
    """The tensors that one part of a graph makes of some weights; when only values change, they are written in place.

    Attributes:
        tensors: stay where they are, for CUDA graphs.
        addresses, storages: of the weights.
        is_renewed: True if a kernel renews the tensors before each call.
    """

    def __init__(self, part: Part, weights: Sequence[Tensor]) -> None:
        self.part = part
        self.tensors: tuple[Tensor, ...] = ()
        self.addresses, self.storages = {*map(address, weights)}, storages(weights)
        self.is_renewed = _is_renewed(part, weights[0])
        self._fingerprint: Fingerprint | None = None
        self._lock = threading.RLock()

    def update(self, weights: Sequence[Tensor]) -> bool:
        """Makes the tensors unless the weights are as they were; returns False if one was written to meanwhile."""
        # what several threads want, one makes: if all did, all would take the memory
        with self._lock:
            if self._fingerprint is not None and self._fingerprint.matches(weights):
                return True
            before, self._fingerprint = Fingerprint(weights, () if self.is_renewed else weights), None
            # modes are code of others: with a lock held, none runs
            with torch.inference_mode(False), torch.no_grad(), modes_disabled():
                self.tensors = self.part.make(weights, self.tensors)
            if before.matches(weights):
                self._fingerprint = before
            return self._fingerprint is not None


#: as long as a cache entry has them
_prepared: weakref.WeakValueDictionary[tuple[object, ...], PreparedTensors] = weakref.WeakValueDictionary()
_prepared_lock = threading.RLock()


def prepared_of(part: Part, weights: Sequence[Tensor]) -> PreparedTensors:
    """The one place for what a part makes of weights; it may have to be updated."""
    key = part, *((w.data_ptr(), w.shape, w.stride(), w.dtype, w.device) for w in weights)
    with _prepared_lock:
        prepared = _prepared.get(key)
        if prepared is None:
            prepared = _prepared[key] = PreparedTensors(part, weights)
    return prepared


def held_bytes() -> int:
    """Bytes of all that is made of weights and alive, without what lies in the memory of a weight."""
    with _prepared_lock:
        alive = list(_prepared.values())
    of_weights = {storage for each in alive for storage in each.storages}
    memory = dict(_memory(tensor) for each in alive for tensor in each.tensors)
    return sum(size for start, size in memory.items() if start not in of_weights)


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes."""
    if tensor.is_mkldnn:
        return packed_memory(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _is_renewed(part: Part, weight: Tensor) -> bool:
    """True if a kernel renews what is made of the weight."""
    form = part.form
    in_rows = isinstance(form, ScaledRows) and LEVELS[form.level].dtype in _RENEWED_ROWS
    has_kernel = isinstance(form, torch.dtype) or in_rows
    last = sum((size - 1) * step for size, step in zip(weight.shape, weight.stride(), strict=True))
    is_dense = weight.numel() == last + 1
    if not (weight.is_cuda and has_kernel and weight.dtype in _RENEWED and is_dense):
        return False
    return importlib.util.find_spec("triton") is not None


# ---- what graphs have ----


class CacheEntry(NamedTuple, Generic[Value]):
    """The tensors that a graph keeps of the weights of one model.

    Attributes:
        fingerprint: of the weights; None: no call may use the entry.
        value: what the graph needs.
        prepared: what the value consists of.
        renewal: renews copies before each call, on their device.
        refs: the memory of the weights.
    """

    fingerprint: Fingerprint | None
    value: Value
    prepared: Sequence[PreparedTensors] = ()
    renewal: Renewal | None = None
    refs: Sequence[StorageRef] = ()


class WeightCache(Generic[Value]):
    """The cache entries of one graph.

    Args:
        make: gets the weights, the entry that there was of them or None, and what else :meth:`of` gets.
        may_change: False: a changed weight is an error.
    """

    def __init__(self, make: Callable[..., CacheEntry[Value]], *, may_change: bool = True) -> None:
        self._make, self._may_change = make, may_change
        #: by the ids of weights; as long as the weights live, no other tensors have these
        self.entries: dict[tuple[int, ...], CacheEntry[Value]] = {}
        #: what the weights of each model were when it was frozen, and their memory
        self._frozen: dict[tuple[int, ...], tuple[Fingerprint, list[StorageRef]]] = {}
        _caches.add(self)

    def of(self, weights: Sequence[Tensor], *more: Any) -> Value:
        """The tensors that the graph needs, of plain tensors and made if necessary; ``more`` is passed on.

        Raises:
            WeightsError: a weight has changed, and may not.
        """
        key = (*map(id, weights),)
        entry = self.entries.get(key)
        if entry is None or entry.fingerprint is None or not entry.fingerprint.matches(weights):
            entry = None  # or its tensors would live until there are others
            entry = self._renew(key, weights, *more)
        if entry.renewal is not None:
            entry.renewal.launch()
        return entry.value

    def _renew(self, key: tuple[int, ...], weights: Sequence[Tensor], *more: Any) -> CacheEntry[Value]:
        left = addresses_left(weights)
        if not self._may_change:
            self._forbid_change(key, weights)
        # memory that weights have left counts as freed: there are never two sets. What else was dropped is found again
        stays = [each for cache in list(_caches) if left for each in cache.drop(left)]
        before = self.entries.get(key)
        if before is not None:
            # from now on its tensors may be those of a write that is not finished
            self.entries[key] = before._replace(fingerprint=None)
        entry = self._make(weights, before, *more)
        del stays

        def freed(_: object, entries: dict[tuple[int, ...], Any] = self.entries) -> None:
            entries.pop(key, None)

        self.entries[key] = entry = entry._replace(refs=[storage_ref(weight, freed) for weight in weights])
        return entry

    def _forbid_change(self, key: tuple[int, ...], weights: Sequence[Tensor]) -> None:
        fingerprint, refs = self._frozen.get(key, (None, ()))
        # the ids of a model that has died may be another's
        if fingerprint is not None and _are_alive(refs) and not fingerprint.matches(weights):
            raise WeightsError(
                "weights have changed since the graph was frozen, and strict=True forbids to freeze it again. "
                "Use weights='cache' for weights that change, or torch.compiler.reset() after changing them."
            )
        living = {key: frozen for key, frozen in self._frozen.items() if _are_alive(frozen[1])}
        self._frozen = {**living, key: (Fingerprint(weights, weights), [*map(storage_ref, weights)])}

    def drop(self, addresses: set[int]) -> list[PreparedTensors]:
        """Drops the entries with what is made of weights at some addresses; returns what else they have."""
        rows = list(self.entries.items())
        gone = [(key, e) for key, e in rows if any(each.addresses & addresses for each in e.prepared)]
        for key, _ in gone:
            self.entries.pop(key, None)
        return [each for _, entry in gone for each in entry.prepared if not each.addresses & addresses]

    def clear(self) -> None:
        """Drops all entries."""
        self.entries.clear()


#: of all graphs
_caches: weakref.WeakSet[WeightCache[Any]] = weakref.WeakSet()


def clear() -> None:
    """Drops all that was made of weights; it is made again before it is used."""
    for cache in list(_caches):
        cache.clear()
    forget()


register("tensors made of weights", clear)


def _are_alive(refs: Sequence[StorageRef]) -> bool:
    return any(ref() is not None for ref in refs)


def keep(
    prepare: Prepare, weights: Sequence[Tensor], before: CacheEntry[Any] | None = None
) -> CacheEntry[list[Tensor]]:
    """The tensors that a graph reads of its weights, shared among graphs that read the same; ``before``: last entry."""
    given = [(part, [weights[at] for at in positions]) for part, positions in prepare.parts]
    found = [prepared_of(part, own) for part, own in given]
    pairs = [(prepared, own) for prepared, (_, own) in zip(found, given, strict=True)]
    on_device = [(prepared, own[0]) for prepared, own in pairs if prepared.is_renewed]
    compared = {id(weight) for prepared, own in pairs if not prepared.is_renewed for weight in own}
    alone = {id(weight) for _, weight in on_device} - compared
    # before they are read: a write in between is seen by the next call
    fingerprint = Fingerprint(weights, [weight for weight in weights if id(weight) not in alone])
    are_whole = [prepared.update(own) for prepared, own in pairs]
    renewal = _renewal(on_device, before) if on_device else None
    value = prepare.taken([prepared.tensors for prepared in found])
    is_current = all(are_whole) and fingerprint.matches(weights)
    return CacheEntry(fingerprint if is_current else None, value, found, renewal)


def _renewal(copies: Sequence[tuple[PreparedTensors, Tensor]], before: CacheEntry[Any] | None) -> Renewal:
    """As long as weights and copies lie where they did, the same one: a CUDA graph of the user may hold it."""
    from amp_fx.runtime.weights.renewal import Renewal, places_of  # imports triton

    given = [(weight, prepared.tensors, prepared.part.form) for prepared, weight in copies]
    old = None if before is None else before.renewal
    return old if old is not None and old.places == places_of(given) else Renewal(given)
