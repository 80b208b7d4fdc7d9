"""What the kernels that renew copies have in common: whether a chunk is to be made again."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with builds of torch for GPUs
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from numpy.typing import NDArray

__all__ = ["BITS", "BLOCK", "SPREAD", "TYPES", "look_at_sample", "note_sample", "padded", "sampled_places"]

#: elements that are converted at a time
BLOCK = 2048

#: sampled elements of a chunk, spread evenly; a power of two
SPREAD = 64

#: slices along a dimension of which each has a sampled element
_SLICES = 64

#: dtypes of weights
TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

#: integers by bytes of an element
BITS = {4: (tl.int32, torch.int32), 2: (tl.int16, torch.int16)}


@triton.jit
def look_at_sample(
    bits,
    offsets,
    seen,
    nonzero,
    seen_nonzero,
    turns,
    chunk,
    sampled: tl.constexpr,
    period: tl.constexpr,
):
    """Compares the sample of a chunk with what it was, and counts its turn.

    Args:
        bits: the chunk's first element, as an integer.
        offsets: [chunks, sampled]: which elements after the chunk's first are sampled.
        seen: [chunks, sampled], integers of the size of an element: the bits of the sample.
        nonzero: [chunks]: where the first element is that is not zero.
        seen_nonzero: [chunks], as ``seen``: the bits of that.
        turns: int32 [chunks]: calls until the chunk is made again whatever its sample says.
        chunk: number of the chunk.
        sampled: elements of a sample, a power of two.
        period: what a turn is after the chunk was made in its turn.

    Returns:
        The bits of the sample, and whether the chunk is to be made again.
    """
    lanes = chunk * sampled + tl.arange(0, sampled)
    now = tl.load(bits + tl.load(offsets + lanes))
    now_nonzero = tl.load(bits + tl.load(nonzero + chunk))
    differs = tl.max((now != tl.load(seen + lanes)).to(tl.int32), axis=0)
    differs += (now_nonzero != tl.load(seen_nonzero + chunk)).to(tl.int32)
    turn = tl.load(turns + chunk) - 1
    is_due = (turn <= 0).to(tl.int32)
    tl.store(turns + chunk, tl.where(turn <= 0, period, turn))
    return now, differs + is_due > 0


@triton.jit
def note_sample(bits, seen, nonzero, seen_nonzero, chunk, now, first, sampled: tl.constexpr):
    """Keeps the sample that was loaded before the copy was made: a write in between is seen at the next call.

    Args:
        bits: as of :func:`look_at_sample`, like ``seen``, ``nonzero``, ``seen_nonzero``, ``chunk`` and ``sampled``.
        seen: likewise.
        nonzero: likewise.
        seen_nonzero: likewise.
        chunk: likewise.
        now: the bits of the sample.
        first: where the first element is that is not zero.
        sampled: likewise.
    """
    tl.store(seen + chunk * sampled + tl.arange(0, sampled), now)
    tl.store(nonzero + chunk, first)
    tl.store(seen_nonzero + chunk, tl.load(bits + first))


def sampled_places(start: int, count: int, dimensions: Iterable[tuple[int, int]]) -> NDArray[np.int64]:
    """Which elements of a chunk are sampled: evenly spaced ones, and one of each slice along a short dimension.

    Args:
        start: how many elements of the weight are before the chunk.
        count: elements of the chunk.
        dimensions: of the weight, in any order: its size, and how many elements a step is.

    Returns:
        For each, how many elements of the chunk are before it.
    """
    # the first and the last are among them, for writes that end or begin just there
    found = np.arange(SPREAD, dtype=np.int64) * (count - 1) // (SPREAD - 1)
    for size, step in dimensions:
        if 1 < size <= _SLICES and len(np.unique((start + found) // step % size)) < size:
            slices = (start + np.arange(count)) // step % size
            missed = np.setdiff1d(slices, slices[found])
            first = [int(np.argmax(slices == one)) for one in missed]
            found = np.concatenate([found, np.array(first, np.int64)])
    return found


def padded(places: NDArray[np.int64]) -> NDArray[np.int64]:
    """As many as a power of two, by looking at the first more than once."""
    count = 1 << (len(places) - 1).bit_length()
    return np.pad(places, (0, count - len(places)), constant_values=places[0])
