"""Low copies of weights in graphs with gradients, cast once for all micro-batches of an optimizer's step.

What a backward has saved must stay as it was. On a CPU a copy is never written to: a weight that has changed gets
another one. A copy counts as current only if all of this holds:

* the weight is the same object, at the same address, with the same version;
* it has a gradient. Without one, an optimizer has made its step, or none has begun to accumulate: the weight is cast
  anew. Weights that are not trained need none;
* no optimizer of ``torch.optim`` has made a step with it, and nobody has said that it was written to;
* a sample of its elements has the same bits: see :mod:`amp_fx.weights.memory` for what that cannot miss;
* the graph has read it in fewer than :data:`LIFETIME` calls.

That is less than what graphs without gradients look at, since a copy lives for a few calls, not for thousands.

On a GPU copies heal themselves, in place, as those of graphs without gradients do (:mod:`amp_fx.weights.healing`), as
long as nobody else has them; while a backward has, weights are cast for the call alone.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from amp_fx._torch import in_nested_transform, on_default_stream
from amp_fx.weights.copies import OF_TRAINING, LowCopies, heals
from amp_fx.weights.forms import Cast
from amp_fx.weights.memory import Sample, read_together
from amp_fx.weights.watch import ADDRESS, VERSION, Key, Look, OnDeath, in_training, key_of

__all__ = ["LIFETIME", "StepCopies", "drop", "lent_bytes"]

#: calls of one graph after which its weights are cast anew, whatever they look like
LIFETIME = 64

_GRAD: Callable[[Tensor], Tensor | None] = attrgetter("grad")

_lock = threading.RLock()


@dataclass(eq=False)
class _Lent:
    """The copies of one weight.

    Attributes:
        look: what they were made from.
        lies: how the weight lay then.
        sample: of its elements, then.
        values: by dtype.
    """

    look: Look
    lies: tuple[object, ...]
    sample: Sample
    values: dict[torch.dtype, Tensor] = field(default_factory=dict)

    def holds(self, weight: Tensor) -> bool:
        """True if nothing says that the weight has changed."""
        return (
            not (self.look.is_stale or self.look.is_doubtful)
            and not (weight.requires_grad and weight.grad is None)
            and self.is_same(weight)
        )

    def is_same(self, weight: Tensor) -> bool:
        """True if the weight lies where it did, as it did, and has the same version and sample."""
        return (
            self.lies == _lies(weight)
            and self.look.marks == (weight.data_ptr(), weight._version)
            and self.sample.sample_is_same()
        )

    def of(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The copy in a dtype."""
        if dtype not in self.values:
            self.values[dtype] = _narrowed(weight, dtype)
        return self.values[dtype]


#: shared by all graphs that read the weight
_lent: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def drop() -> None:
    """Drops all copies; what a backward has saved lives on."""
    with _lock:
        _lent.clear()


def lent_bytes() -> int:
    """Bytes of all copies of weights that are alive."""
    with _lock:
        return sum(value.nbytes for lent in _lent.values() for value in lent.values.values())


@dataclass
class _Found:
    """The copies of one model's weights, and in little time whether they are current.

    Attributes:
        copies: one for each weight.
        lent: what they belong to.
        refs: of the weights; they drop this when one dies.
        count: events that have been looked at.
        marks: addresses of the weights, then their versions.
        read: all samples, now.
        seen: all samples, when the copies were made.
        trained: for each weight, whether it has to have a gradient.
        left: calls.
    """

    copies: list[Tensor]
    lent: list[_Lent]
    refs: list[weakref.ref[Tensor]]
    count: int
    marks: list[int]
    read: Callable[[], bytes]
    seen: bytes
    trained: list[bool]
    left: int = LIFETIME - 1

    def is_current(self, weights: Sequence[Tensor]) -> bool:
        """True if nothing says that one of them has changed. Counts the call."""
        # in each call, and without loops of Python
        self.left -= 1
        if self.count != in_training.count:
            count = in_training.count
            if any(lent.look.is_stale or lent.look.is_doubtful for lent in self.lent):
                return False
            self.count = count
        return (
            self.left >= 0
            and None not in map(_GRAD, compress(weights, self.trained))
            and [*map(ADDRESS, weights), *map(VERSION, weights)] == self.marks
            # the addresses are those of the samples, so what lies there is still the weights'
            and self.read() == self.seen
        )


