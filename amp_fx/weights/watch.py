"""How a changed weight is noticed.

Nothing in PyTorch tells that a weight was written to: fused optimizers and ``p.data.mul_()`` do not move its version,
``p.data = q`` keeps the version, numpy moves nothing. So a weight counts as unchanged only if all of this holds:

* it is the same object, at the same address, with the same version;
* no optimizer of ``torch.optim`` has made a step, and no graph with gradients has been called;
* a sample of its elements has the same bits. Writes to the whole weight change the sample, whatever makes them.

What this cannot see is a write to a few elements through ``.data`` or numpy. After one, call
:func:`amp_fx.weights.clear`. Nor does it see another thread's writes through ``.data`` that begin and are undone while
copies are being made.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import compress
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["OnDeath", "Watch", "advance", "counting", "is_dense"]

#: sampled elements of a weight: lines spread over it, and neighbours in each, which share a line of the cache
_LINES, _RUN = 4, 8

#: integers by element size
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: of a tensor; without a loop of Python when mapped
_ADDRESS: Callable[[Tensor], int] = Tensor.data_ptr
_VERSION: Callable[[Tensor], int] = attrgetter("_version")

#: an epoch that does not come
_NEVER = -1

_lock = threading.Lock()


@dataclass
class _Epoch:
    """Counts the events after which any weight may have changed."""

    count: int = 0
    is_hooked: bool = False

    def hook(self) -> None:
        """Counts optimizer steps from now on."""
        with _lock:
            if not self.is_hooked:
                register_optimizer_step_post_hook(lambda *_: advance())
                self.is_hooked = True


_epoch = _Epoch()


def advance() -> None:
    """Any weight may have changed: copies are made again before they are used again."""
    _epoch.count += 1


def counting(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """A graph with gradients, each call of which may precede a change of weights."""

    def run(*args: Any) -> Any:
        advance()
        return compiled(*args)

    return run


class Watch:
    """What some weights looked like at one moment.

    Args:
        weights: plain tensors.
        on_death: called when one of them dies. The watch must be dropped then: it keeps their storages alive.
        healed: those of them whose elements somebody else looks at.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        on_death: Callable[[object], None],
        healed: Sequence[Tensor] = (),
    ) -> None:
        _epoch.hook()
        self._epoch = _epoch.count
        # while the watch is in use, they live, and no other tensor has their ids
        self._refs = [weakref.ref(w, on_death) for w in weights]
        self._ids = [*map(id, weights)]
        # inference tensors have none
        self._have_versions = [not w.is_inference() for w in weights]
        self._marks = self._marks_of(weights)
        others = set(map(id, healed))
        self._samples = [None if id(w) in others else _sample(w) for w in weights]
        samples = [sample for sample in self._samples if sample is not None]
        # read as plain memory where that is possible: a call of torch for each weight would cost more than it finds
        self._lines = [line for sample in samples if _is_plain_memory(sample) for line in _lines(sample)]
        groups: dict[tuple[torch.dtype, torch.device, int], list[Tensor]] = {}
        for sample in samples:
            if not _is_plain_memory(sample):
                groups.setdefault((sample.dtype, sample.device, sample.shape[1]), []).append(sample)
        self._groups = list(groups.values())
        self._seen_lines, self._seen_groups = self._read_lines(), self._read_groups()
        self._sums: list[Tensor] = []
        self._looks = [
            (id(w), w.data_ptr(), None if w.is_inference() else w._version, sample.tolist())
            if sample is not None and _is_plain_memory(sample)
            else None
            for w, sample in zip(weights, self._samples, strict=True)
        ]

    def confirm(self, weights: Sequence[Tensor]) -> None:
        """After copies were made: had a write begun meanwhile, they may be torn, even if it is undone later."""
        if not self._looks_same(weights):
            self._epoch = _NEVER

    def changed_since(self, earlier: Watch) -> list[bool]:
        """For each weight, whether it may be another than in an earlier watch over the same model."""
        if self._epoch != earlier._epoch:
            return [True] * len(self._looks)
        return [now is None or now != before for now, before in zip(self._looks, earlier._looks, strict=True)]

    def sum_up(self, weights: Sequence[Tensor]) -> None:
        """Notes a sum over all bits, for :meth:`is_current`. Reads every element."""
        self._sums = [_sum(w) for w in weights]

    def is_current(self, weights: Sequence[Tensor]) -> bool:
        """True if the weights are the same and nothing says that one was written to.

        After an event elsewhere, such as an optimizer's step, that is so only if all bits still have the sum noted.
        """
        epoch = _epoch.count
        if not self._looks_same(weights):
            return False
        if self._epoch != epoch:
            if not self._sums or any(_sum(w) != total for w, total in zip(weights, self._sums, strict=True)):
                return False
            self._epoch = epoch
        return True

    def _looks_same(self, weights: Sequence[Tensor]) -> bool:
        # in each call, and without loops of Python, which would take longer than what they look at
        if [*map(id, weights)] != self._ids or self._marks_of(weights) != self._marks:
            return False
        # the addresses are those of the watch, so what lies there is still the weights'
        if self._read_lines() != self._seen_lines:
            return False
        return all(map(torch.equal, self._read_groups(), self._seen_groups))

    def _marks_of(self, weights: Sequence[Tensor]) -> list[int]:
        """Addresses and versions."""
        return [*map(_ADDRESS, weights), *map(_VERSION, compress(weights, self._have_versions))]

    def _read_lines(self) -> bytes:
        """The samples in plain memory."""
        return b"".join(self._lines)

    def _read_groups(self) -> list[Tensor]:
        """The other samples, one tensor and so one comparison for each group."""
        return [torch.cat(group) for group in self._groups]


class OnDeath:
    """Drops an entry of a table when a weight of it dies."""

    def __init__(self, table: dict[int, Any], key: int) -> None:
        self._table, self._key = table, key

    def __call__(self, _: object) -> None:
        """The entry goes, and with it the watch that called."""
        self._table.pop(self._key, None)


def _sample(weight: Tensor) -> Tensor:
    """A view of some elements, as integers; two-dimensional."""
    value, count = _bits(weight), weight.numel()
    if not is_dense(value):
        # some row of it
        while value.ndim > 1:
            value = value[0]
        return value[:_RUN].unsqueeze(0)
    start, step = value.storage_offset(), (count - _RUN) // (_LINES - 1)
    if step < _RUN:
        return value.as_strided((1, count), (count, 1), start)
    sample = value.as_strided((_LINES, _RUN), (step, 1), start)
    if not sample.any():
        # zeros stay what they are under many writes: is there anything else?
        first = int((value.as_strided((count,), (1,), start) != 0).to(torch.uint8).argmax())
        sample = value.as_strided((1, _RUN), (_RUN, 1), start + min(first, count - _RUN))
    return sample


def _is_plain_memory(sample: Tensor) -> bool:
    return sample.device.type == "cpu" and sample.stride(1) == 1


def _lines(sample: Tensor) -> list[ctypes.Array[ctypes.c_char]]:
    """The rows of a sample as memory. Whoever reads them has to keep the sample."""
    size = sample.shape[1] * sample.element_size()
    return [(ctypes.c_char * size).from_address(row.data_ptr()) for row in sample]


def _sum(weight: Tensor) -> Tensor:
    return _bits(weight).sum()


def _bits(weight: Tensor) -> Tensor:
    """The values as integers: nan is not equal to itself."""
    return weight.detach().view(_INTEGERS[weight.element_size()])


def is_dense(value: Tensor) -> bool:
    """True if the elements fill one piece of memory, in whatever order."""
    return value.numel() == 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))
