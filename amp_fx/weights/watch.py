"""How a changed weight is noticed.

Nothing in PyTorch tells that a weight was written to: fused optimizers and ``p.data.mul_()`` do not move its version,
``p.data = q`` keeps the version, numpy moves nothing. So in each call a weight counts as unchanged only if all of this
holds:

* it is the same object, at the same address, with the same version, and its memory was not freed in between;
* no optimizer of ``torch.optim`` has made a step with it, and no graph with gradients has been called with it;
  after the latter all its elements are compared, as whatever trains it may write to a few;
* a sample of its elements has the same bits: see :mod:`amp_fx.weights.memory` for what that cannot miss;
* so has the part of all elements whose turn it is.

What makes many copies of weights that have not changed is avoided: events are those of single weights. No weight is
kept alive, and none has a weak reference: programs may swap their tensors (``torch.utils.swap_tensors``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_fx._torch import AFTER_STEP, is_wrapper, storage_ref
from amp_fx.errors import WeightsError
from amp_fx.weights.by_weight import ByWeight
from amp_fx.weights.memory import Elements, Glance

__all__ = [
    "ADDRESS",
    "VERSION",
    "Events",
    "Key",
    "Look",
    "OnDeath",
    "Watch",
    "counting",
    "events",
    "forget",
    "key_of",
    "look_at",
    "touch",
]

#: of a tensor; without a loop of Python when mapped
ADDRESS: Callable[[Tensor], int] = Tensor.data_ptr
VERSION: Callable[[Tensor], int] = attrgetter("_version")

#: which weights, in which order; while somebody watches them they live, and no other tensor has their ids
Key = tuple[int, ...]


class Look:
    """What one weight looked like at one moment. Whatever is made from it then, belongs to this object.

    Args:
        weight: a plain tensor.
        elements: False: somebody else looks at its elements.
    """

    def __init__(self, weight: Tensor, *, elements: bool) -> None:
        #: the weight may have been written to
        self.is_stale = False
        #: how often some of its elements may have been written to, and how many of these times were looked into
        self.doubts = self._settled = 0
        self.marks, self.lies = _marks(weight), _lies(weight)
        self.elements = Elements(weight) if elements else None
        self.storage = weight.untyped_storage().data_ptr()

    def holds(self, weight: Tensor) -> bool:
        """True if the weight still looks so. Not in every call: this takes longer than :class:`Watch`."""
        if self.is_stale or self.marks != _marks(weight) or self.lies != _lies(weight):
            return False
        if self.elements is None:
            # its elements are looked at elsewhere; but who is in doubt has to make sure
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


@dataclass
class Events:
    """Weights that are watched, and what happens to them."""

    #: events so far, of any of them
    count: int = 0
    looks: ByWeight[Look] = field(default_factory=ByWeight)

    def register(self, weight: Tensor, look: Look) -> None:
        """From now on, this is what the weight looks like."""
        AFTER_STEP.listen(_stepped)
        before = self.looks.put(weight, look)
        if before is not None:
            self.is_stale(before)

    def is_stale(self, look: Look) -> None:
        """What was made from this look must not be used any more."""
        # in this order: who counts after this sees it
        look.is_stale = True
        self.count += 1

    def is_doubtful(self, look: Look) -> None:
        """All elements are to be compared before what was made from this look is used again."""
        look.doubts += 1
        self.count += 1

    def in_storages(self, storages: set[int]) -> list[Look]:
        """Those that lie there."""
        return [look for look in self.looks.values() if look.storage in storages]


events = Events()


def look_at(weight: Tensor, *, elements: bool = True) -> Look:
    """What a weight looks like now; the same object as before if that has not changed.

    Args:
        weight: a plain tensor.
        elements: False: somebody else looks at its elements.
    """
    look = events.looks.get(id(weight))
    if look is None or (elements and look.elements is None) or not look.holds(weight):
        look = Look(weight, elements=elements)
        events.register(weight, look)
    return look


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
    for look in events.in_storages(_storages(parameters)):
        events.is_stale(look)


def forget() -> None:
    """All weights count as written to."""
    for look in events.looks.values():
        events.is_stale(look)


def counting(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A graph with gradients: whatever trains the weights that it is called with may write to them afterwards."""

    def run(*args: Any) -> Any:
        # nearly always there are none
        for arg in args if events.looks.has_any(map(id, args)) else ():
            look = events.looks.get(id(arg))
            if look is not None and getattr(arg, "requires_grad", False):
                events.is_doubtful(look)
        return compiled(*args)

    return run


