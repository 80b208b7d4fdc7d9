"""Low copies of weights that live across calls.

A weight has one copy for each low dtype, shared by all graphs that read it. Whether a weight has changed since its copy
was made is found out by :mod:`amp_fx.weights.watch`. On a GPU copies compare and renew themselves, see
:mod:`amp_fx.weights.healing`.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amp_fx.policy.levels import LEVELS
from amp_fx.weights.forms import Form, Scaled, new_copy
from amp_fx.weights.memory import is_dense
from amp_fx.weights.watch import Key, Look, OnDeath, Watch, key_of, look_at

if TYPE_CHECKING:
    from amp_fx.weights.healing import HealedCopies

__all__ = ["LowCopies", "clear_copies", "copied_bytes", "heals"]

#: what the kernels that heal copies read, and in which dtypes they write rows with a scale
_HEALED = (torch.float32, torch.float16, torch.bfloat16)
_HEALED_ROWS = (torch.float8_e4m3fn,)

#: copies are written in place, by one thread at a time
_lock = threading.RLock()

#: of all graphs, as long as one of them has it: where a weight lies, how, and form -> copy
_copies: weakref.WeakValueDictionary[tuple[object, ...], _Copy] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class _Copy:
    """The copy of a weight.

    Attributes:
        tensors: of its form.
        look: what it was made from; None: nothing yet.
    """

    tensors: tuple[Tensor, ...]
    look: Look | None = None


def _copy_of(weight: Tensor, form: Form) -> _Copy:
    """The one copy of a weight, with whatever it holds: addresses stay as they are, for CUDA graphs."""
    key = weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, weight.device, form
    copy = _copies.get(key)
    if copy is None:
        copy = _copies[key] = _Copy(form.empty(weight, weight.device))
    return copy


def clear_copies() -> None:
    """Drops all copies."""
    _copies.clear()


def copied_bytes() -> int:
    """Bytes of all copies that are alive."""
    return sum(tensor.nbytes for copy in list(_copies.values()) for tensor in copy.tensors)


@dataclass
class _Found:
    """The copies of one model's weights.

    Attributes:
        copies: what the graph is called with.
        made: what these are of.
        healed: those that renew themselves.
    """

    watch: Watch
    copies: list[Tensor]
    made: list[_Copy]
    healed: HealedCopies | None


class LowCopies:
    """The copies that one compiled graph is called with.

    Args:
        weights: positions among the graph's arguments, one for each tensor.
        forms: form of the copy, and which of its tensors.
    """

    def __init__(self, weights: Sequence[int], forms: Sequence[tuple[Form, int]]) -> None:
        wanted = [(position, form) for position, (form, _) in zip(weights, forms, strict=True)]
        #: each copy once
        self._copies = list(dict.fromkeys(wanted))
        places = {copy: at for at, copy in enumerate(self._copies)}
        self._tensors = [(places[copy], part) for copy, (_, part) in zip(wanted, forms, strict=True)]
        self._positions = [position for position, _ in self._copies]
        # models of one class share their graphs
        self._found: dict[Key, _Found] = {}

    def of(self, args: Sequence[Tensor]) -> list[Tensor]:
        """The copies for a call, made or made again if necessary.

        Args:
            args: of the graph.
        """
        weights = [args[position] for position in self._positions]
        found = self._found.get(key_of(weights))
        if found is not None and found.watch.is_current(weights):
            if found.healed is not None:
                found.healed.heal()
            return found.copies
        with _lock:
            return self._renew(weights)

    def anew(self, args: Sequence[Tensor]) -> list[Tensor]:
        """Copies for one call, which are not kept.

        Args:
            args: of the graph.
        """
        made = [new_copy(args[position], form) for position, form in self._copies]
        return [made[at][part] for at, part in self._tensors]

    def _renew(self, weights: list[Tensor]) -> list[Tensor]:
        key = key_of(weights)
        before = self._found.get(key)
        if before is not None and before.watch.has_moved(weights):
            # before others are made: there are never two whole sets of them
            del self._found[key]
        del before
        forms = [form for _, form in self._copies]
        healing = [heals(weight, form) for weight, form in zip(weights, forms, strict=True)]
        # looked at before they are copied: a write in between is seen at the next call
        looks = [look_at(w, elements=not is_healed) for w, is_healed in zip(weights, healing, strict=True)]
        watch = Watch(weights, looks, OnDeath(self._found, key), healing)
        # an inference tensor could not be written to outside inference mode
        with torch.inference_mode(False), torch.no_grad():
            copies = [_copy_of(w, form) for w, form in zip(weights, forms, strict=True)]
            is_stale = [copy.look is not look for copy, look in zip(copies, looks, strict=True)]
            tensors = [copy.tensors for copy in copies]
            healed = self._healed(
                key,
                [*compress(weights, healing)],
                [*compress(tensors, healing)],
                [*compress(forms, healing)],
                [*compress(is_stale, healing)],
            )
            for weight, form, written, stale, is_healed in zip(
                weights, forms, tensors, is_stale, healing, strict=True
            ):
                if stale and not is_healed:
                    form.write(weight, written)
        for copy, look in zip(copies, looks, strict=True):
            copy.look = look
        watch.confirm(weights)
        read = [tensors[at][part] for at, part in self._tensors]
        self._found[key] = _Found(watch, read, copies, healed)
        return read

    def _healed(
        self,
        key: Key,
        weights: Sequence[Tensor],
        copies: Sequence[tuple[Tensor, ...]],
        forms: Sequence[Form],
        is_stale: Sequence[bool],
    ) -> HealedCopies | None:
        """The copies that heal themselves, made; as long as they lie where they did, the same ones."""
        if not weights:
            return None
        from amp_fx.weights.healing import HealedCopies  # imports triton

        found = self._found.get(key)
        if found is not None and found.healed is not None and found.healed.fits(weights, copies):
            found.healed.heal(is_stale)
            return found.healed
        healed = HealedCopies(weights, copies, forms)
        healed.make()
        return healed


@functools.cache
def _triton_is_here() -> bool:
    return importlib.util.find_spec("triton") is not None


def heals(weight: Tensor, form: Form) -> bool:
    """True if such a copy of it can heal itself."""
    if isinstance(form, Scaled) and LEVELS[form.level].dtype not in _HEALED_ROWS:
        return False
    return weight.is_cuda and weight.dtype in _HEALED and is_dense(weight) and _triton_is_here()
