"""The cache of tensors that are derived from weights: one for each recipe and weight, whichever graphs read it.

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
import torch.fx as fx
from torch import Tensor

from amp_fx._torch import StorageRef, modes_disabled, packed_memory, storage_ref
from amp_fx.errors import WeightsError
from amp_fx.graphs.calls import graph_inputs_of
from amp_fx.policy.levels import LEVELS
from amp_fx.state import register
from amp_fx.weights.changes import Fingerprint, address, addresses_left, forget, storages
from amp_fx.weights.recipes import Cast, Derived, Recipe, Scaled, computed

if TYPE_CHECKING:
    from amp_fx.weights.renewal import Renewal

Value = TypeVar("Value")

#: what the kernel that renews copies on a GPU reads, and in which dtypes it writes rows with a scale
_RENEWED = (torch.float32, torch.float16, torch.bfloat16)
_RENEWED_ROWS = (torch.float8_e4m3fn,)


class DerivedTensors:
    """What one recipe derives from some weights; when only their values change, in place where the recipe can.

    Attributes:
        tensors: stay where they are, for CUDA graphs.
        addresses, storages: of the weights.
        is_renewed: True if a kernel renews the tensors before each call.
    """

    def __init__(self, recipe: Recipe, weights: Sequence[Tensor]) -> None:
        self.recipe = recipe
        self.tensors: tuple[Tensor, ...] = ()
        self.addresses, self.storages = {*map(address, weights)}, storages(weights)
        self.is_renewed = _is_renewed(recipe, weights[0])
        self._fingerprint: Fingerprint | None = None
        self._lock = threading.RLock()

    def update(self, weights: Sequence[Tensor]) -> bool:
        """Derives the tensors unless the weights are as they were; returns False if one was written to meanwhile."""
        # what several threads want, one makes: if all did, all would take the memory
        with self._lock:
            if self._fingerprint is not None and self._fingerprint.matches(weights):
                return True
            before, self._fingerprint = Fingerprint(weights, () if self.is_renewed else weights), None
            # modes are code of others: with a lock held, none runs
            with torch.inference_mode(False), torch.no_grad(), modes_disabled():
                self.tensors = self.recipe.make(weights, self.tensors)
            if before.matches(weights):
                self._fingerprint = before
            return self._fingerprint is not None


#: as long as a cache entry has them
_derived: weakref.WeakValueDictionary[tuple[object, ...], DerivedTensors] = weakref.WeakValueDictionary()
_derived_lock = threading.RLock()


def derived_of(recipe: Recipe, weights: Sequence[Tensor]) -> DerivedTensors:
    """The one place for what a recipe derives from weights; it may have to be updated."""
    key = recipe, *((w.data_ptr(), w.shape, w.stride(), w.dtype, w.device) for w in weights)
    with _derived_lock:
        derived = _derived.get(key)
        if derived is None:
            derived = _derived[key] = DerivedTensors(recipe, weights)
    return derived


def held_bytes() -> int:
    """Bytes of all that is derived from weights and alive, without what lies in the memory of a weight."""
    with _derived_lock:
        alive = list(_derived.values())
    of_weights = {storage for derived in alive for storage in derived.storages}
    memory = dict(_memory(tensor) for derived in alive for tensor in derived.tensors)
    return sum(size for start, size in memory.items() if start not in of_weights)


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes."""
    if tensor.is_mkldnn:
        return packed_memory(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _is_renewed(recipe: Recipe, weight: Tensor) -> bool:
    """True if a kernel renews what is derived from the weight."""
    has_kernel = isinstance(recipe, Cast) or (
        isinstance(recipe, Scaled) and LEVELS[recipe.level].dtype in _RENEWED_ROWS
    )
    last = sum((size - 1) * step for size, step in zip(weight.shape, weight.stride(), strict=True))
    is_dense = weight.numel() == last + 1
    if not (weight.is_cuda and has_kernel and weight.dtype in _RENEWED and is_dense):
        return False
    return importlib.util.find_spec("triton") is not None


# ---- what graphs have ----


class CacheEntry(NamedTuple, Generic[Value]):
    """What a graph has of the weights of one model.

    Attributes:
        fingerprint: of the weights; None: no call may use the entry.
        value: what the graph needs.
        derived: what the value consists of.
        renewal: renews copies before each call, on their device.
        refs: the memory of the weights.
    """

    fingerprint: Fingerprint | None
    value: Value
    derived: Sequence[DerivedTensors] = ()
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
        self._entries: dict[tuple[int, ...], CacheEntry[Value]] = {}
        #: what the weights of each model were when it was frozen, and their memory
        self._frozen: dict[tuple[int, ...], tuple[Fingerprint, list[StorageRef]]] = {}
        _caches.add(self)

    def of(self, weights: Sequence[Tensor], *more: Any) -> Value:
        """What the graph needs of plain tensors, derived if necessary; ``more`` is passed on.

        Raises:
            WeightsError: a weight has changed, and may not.
        """
        key = (*map(id, weights),)
        entry = self._entries.get(key)
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
        stays = [derived for cache in list(_caches) if left for derived in cache.drop(left)]
        before = self._entries.get(key)
        if before is not None:
            # from now on its tensors may be those of a write that is not finished
            self._entries[key] = before._replace(fingerprint=None)
        entry = self._make(weights, before, *more)
        del stays

        def freed(_: object, entries: dict[tuple[int, ...], Any] = self._entries) -> None:
            entries.pop(key, None)

        self._entries[key] = entry = entry._replace(refs=[storage_ref(weight, freed) for weight in weights])
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

    def drop(self, addresses: set[int]) -> list[DerivedTensors]:
        """Drops the entries with what is derived from weights at some addresses; returns what else they have."""
        rows = list(self._entries.items())
        gone = [(key, e) for key, e in rows if any(each.addresses & addresses for each in e.derived)]
        for key, _ in gone:
            self._entries.pop(key, None)
        return [each for _, entry in gone for each in entry.derived if not each.addresses & addresses]

    def clear(self) -> None:
        """Drops all entries."""
        self._entries.clear()


#: of all graphs
_caches: weakref.WeakSet[WeightCache[Any]] = weakref.WeakSet()


def clear() -> None:
    """Drops all that was derived from weights; it is derived again before it is used."""
    for cache in list(_caches):
        cache.clear()
    forget()


register("tensors derived from weights", clear)


def _are_alive(refs: Sequence[StorageRef]) -> bool:
    return any(ref() is not None for ref in refs)


class Input(NamedTuple):
    """What a graph takes.

    Attributes:
        recipe: position of the recipe that derives it.
        part: which of its tensors.
    """

    recipe: int
    part: int = 0


class DerivedInputs:
    """Derives what a graph takes, ``inputs``, from the weights that it is called with.

    Each recipe stands once, with the positions of the weights that it takes.
    """

    def __init__(self, recipes: Sequence[tuple[Recipe, Sequence[int]]], inputs: Sequence[Input]) -> None:
        self._recipes, self._inputs = recipes, inputs

    def derive(
        self, weights: Sequence[Tensor], before: CacheEntry[Any] | None = None
    ) -> CacheEntry[list[Tensor]]:
        """What follows from weights, shared with all graphs that read the same; ``before``: their entry before."""
        given = self._given(weights)
        found = [derived_of(recipe, own) for recipe, own in given]
        pairs = [(derived, own) for derived, (_, own) in zip(found, given, strict=True)]
        on_device = [(derived, own[0]) for derived, own in pairs if derived.is_renewed]
        compared = {id(weight) for derived, own in pairs if not derived.is_renewed for weight in own}
        alone = {id(weight) for _, weight in on_device} - compared
        # before they are read: a write in between is seen by the next call
        fingerprint = Fingerprint(weights, [weight for weight in weights if id(weight) not in alone])
        are_whole = [derived.update(own) for derived, own in pairs]
        renewal = _renewal(on_device, before) if on_device else None
        value = self._taken([derived.tensors for derived in found])
        is_current = all(are_whole) and fingerprint.matches(weights)
        return CacheEntry(fingerprint if is_current else None, value, found, renewal)

    def once(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """What follows from weights, derived for one call and not kept."""
        # an inference tensor could not be written to outside inference mode
        with torch.inference_mode(False), torch.no_grad():
            return self._taken([recipe.make(own, ()) for recipe, own in self._given(weights)])

    def _given(self, weights: Sequence[Tensor]) -> list[tuple[Recipe, list[Tensor]]]:
        return [(recipe, [weights[at] for at in positions]) for recipe, positions in self._recipes]

    def _taken(self, made: Sequence[tuple[Tensor, ...]]) -> list[Tensor]:
        return [made[recipe][part] for recipe, part in self._inputs]


def _renewal(copies: Sequence[tuple[DerivedTensors, Tensor]], before: CacheEntry[Any] | None) -> Renewal:
    """As long as weights and copies lie where they did, the same one: a CUDA graph of the user may hold it."""
    from amp_fx.weights.renewal import Renewal, places_of  # imports triton

    given = [(weight, derived.tensors, derived.recipe) for derived, weight in copies]
    old = None if before is None else before.renewal
    return old if old is not None and old.places == places_of(given) else Renewal(given)


def derivation(gm: fx.GraphModule, wanted: Sequence[Derived]) -> tuple[list[fx.Node], DerivedInputs]:
    """The weights that values are computed from, and what derives the values from these."""
    # what follows from the same weights is one recipe
    groups: dict[tuple[fx.Node, ...], list[Derived]] = {}
    for each in wanted:
        groups.setdefault(tuple(graph_inputs_of(each[0])), []).append(each)
    used = list(dict.fromkeys(weight for weights in groups for weight in weights))
    recipes = [(computed(gm, own, wanted), [*map(used.index, own)]) for own, wanted in groups.items()]
    numbered = enumerate(groups.values())
    places = {each: Input(at, part) for at, group in numbered for part, each in enumerate(group)}
    return used, DerivedInputs(recipes, [places[each] for each in wanted])
