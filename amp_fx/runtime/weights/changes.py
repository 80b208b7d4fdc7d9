"""How a changed weight is noticed, by one rule on all devices.

Nothing in PyTorch says that a weight was written to: fused optimizers and ``p.data.mul_()`` do not move its version,
``p.data = q`` keeps the version, numpy moves nothing. A weight counts as unchanged if all of this holds:

* it lies where it lay, and has the version that it had;
* since then no optimizer of ``torch.optim`` has stepped with it, no graph with gradients was called with it, and
  :func:`touch` was not;
* a sample of its elements has the bits that it had, see :func:`sampled_offsets`.

No weight is kept alive, and none has a weak reference: programs may swap their tensors (``torch.utils.swap_tensors``).
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import compress
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.optim.optimizer import Optimizer

from amp_fx._torch import AFTER_STEP, FakeTensor, is_wrapper, words_of_memory
from amp_fx.errors import WeightsError
from amp_fx.runtime.state import cache_results

logger = logging.getLogger(__name__)

#: of a tensor; without a loop of Python when mapped
address: Callable[[Tensor], int] = Tensor.data_ptr
_version: Callable[[Tensor], int] = attrgetter("_version")

#: sampled elements of a weight
SAMPLED = 32
#: where in its piece of a weight each of these lies: 0 is the first element, 1 the first of the next piece
_PLACES = np.random.default_rng(0).random(SAMPLED)
#: bytes that are compared at a time
_WORD = 8


def sampled_offsets(weight: Tensor) -> NDArray[np.int64]:
    """How many elements of memory after the first each sampled element lies; all of a weight of up to 32 elements.

    There is one at a fixed pseudo-random place in each of 32 equal pieces of the weight. A write to a fraction ``f`` of
    the elements, wherever they are, is missed with a probability of the product of ``1 - f_i`` over the pieces, which
    is at most ``(1 - f) ** 32``: 2e-10 for half of the elements, 1e-4 for a quarter, 3 % for a tenth. Each
    sampled element is a cache miss of each call, which models with many small weights would notice.
    """
    count = weight.numel()
    positions = np.arange(count)
    if count > SAMPLED:
        positions = ((np.arange(SAMPLED) + _PLACES) * (count / SAMPLED)).astype(np.int64)
    if weight.is_contiguous():
        return positions
    steps = zip(np.unravel_index(positions, weight.shape), weight.stride(), strict=True)
    return np.sum([at * step for at, step in steps], axis=0)


class Fingerprint:
    """The state of some weights at one moment.

    Args:
        weights: plain tensors.
        sampled: those of which a sample is compared here; the samples of the others are compared on their device.
    """

    def __init__(self, weights: Sequence[Tensor], sampled: Sequence[Tensor]) -> None:
        # before all else: what happens from now on counts
        self._events = _events.count
        self._writes = [(writes := _writes_to(weight), writes.count) for weight in weights]
        self._have_versions = [not weight.is_inference() for weight in weights]
        if not all(self._have_versions):
            _say_versions_are_missing()
        self._marks = self._marks_of(weights)
        by_device: dict[torch.device, list[Tensor]] = {}
        for weight in sampled:
            by_device.setdefault(weight.device, []).append(weight)
        self._samples = [*map(_Sample, by_device.values())]

    def matches(self, weights: Sequence[Tensor]) -> bool:
        """True if nothing says that one was written to since.

        Args:
            weights: those of the fingerprint.
        """
        # in each call, and without loops of Python, which would take longer than what they look at
        events = _events.count
        if self._events != events:
            if any(writes.count != count for writes, count in self._writes):
                return False
            self._events = events
        # at the same addresses, what is sampled is still the weights'
        return self._marks == self._marks_of(weights) and all(sample.is_same() for sample in self._samples)

    def _marks_of(self, weights: Sequence[Tensor]) -> list[int]:
        return [*map(address, weights), *map(_version, compress(weights, self._have_versions))]


@cache_results()  # so that it is said once
def _say_versions_are_missing() -> None:
    logger.warning(
        "weights that were made under torch.inference_mode have no version counter: a write to less than half of such "
        "a weight may not be seen. Make the model outside of it, or call amp_fx.weights.touch(parameter) after a write."
    )


class _Sample:
    """The sampled elements of weights on one device, read and compared at once, as words of its memory."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        device = weights[0].device
        words = np.concatenate([*map(_words, weights)])
        first = int(words.min()) if len(words) else 0
        count = int(words.max()) + 1 - first if len(words) else 0
        # most of what lies between the weights is not theirs, and not read
        self._memory = words_of_memory(first * _WORD, count, device)
        self._words = torch.from_numpy(words - first).to(device)
        self._seen = self._read()

    def _read(self) -> Tensor:
        return self._memory.index_select(0, self._words)

    def is_same(self) -> bool:
        return torch.equal(self._read(), self._seen)