class StepCopies:
    """The copies that one compiled graph is called with.

    Args:
        weights: positions among the graph's arguments.
        dtypes: of the copies, one for each position.
    """

    def __init__(self, weights: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
        self._positions = tuple(weights)
        self._dtypes = tuple(dtypes)
        self._healed = LowCopies(weights, [(Cast(dtype), 0) for dtype in dtypes], OF_TRAINING)
        # models of one class share their graphs
        self._found: dict[Key, _Found] = {}

    def of(self, args: Sequence[Tensor]) -> list[Tensor]:
        """The copies for a call, made or made again if necessary.

        Args:
            args: of the graph.
        """
        weights = [args[position] for position in self._positions]
        if _are_plain(weights):
            if _are_on_host(weights):
                return self._on_host(weights)
            if self._may_heal(weights):
                return self._healed.of(args)
        with torch.no_grad():
            return [_narrowed(w, dtype) for w, dtype in zip(weights, self._dtypes, strict=True)]

    def _may_heal(self, weights: Sequence[Tensor]) -> bool:
        """True if copies may be written to in place; those of weights without gradients are going to be."""
        # in the order of one stream, a backward that has ended has read them
        if not all(heals(weight) and on_default_stream(weight.device) for weight in weights):
            return False
        if any(map(OF_TRAINING.is_held, weights)):
            return False
        for weight in weights:
            look = in_training.looks.get(id(weight))
            if look is not None and weight.requires_grad and weight.grad is None:
                in_training.is_stale(look)
        return True

    def _on_host(self, weights: list[Tensor]) -> list[Tensor]:
        found = self._found.get(key_of(weights))
        if found is not None and found.is_current(weights):
            return found.copies
        with _lock, torch.inference_mode(False), torch.no_grad():
            return self._renew(weights)

    def _renew(self, weights: list[Tensor]) -> list[Tensor]:
        key = key_of(weights)
        # before others are made: there are never two whole sets of them
        before = self._found.pop(key, None)
        is_old = before is not None and before.left < 0
        del before
        count = in_training.count
        # what is looked at once is cast once, however often the graph reads it
        lent = {id(weight): _lent_of(weight, is_old) for weight in weights}
        copies = [lent[id(w)].of(w, dtype) for w, dtype in zip(weights, self._dtypes, strict=True)]
        for weight in weights:
            # had a write begun meanwhile, that may be torn, even if it is undone
            if not lent[id(weight)].is_same(weight):
                in_training.is_stale(lent[id(weight)].look)
        all_lent = [*lent.values()]
        read, seen = read_together([each.sample for each in all_lent])
        addresses = [lent[id(weight)].look.marks[0] for weight in weights]
        versions = [lent[id(weight)].look.marks[1] for weight in weights]
        on_death = OnDeath(self._found, key)
        self._found[key] = _Found(
            copies,
            all_lent,
            [weakref.ref(weight, on_death) for weight in weights],
            # of before: what was heard since then is looked at in the next call
            count,
            [*addresses, *versions],
            read,
            seen,
            [weight.requires_grad for weight in weights],
        )
        return copies


def _lent_of(weight: Tensor, is_old: bool) -> _Lent:
    """What is lent of a weight as it is now."""
    lent: _Lent | None = _lent.get(weight)
    if lent is not None and not is_old and lent.holds(weight):
        return lent
    look = Look(weight, elements=False)
    lies = _lies(weight)
    if lent is not None and lent.lies == lies and lent.look.marks[0] == look.marks[0]:
        sample = lent.sample.again(weight)
    else:
        sample = Sample(weight)
    # looked at before it is cast: a write in between is seen at the next call
    in_training.register(weight, look)
    lent = _lent[weight] = _Lent(look, lies, sample)
    return lent


def _are_on_host(weights: Sequence[Tensor]) -> bool:
    return all(weight.is_cpu for weight in weights)


def _narrowed(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.detach().to(dtype)


def _lies(weight: Tensor) -> tuple[object, ...]:
    return weight.shape, weight.stride(), weight.dtype, weight.device


def _are_plain(weights: Sequence[Tensor]) -> bool:
    """False where values cannot be looked at, or are another's business: fake ones, subclasses, inside transforms."""
    return (
        {*map(type, weights)} == {nn.Parameter}
        and not in_nested_transform()
        and not any(map(Tensor.is_inference, weights))
    )
