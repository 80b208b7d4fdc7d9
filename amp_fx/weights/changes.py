"""How a changed weight is noticed.

Nothing in PyTorch tells that a weight was written to: fused optimizers and ``p.data.mul_()`` do not move its version,
``p.data = q`` keeps the version, numpy moves nothing. So in each call a weight counts as unchanged only if all of this
holds:

* it is the same object, at the same address, with the same version, and its memory was not freed in between;
* no optimizer of ``torch.optim`` has made a step with it, and no graph with gradients has been called with it;
  after the latter all its elements are compared, as whatever trains it may write to a few;
* a sample of its elements has the same bits: see :mod:`amp_fx.weights.elements` for what that cannot miss;
* so has the part of all elements whose turn it is.

What makes many copies of weights that have not changed is avoided: changes are those of single weights. No weight is
kept alive, and none has a weak reference: programs may swap their tensors (``torch.utils.swap_tensors``).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_fx._torch import AFTER_STEP, StorageRef, is_wrapper, storage_ref
from amp_fx.errors import WeightsError
from amp_fx.weights.elements import Elements, Samples

__all__ = ["Check", "State", "counting", "forget", "state_of", "states", "touch"]

#: of a tensor; without a loop of Python when mapped
_ADDRESS: Callable[[Tensor], int] = Tensor.data_ptr
_VERSION: Callable[[Tensor], int] = attrgetter("_version")


class State:
    """What one weight was like at one moment. Whatever is made from it then, belongs to this object.

    Args:
        weight: a plain tensor.
        elements: False: its elements are compared elsewhere.

    Attributes:
        is_stale: the weight may have been written to since.
        doubts: how often some of its elements may have been written to since.
    """

    def __init__(self, weight: Tensor, *, elements: bool) -> None:
        self.is_stale = False
        #: and how many of these times were looked into
        self.doubts = self._settled = 0
        self.marks, self._layout = _marks(weight), _layout(weight)
        self.elements = Elements(weight) if elements else None
        self.storage = weight.untyped_storage().data_ptr()

    def holds(self, weight: Tensor) -> bool:
        """True if the weight is still like that. Not in every call: this takes longer than :class:`Check`."""
        if self.is_stale or self.marks != _marks(weight) or self._layout != _layout(weight):
            return False
        if self.elements is None:
            # who is in doubt has to make sure
            return not self.is_doubtful
        doubts = self.doubts
        if not (self.elements.are_same() if self.is_doubtful else self.elements.sample_is_same()):
            return False
        self._settled = doubts
        return True

    @property
    def is_doubtful(self) -> bool:
        """True if some of its elements may have been written to."""
        return self.doubts != self._settled


class States:
    """The states of weights of which something is made, as long as the memory of these lives.

    A weight that has died may have lain in memory that lives on. Then its id may be another's: whoever gets a state
    here makes sure that it holds.

    Attributes:
        changes: how often any of them may have changed.
    """

    def __init__(self) -> None:
        self.changes = 0
        #: by the ids of weights
        self._rows: dict[int, tuple[State, StorageRef]] = {}
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[State]:
        return iter([state for state, _ in list(self._rows.values())])

    def has_any(self, weights: Iterable[object]) -> bool:
        """True if there is a state of one of these; says in little time that there is not."""
        return bool(self._rows) and not self._rows.keys().isdisjoint(map(id, weights))

    def of(self, weight: object) -> State | None:
        """The last state of a weight."""
        row = self._rows.get(id(weight))
        return None if row is None else row[0]

    def register(self, weight: Tensor, state: State) -> None:
        """From now on, this is the state of the weight."""
        AFTER_STEP.listen(_stepped)
        key = id(weight)
        row = state, storage_ref(weight, lambda ref: self._freed(key, ref))
        # two threads may look at a weight at the same time
        with self._lock:
            before = self._rows.get(key)
            self._rows[key] = row
        if before is not None:
            self.mark_stale(before[0])

    def _freed(self, key: int, ref: weakref.ref[Any]) -> None:
        row = self._rows.get(key)
        # a weight that has got other memory has another row
        if row is not None and row[1] is ref:
            del self._rows[key]

    def mark_stale(self, state: State) -> None:
        """What was made from this state must not be used any more."""
        # in this order: who counts after this sees it
        state.is_stale = True
        self.changes += 1

    def mark_doubtful(self, state: State) -> None:
        """All elements are to be compared before what was made from this state is used again."""
        state.doubts += 1
        self.changes += 1


states = States()


def state_of(weight: Tensor, *, elements: bool = True) -> State:
    """The state of a weight; the same object as before if the weight has not changed.

    Args:
        weight: a plain tensor.
        elements: False: its elements are compared elsewhere.
    """
    state = states.of(weight)
    if state is None or (elements and state.elements is None) or not state.holds(weight):
        state = State(weight, elements=elements)
        states.register(weight, state)
    return state


def touch(*parameters: Tensor) -> None:
    """Says that weights were written to: what was made from them is made again before it is used again.

    Args:
        parameters: of a module, or tensors in the same memory.

    Raises:
        WeightsError: one of them is no tensor.
    """
    for parameter in parameters:
        if not isinstance(parameter, Tensor):
            raise WeightsError(
                f"touch() takes parameters and other tensors; got {type(parameter).__name__}. For all of a model: "
                "touch(*model.parameters())."
            )
    if not all(map(_is_plain, parameters)):
        # where the memory of these is, is not known here
        forget()
        return
    storages = _storages(parameters)
    for state in states:
        if state.storage in storages:
            states.mark_stale(state)


def forget() -> None:
    """All weights count as written to."""
    for state in states:
        states.mark_stale(state)


def counting(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A graph with gradients: whatever trains the weights that it is called with may write to them afterwards."""

    def run(*args: Any) -> Any:
        # nearly always there are none
        for arg in args if states.has_any(args) else ():
            state = states.of(arg)
            if state is not None and getattr(arg, "requires_grad", False):
                states.mark_doubtful(state)
        return compiled(*args)

    return run