def _words(weight: Tensor) -> NDArray[np.int64]:
    """The words of memory in which its sampled elements lie."""
    value = torch.view_as_real(weight.detach()) if weight.is_complex() else weight
    return (value.data_ptr() + sampled_offsets(value) * value.element_size()) // _WORD


# ---- what is told ----


class _Writes:
    """How often one weight may have been written to, as optimizers, graphs with gradients and users tell."""

    #: where it lay, and in which memory, when there was last a fingerprint of it; and how often
    address, storage, count = 0, 0, 0


#: of any weight
_events = _Writes()
_lock = threading.RLock()

#: by the ids of weights, as long as there are fingerprints of them. The id of a weight that has died may be another's
_told: weakref.WeakValueDictionary[int, _Writes] = weakref.WeakValueDictionary()


def _writes_to(weight: Tensor) -> _Writes:
    AFTER_STEP.listen(_stepped)
    with _lock:
        writes = _told.get(id(weight))
        if writes is None:
            writes = _told[id(weight)] = _Writes()
        writes.address, writes.storage = weight.data_ptr(), weight.untyped_storage().data_ptr()
    return writes


def addresses_left(weights: Iterable[Tensor]) -> set[int]:
    """Where those weights lay that lie elsewhere than when there was last a fingerprint of them."""
    known = [(writes.address, weight) for weight in weights if (writes := _told.get(id(weight))) is not None]
    return {before for before, weight in known if before != weight.data_ptr()}


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
    if not any(is_wrapper(each) or each.layout is not torch.strided for each in parameters):
        touched = storages(parameters)
        _tell(writes for writes in list(_told.values()) if writes.storage in touched)
    else:
        # these have no memory of their own, and it is not known where sharded weights are gathered
        forget()


def forget() -> None:
    """All weights count as written to."""
    _tell(list(_told.values()))


def _tell(written: Iterable[_Writes]) -> None:
    with _lock:
        for writes in written:
            writes.count += 1
        # last: who sees this sees the others
        _events.count += 1


def counting(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A graph with gradients: whatever trains the weights that it is called with may write to them afterwards."""

    def run(*args: Any) -> Any:
        # nearly always there are none
        if _told:
            trained = [arg for arg in args if id(arg) in _told and getattr(arg, "requires_grad", False)]
            if trained:
                _tell(map(_writes_to, trained))
        return compiled(*args)

    return run


def _stepped(optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """After a step all weights of this optimizer count as written to, others do not."""
    if not _told:
        AFTER_STEP.leave(_stepped)
        return
    parameters = [
        p for group in optimizer.param_groups for p in group["params"] if not isinstance(p, FakeTensor)
    ]
    # gradients may be gone by now
    touch(*(p for p in parameters if p.requires_grad or p.grad is not None))


def storages(tensors: Iterable[Tensor]) -> set[int]:
    """Addresses of the memory in which plain tensors lie."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}
