"""Low copies on a GPU that a kernel renews, so that the host waits for nothing.

Whether a weight was written to is asked where it lies, by a kernel that runs before the graph: it compares a sample of
each chunk of a weight, and makes the copy of the chunk again where that differs, see
:mod:`amp_fx.weights.device_kernel`.

A chunk that is not written to costs the loads of its sample. The sample is spread over the chunk: every contiguous run
of 1/16 of a weight has some of it, and every slice along a dimension of a weight with up to 64 slices. The
first element of a chunk that is not zero is in it, too: zeros stay what they are under many writes. Every
:data:`PERIOD` calls a chunk is made again whatever its sample says, each chunk at another call.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_fx.weights.device_kernel import BITS, OPTIONS, PERIOD, constants, renew_kernel, sampled_places
from amp_fx.weights.recipes import CopyRecipe, Scaled

__all__ = ["CHUNK", "PERIOD", "DeviceCopies"]

#: elements; of a chunk in float32, 3 % of the sectors of 32 bytes are read to compare it
CHUNK = 16384


class _Chunk(NamedTuple):
    """A piece of a weight.

    Attributes:
        weight: position of the weight.
        row: of the table.
        offsets: of the elements that are sampled.
    """

    weight: int
    row: tuple[int, ...]
    offsets: NDArray[np.integer[Any]]


class _Group:
    """Chunks that one launch looks at."""

    def __init__(self, kind: _Kind, chunks: list[_Chunk]) -> None:
        device, bits = kind.device, BITS[kind.weight.itemsize][1]
        self._constants = constants(kind.weight, kind.copy, kind.sampled)
        self._weights = [chunk.weight for chunk in chunks]
        offsets = torch.from_numpy(np.stack([chunk.offsets for chunk in chunks])).to(device)
        count = len(chunks)
        self._tensors = (
            torch.tensor([chunk.row for chunk in chunks], dtype=torch.int64, device=device),
            offsets,
            torch.zeros(offsets.shape, dtype=bits, device=device),
            torch.zeros(count, dtype=offsets.dtype, device=device),
            torch.zeros(count, dtype=bits, device=device),
        )
        #: all at the first call; after :meth:`take_turns`, each at another
        self._turns = torch.zeros(count, dtype=torch.int32, device=device)

    def launch(self) -> None:
        with torch.accelerator.device_index(self._turns.device.index):
            kernel: Any = renew_kernel
            kernel[(len(self._turns),)](*self._tensors, self._turns, **self._constants, **OPTIONS)

    def take_turns(self) -> None:
        """From now on, so many chunks at each call that all are cast again within the period."""
        chunks = torch.arange(len(self._turns), dtype=torch.int32, device=self._turns.device)
        self._turns.copy_(PERIOD - chunks % PERIOD)

    def are_due(self, is_stale: Sequence[bool]) -> None:
        """The chunks of these weights are cast at the next call."""
        first = 0
        for weight, chunks in itertools.groupby(self._weights):
            count = len(list(chunks))
            if is_stale[weight]:
                self._turns[first : first + count].zero_()
            first += count


class DeviceCopies:
    """Copies that are made from their weights, chunk by chunk, on the device.

    Neither is kept alive: whoever calls has both, at the addresses that they had here.

    Args:
        weights: each one dense piece of memory, float32, float16 or bfloat16.
        copies: the tensors of their copies, each on the device of its weight.
        recipes: of the copies.
    """

    def __init__(
        self, weights: Sequence[Tensor], copies: Sequence[tuple[Tensor, ...]], recipes: Sequence[CopyRecipe]
    ) -> None:
        groups: dict[_Kind, list[_Chunk]] = {}
        for at, (weight, copy, recipe) in enumerate(zip(weights, copies, recipes, strict=True)):
            for chunk in _chunks(at, weight, copy, recipe):
                key = _Kind(weight.device, weight.dtype, copy[0].dtype, len(chunk.offsets))
                groups.setdefault(key, []).append(chunk)
        with torch.inference_mode(False):
            self._groups = [_Group(kind, chunks) for kind, chunks in groups.items()]
        self._lies = _where(weights, copies)

    def fits(self, weights: Sequence[Tensor], copies: Sequence[tuple[Tensor, ...]]) -> bool:
        """True if these are of them, where they were: a CUDA graph of the user may hold what belongs to them."""
        return self._lies == _where(weights, copies)

    def make(self) -> None:
        """Makes all copies, for the first time."""
        self.renew()
        for group in self._groups:
            group.take_turns()

    def renew(self, is_stale: Sequence[bool] = ()) -> None:
        """Makes the chunks again whose weights have changed.

        Args:
            is_stale: for each weight, whether all its chunks are made again; all False by default.
        """
        for group in self._groups:
            if any(is_stale):
                group.are_due(is_stale)
            group.launch()


class _Kind(NamedTuple):
    """What the chunks of one launch have in common."""

    device: torch.device
    weight: torch.dtype
    copy: torch.dtype
    sampled: int


def _where(weights: Sequence[Tensor], copies: Sequence[tuple[Tensor, ...]]) -> list[tuple[object, ...]]:
    """Where they lie, and what lies there."""
    return [
        (value.data_ptr(), value.numel(), value.dtype, value.device)
        for values in (weights, *copies)
        for value in values
    ]


def _chunks(at: int, weight: Tensor, copy: tuple[Tensor, ...], recipe: CopyRecipe) -> Iterator[_Chunk]:
    if isinstance(recipe, Scaled):
        yield from _chunks_of_rows(at, weight, copy, in_rows=recipe.in_rows)
        return
    dimensions = [*zip(weight.shape, weight.stride(), strict=True)]
    for start in range(0, weight.numel(), CHUNK):
        count = min(CHUNK, weight.numel() - start)
        addresses = [value.data_ptr() + start * value.element_size() for value in (weight, copy[0])]
        places = sampled_places(start, count, dimensions)
        yield _Chunk(at, (*addresses, 0, 1, count, 0, 1), _padded(places).astype(np.int32))


def _chunks_of_rows(at: int, weight: Tensor, copy: tuple[Tensor, ...], *, in_rows: bool) -> Iterator[_Chunk]:
    """The chunks of a matrix with scales, see :class:`amp_fx.weights.recipes.Scaled`."""
    data, factors = copy
    columns, count = data.shape
    row_step, step = weight.stride() if in_rows else reversed(weight.stride())
    size = max(1, CHUNK // count)
    for row in range(0, columns, size):
        rows = min(size, columns - row)
        entry = (
            weight.data_ptr() + row * row_step * weight.element_size(),
            data.data_ptr() + row * count,
            factors.data_ptr() + row * factors.element_size(),
            rows,
            count,
            row_step,
            step,
        )
        yield _Chunk(at, entry, _sampled(row, rows, data.shape, row_step, step, in_rows=in_rows))


def _sampled(
    first: int, rows: int, shape: torch.Size, row_step: int, step: int, *, in_rows: bool
) -> NDArray[np.int64]:
    """Spread in the order of memory, and in the order of the weight's dimensions where that is another."""
    columns, count = shape
    found = []
    lies_in_rows = step <= row_step
    if in_rows or lies_in_rows:
        places = sampled_places(first * count, rows * count, ((columns, count), (count, 1)))
        found.append(places // count * row_step + places % count * step)
    if not in_rows or not lies_in_rows:
        # the chunk by itself, the other way round
        places = sampled_places(0, rows * count, ((count, rows), (rows, 1)))
        found.append(places % rows * row_step + places // rows * step)
    return _padded(np.concatenate(found))


def _padded(places: NDArray[np.int64]) -> NDArray[np.int64]:
    """As many as a power of two, by looking at the first more than once."""
    count = 1 << (len(places) - 1).bit_length()
    return np.pad(places, (0, count - len(places)), constant_values=places[0])
