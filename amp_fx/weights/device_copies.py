"""Low copies on a GPU that a kernel renews, so that the host waits for nothing.

Whether a weight was written to is asked where it lies. A weight and its copy are cut into chunks, and a Triton kernel
runs before the graph with one program for each chunk::

    now = load(weight[sampled])
    if any(now != load(seen)) or it is its turn:
        store(copy, load(weight).to(low))
        store(seen, now)

A chunk that is not written to costs the loads of its sample. The sample is spread over the chunk: every contiguous run
of 1/16 of a weight has some of it, and every slice along a dimension of a weight with up to 64 slices. The
first element of a chunk that is not zero is in it, too: zeros stay what they are under many writes. Every
:data:`PERIOD` calls a chunk is cast again whatever its sample says, each chunk at another call.

Copies in fp8 have a kernel of their own: :mod:`amp_fx.weights.device_rows`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with builds of torch for GPUs
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from numpy.typing import NDArray
from torch import Tensor

from amp_fx.weights.device_rows import renew_rows_kernel, row_chunks, row_constants
from amp_fx.weights.device_sample import (
    BITS,
    BLOCK,
    SPREAD,
    TYPES,
    look_at_sample,
    note_sample,
    padded,
    sampled_places,
)
from amp_fx.weights.recipes import CopyRecipe, Scaled

__all__ = ["CHUNK", "OPTIONS", "PERIOD", "DeviceCopies", "constants", "renew_kernel"]

#: elements; of a chunk in float32, 3 % of the sectors of 32 bytes are read to compare it
CHUNK = 16384
#: calls after which each chunk has been cast again
PERIOD = 256

#: of Triton's compiler. There is nothing to fuse; Triton 3.9 warns where nobody says so
OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def renew_kernel(
    table,
    offsets,
    seen,
    nonzero,
    seen_nonzero,
    turns,
    weight_type: tl.constexpr,
    bits_type: tl.constexpr,
    low_type: tl.constexpr,
    sampled: tl.constexpr,
    chunk_size: tl.constexpr,
    block_size: tl.constexpr,
    period: tl.constexpr,
):
    """One program for each chunk.

    Args:
        table: int64 [chunks, 3]: addresses in the weight and in the copy, elements.
        offsets: int32 [chunks, sampled]: which elements of the chunk are sampled.
        seen: [chunks, sampled], integers of the size of a weight's elements: the bits of the sample.
        nonzero: int32 [chunks]: where the first element is that is not zero.
        seen_nonzero: [chunks], as ``seen``: the bits of that.
        turns: int32 [chunks]: calls until the chunk is cast whatever its sample says.
        weight_type: of the weight's elements.
        bits_type: integers of their size.
        low_type: of the copy's elements.
        sampled: elements of a sample, a power of two.
        chunk_size: elements.
        block_size: elements that are cast at a time.
        period: what a turn is after the chunk was cast in its turn.
    """
    chunk = tl.program_id(0).to(tl.int64)
    weight = tl.load(table + 3 * chunk)
    count = tl.load(table + 3 * chunk + 2).to(tl.int32)
    bits = weight.to(tl.pointer_type(bits_type))  # pyright: ignore[reportArgumentType]  # a constant is its value
    sample = look_at_sample(bits, offsets, seen, nonzero, seen_nonzero, turns, chunk, sampled, period)
    now, is_stale = sample  # pyright: ignore[reportGeneralTypeIssues]  # a kernel, called by a kernel
    if is_stale:
        source = weight.to(tl.pointer_type(weight_type))
        target = tl.load(table + 3 * chunk + 1).to(tl.pointer_type(low_type))
        first = count
        for start in range(0, chunk_size, block_size):
            at = start + tl.arange(0, block_size)
            inside = at < count
            value = tl.load(source + at, mask=inside, other=0.0)
            tl.store(target + at, value.to(tl.float32).to(low_type), mask=inside)
            first = tl.minimum(first, tl.min(tl.where(value != 0, at, count), axis=0))
        first = tl.minimum(first, count - 1)
        note_sample(bits, seen, nonzero, seen_nonzero, chunk, now, first, sampled)


def constants(weight: torch.dtype, low: torch.dtype, sampled: int = SPREAD) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "weight_type": TYPES[weight],
        "bits_type": BITS[weight.itemsize][0],
        "low_type": TYPES[low],
        "sampled": sampled,
        "chunk_size": CHUNK,
        "block_size": BLOCK,
        "period": PERIOD,
    }


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

    def __init__(
        self,
        device: torch.device,
        kernel: Any,
        constants: dict[str, Any],
        bits: torch.dtype,
        chunks: list[_Chunk],
    ) -> None:
        self._kernel, self._constants = kernel, constants
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
            launch = self._kernel[(len(self._turns),)]
            launch(*self._tensors, self._turns, **self._constants, **OPTIONS)

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
            self._groups = [_group(kind, chunks) for kind, chunks in groups.items()]
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


def _group(kind: _Kind, chunks: list[_Chunk]) -> _Group:
    bits = BITS[kind.weight.itemsize][1]
    if kind.copy is torch.float8_e4m3fn:
        settings = row_constants(kind.weight, kind.sampled, PERIOD)
        return _Group(kind.device, renew_rows_kernel, settings, bits, chunks)
    return _Group(kind.device, renew_kernel, constants(kind.weight, kind.copy, kind.sampled), bits, chunks)


def _where(weights: Sequence[Tensor], copies: Sequence[tuple[Tensor, ...]]) -> list[tuple[object, ...]]:
    """Where they lie, and what lies there."""
    return [
        (value.data_ptr(), value.numel(), value.dtype, value.device)
        for values in (weights, *copies)
        for value in values
    ]


def _chunks(at: int, weight: Tensor, copy: tuple[Tensor, ...], recipe: CopyRecipe) -> Iterator[_Chunk]:
    if isinstance(recipe, Scaled):
        data, factors = copy
        for entry, offsets in row_chunks(weight, data, factors, CHUNK, in_rows=recipe.in_rows):
            yield _Chunk(at, entry, offsets)
        return
    for start in range(0, weight.numel(), CHUNK):
        count = min(CHUNK, weight.numel() - start)
        row = (
            weight.data_ptr() + start * weight.element_size(),
            copy[0].data_ptr() + start * copy[0].element_size(),
            count,
        )
        dimensions = zip(weight.shape, weight.stride(), strict=True)
        places = sampled_places(start, count, dimensions)
        yield _Chunk(at, row, padded(places).astype(np.int32))
