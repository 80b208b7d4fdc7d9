"""Values that are made of weights: one for each recipe and weight, whichever graphs read it.

What two threads want at the same time, one makes and the other waits for: if both made it, both would take the memory.
But nobody waits who makes something, nor forever: such a thread makes a value of its own. So it does not matter what
runs meanwhile: a mode of the program's may call other graphs, and Dynamo may compile.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from amp_fx._torch import packed_memory
from amp_fx.weights.changes import State, state_of
from amp_fx.weights.recipes import CopyRecipe, Recipe

__all__ = ["Derived", "derived_of", "held_bytes"]

#: held while something is looked up or noted, never while anything is made; a finalizer may come in between
_lock = threading.RLock()


class _Making(threading.local):
    """How many values this thread is making."""

    count = 0


_making = _Making()

#: seconds after which a thread makes a value of its own: what another makes may wait for a lock that this thread has
_PATIENCE = 60.0


class Derived:
    """A value that is made of weights by a recipe.

    Args:
        recipe: makes it.

    Attributes:
        tensors: of the value. They stay where they are, for CUDA graphs.
        states: of the weights, when it was made; empty: not yet, or it is being made.
    """

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.tensors: tuple[Tensor, ...] = ()
        self.states: tuple[State, ...] = ()
        self._made: threading.Event | None = None

    def bring(self, weights: Sequence[Tensor]) -> tuple[Derived, tuple[State, ...]]:
        """Makes the value unless the weights are as they were.

        Args:
            weights: those it is of.

        Returns:
            Where the value is, and the states of the weights that it was made from.
        """
        if not self._take_turn():
            return Derived(self._recipe).bring(weights)
        try:
            # looked at before: a write in between is seen at the next call
            states = (*map(state_of, weights),)
            if self.states != states:
                self.states = ()
                with torch.inference_mode(False), torch.no_grad():
                    self.tensors = self._recipe.make(weights, self.tensors)
                self.states = states
            return self, states
        finally:
            self._leave_turn()

    def place(self, weight: Tensor, recipe: CopyRecipe) -> None:
        """Makes room for a copy that a kernel is going to write."""
        with torch.inference_mode(False):
            tensors = recipe.empty(weight)
        with _lock:
            self.tensors = self.tensors or tensors

    def _take_turn(self) -> bool:
        """Waits until nobody makes the value; False if this thread cannot wait."""
        while True:
            with _lock:
                made = self._made
                if made is None:
                    self._made = threading.Event()
                    _making.count += 1
                    return True
            if _making.count or not made.wait(_PATIENCE):
                return False

    def _leave_turn(self) -> None:
        with _lock:
            made, self._made = self._made, None
        _making.count -= 1
        if made is not None:
            made.set()


#: as long as a graph has them
_derived: weakref.WeakValueDictionary[tuple[object, ...], Derived] = weakref.WeakValueDictionary()


def derived_of(recipe: Recipe, weights: Sequence[Tensor]) -> Derived:
    """The one value of weights by a recipe, with whatever it holds."""
    key = recipe, *((w.data_ptr(), w.shape, w.stride(), w.dtype, w.device) for w in weights)
    with _lock:
        derived = _derived.get(key)
        if derived is None:
            derived = _derived[key] = Derived(recipe)
    return derived


def held_bytes() -> int:
    """Bytes of all that is made of weights and alive, without what lies in the memory of a weight."""
    with _lock:
        alive = list(_derived.values())
    of_weights = {state.storage for derived in alive for state in derived.states}
    memory = dict(_memory(tensor) for derived in alive for tensor in derived.tensors)
    return sum(size for address, size in memory.items() if address not in of_weights)


def _memory(tensor: Tensor) -> tuple[int, int]:
    """Address and bytes."""
    if tensor.is_mkldnn:
        return packed_memory(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()