def _stepped(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """After a step: the weights of this optimizer have changed, others have not."""
    if not events.looks:
        AFTER_STEP.leave(_stepped)
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    plain = [*filter(_is_plain, parameters)]
    changed = _storages([p for p in plain if p.grad is not None])
    # without a gradient, or without one any more; of sharded parameters it is not known where they are gathered
    perhaps = _storages(plain) if len(plain) == len(parameters) else None
    for look in events.looks.values():
        if look.storage in changed:
            events.is_stale(look)
        elif perhaps is None or look.storage in perhaps:
            events.is_doubtful(look)


class Watch:
    """Tells in little time whether some weights still look as they did.

    Args:
        weights: plain tensors.
        looks: one for each.
        on_death: called when the memory of one of them is freed. The watch must be dropped then.
        healed: those whose elements somebody else looks at.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        looks: Sequence[Look],
        on_death: Callable[[object], None],
        healed: Sequence[bool] | None = None,
    ) -> None:
        self.looks = list(looks)
        self._count = events.count
        self.refs = [storage_ref(w, on_death) for w in weights]
        # inference tensors have none
        self._have_versions = [not w.is_inference() for w in weights]
        addresses = [look.marks[0] for look in looks]
        self._marks = [*addresses, *(look.marks[1] for look in compress(looks, self._have_versions))]
        is_healed = healed or [False] * len(self.looks)
        self._elements = {
            look.elements: look
            for look, elsewhere in zip(looks, is_healed, strict=True)
            if look.elements is not None and not elsewhere
        }
        self._glance = Glance(list(self._elements))
        # a look of before may have become stale while this was made
        self._is_alarmed = any(look.is_stale or look.is_doubtful for look in looks)

    def is_current(self, weights: Sequence[Tensor]) -> bool:
        """True if nothing says that one was written to.

        Args:
            weights: those of the watch.
        """
        # in each call, and without loops of Python, which would take longer than what they look at
        if self._count != events.count or self._is_alarmed:
            count = events.count
            if any(look.is_stale or look.is_doubtful for look in self.looks):
                return False
            self._count, self._is_alarmed = count, False
        if [*map(ADDRESS, weights), *map(VERSION, compress(weights, self._have_versions))] != self._marks:
            return False
        # the addresses are those of the watch, so what lies there is still the weights'
        if not self._glance.is_same():
            return False
        changed = self._glance.changed()
        if changed is not None:
            events.is_stale(self._elements[changed])
        return changed is None

    def has_moved(self, weights: Sequence[Tensor]) -> bool:
        """True if one has got other memory."""
        return [*map(ADDRESS, weights)] != self._marks[: len(weights)]

    def confirm(self, weights: Sequence[Tensor]) -> None:
        """After something was made of them: had a write begun meanwhile, that may be torn, even if it is undone."""
        for weight, look in zip(weights, self.looks, strict=True):
            if not look.holds(weight):
                events.is_stale(look)


class OnDeath:
    """Drops an entry of a table when the memory of a weight of it is freed."""

    def __init__(self, table: dict[Key, Any], key: Key) -> None:
        self._table, self._key = table, key

    def __call__(self, _: object) -> None:
        """The entry goes, and with it the watch that called."""
        self._table.pop(self._key, None)


def key_of(weights: Sequence[Tensor]) -> Key:
    """What stands for some weights in a table."""
    return (*map(id, weights),)


def _marks(weight: Tensor) -> tuple[int, int]:
    """Address and version; inference tensors have no version."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version


def _lies(weight: Tensor) -> tuple[object, ...]:
    """How it lies there."""
    return weight.shape, weight.stride(), weight.dtype


def _is_plain(parameter: Tensor) -> bool:
    """False for subclasses of tensors that have no memory of their own, and for sparse ones."""
    return not is_wrapper(parameter) and parameter.layout is torch.strided


def _storages(parameters: Sequence[Tensor]) -> set[int]:
    """Where they lie."""
    return {parameter.untyped_storage().data_ptr() for parameter in parameters}
