"""Low copies of weights that live across calls.

A weight has one copy for each low dtype, shared by all graphs that read it. Whether a weight has changed since its copy
was made is found out by :mod:`amp_fx.weights.watch`. On a GPU copies compare and renew themselves, see
:mod:`amp_fx.weights.healing`.
"""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from amp_fx.weights.constants import folded_bytes
from amp_fx.weights.memory import is_dense
from amp_fx.weights.training import drop, lent_bytes
from amp_fx.weights.watch import Key, Look, OnDeath, Watch, forget, key_of, look_at

if TYPE_CHECKING:
    from amp_fx.weights.healing import HealedCopies

__all__ = ["LowCopies", "clear", "held_bytes"]

#: what the kernel that heals copies reads
_HEALED = (torch.float32, torch.float16, torch.bfloat16)

_lock = threading.RLock()


@dataclass
class _Copy:
    """The copy of a weight.

    Attributes:
        look: what it was made from; None: nothing yet.
    """

    value: Tensor
    look: Look | None = None


#: weight -> dtype -> copy; shared by all graphs that read the weight
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def clear() -> None:
    """Drops all copies, and makes all that was computed from weights again before it is used."""
    with _lock:
        _copies.clear()
        drop()
        forget()


def held_bytes() -> int:
    """Bytes of all copies that are alive, and of the constants that frozen graphs have made of weights."""
    with _lock:
        copies = sum(copy.value.nbytes for copies in _copies.values() for copy in copies.values())
    return copies + lent_bytes() + folded_bytes()


@dataclass
class _Found:
    """The copies of one model's weights."""

    watch: Watch
    copies: list[Tensor]
    healed: HealedCopies | None


class LowCopies:
    """The copies that one compiled graph is called with.

    Args:
        weights: positions among the graph's arguments.
        dtypes: of the copies, one for each position.
    """

    def __init__(self, weights: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        self._positions = tuple(weights)
        self._dtypes = tuple(dtypes)
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

    def _renew(self, weights: list[Tensor]) -> list[Tensor]:
        key = key_of(weights)
        healing = [_heals(weight) for weight in weights]
        # looked at before they are copied: a write in between is seen at the next call
        looks = [look_at(w, elements=not heals) for w, heals in zip(weights, healing, strict=True)]
        watch = Watch(weights, looks, OnDeath(self._found, key), healing)
        # an inference tensor could not be written to outside inference mode
        with torch.inference_mode(False), torch.no_grad():
            copies = [_copy_of(w, dtype) for w, dtype in zip(weights, self._dtypes, strict=True)]
            is_stale = [copy.look is not look for copy, look in zip(copies, looks, strict=True)]
            values = [copy.value for copy in copies]
            healed = self._healed(
                key,
                [*compress(weights, healing)],
                [*compress(values, healing)],
                [*compress(is_stale, healing)],
            )
            for weight, value, stale, heals in zip(weights, values, is_stale, healing, strict=True):
                if stale and not heals:
                    value.copy_(weight)
        for copy, look in zip(copies, looks, strict=True):
            copy.look = look
        watch.confirm(weights)
        self._found[key] = _Found(watch, values, healed)
        return values

    def _healed(
        self, key: Key, weights: Sequence[Tensor], copies: Sequence[Tensor], is_stale: Sequence[bool]
    ) -> HealedCopies | None:
        """The copies that heal themselves, made; as long as they lie where they did, the same ones."""
        if not weights:
            return None
        from amp_fx.weights.healing import HealedCopies  # imports triton

        found = self._found.get(key)
        if found is not None and found.healed is not None and found.healed.fits(weights, copies):
            found.healed.heal(is_stale)
            return found.healed
        healed = HealedCopies(weights, copies)
        healed.make()
        return healed


@functools.cache
def _triton_is_here() -> bool:
    return importlib.util.find_spec("triton") is not None


def _heals(weight: Tensor) -> bool:
    """True if its copies can heal themselves."""
    return weight.is_cuda and weight.dtype in _HEALED and is_dense(weight) and _triton_is_here()


def _copy_of(weight: Tensor, dtype: torch.dtype) -> _Copy:
    """The one copy of a weight, with whatever it holds: addresses stay as they are, for CUDA graphs."""
    # typed as if a default could only be None
    copies: dict[torch.dtype, _Copy] = _copies.setdefault(weight, {})  # pyright: ignore[reportAssignmentType]
    copy = copies.get(dtype)
    like = torch.empty_like(weight, dtype=dtype, device="meta")
    if copy is None or (copy.value.shape, copy.value.stride(), copy.value.device) != (
        like.shape,
        like.stride(),
        weight.device,
    ):
        copy = copies[dtype] = _Copy(torch.empty_like(weight, dtype=dtype, requires_grad=False))
    return copy