def _stepped(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """After a step: the weights of this optimizer have changed, others have not."""
    if not states:
        AFTER_STEP.leave(_stepped)
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = [*filter(_is_plain, parameters)]
    changed = _storages([p for p in plain if p.grad is not None])
    # without a gradient, or without one any more; of sharded parameters it is not known where they are gathered
    perhaps = _storages(plain) if len(plain) == len(parameters) else None
    for state in states:
        if state.storage in changed:
            states.mark_stale(state)
        elif perhaps is None or state.storage in perhaps:
            states.mark_doubtful(state)


class Check:
    """Tells in little time whether some weights are still in the states in which they were.

    Args:
        weights: plain tensors.
        seen: the state of each.
        freed: called when the memory of one of them is freed. The check must be dropped then.
    """

    def __init__(
        self, weights: Sequence[Tensor], seen: Sequence[State], freed: Callable[[object], None]
    ) -> None:
        self.seen = list(seen)
        self._changes = states.changes
        self._refs = [storage_ref(w, freed) for w in weights]
        # inference tensors have none
        self._have_versions = [not w.is_inference() for w in weights]
        versions = [state.marks[1] for state in compress(seen, self._have_versions)]
        self._marks = [*(state.marks[0] for state in seen), *versions]
        self._elements = {state.elements: state for state in seen if state.elements is not None}
        self._comparison = Samples(list(self._elements))
        # a state of before may have become stale while this was made
        self._is_alarmed = any(state.is_stale or state.is_doubtful for state in seen)

    def is_current(self, weights: Sequence[Tensor]) -> bool:
        """True if nothing says that one was written to.

        Args:
            weights: those of the check.
        """
        # in each call, and without loops of Python, which would take longer than what they look at
        if self._changes != states.changes or self._is_alarmed:
            changes = states.changes
            if any(state.is_stale or state.is_doubtful for state in self.seen):
                return False
            self._changes, self._is_alarmed = changes, False
        if [*map(_ADDRESS, weights), *map(_VERSION, compress(weights, self._have_versions))] != self._marks:
            return False
        # the addresses are those of the check, so what lies there is still the weights'
        if not self._comparison.is_same():
            return False
        changed = self._comparison.changed()
        if changed is not None:
            states.mark_stale(self._elements[changed])
        return changed is None

    def moved(self, weights: Sequence[Tensor]) -> list[State]:
        """The states of those that have got other memory."""
        return [s for w, s in zip(weights, self.seen, strict=True) if w.data_ptr() != s.marks[0]]

    def confirm(self, weights: Sequence[Tensor]) -> None:
        """After something was made of them: had a write begun meanwhile, that may be torn, even if it is undone."""
        for weight, state in zip(weights, self.seen, strict=True):
            if not state.holds(weight):
                states.mark_stale(state)


def _marks(weight: Tensor) -> tuple[int, int]:
    """Address and version; inference tensors have no version."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _layout(weight: Tensor) -> tuple[object, ...]:
    """How it is laid out there."""
    return weight.shape, weight.stride(), weight.dtype


def _is_plain(parameter: Tensor) -> bool:
    """False for subclasses of tensors that have no memory of their own, and for sparse ones."""
    return not is_wrapper(parameter) and parameter.layout is torch.strided


def _storages(parameters: Sequence[Tensor]) -> set[int]:
    """Where they lie."""
    return {parameter.untyped_storage().data_ptr() for parameter in parameters}
