"""The Triton kernel that renews copies on a GPU, and which elements of a weight it looks at.

A weight and its copy are cut into chunks, and one program runs for each::

    now = load(weight[sampled])
    if any(now != load(seen)) or it is its turn:
        for row in chunk:
            scale = power of two below 448 / max(abs(row))               # where rows have scales
            store(copy, (row * scale).to(low)); store(factor, 1 / scale)
        store(seen, now)

A copy with scales has a factor for each row, so its chunks are some whole rows; a chunk of a cast is one row of any
elements that lie one behind the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with builds of torch for GPUs
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from numpy.typing import NDArray

__all__ = ["BITS", "OPTIONS", "PERIOD", "constants", "renew_kernel", "sampled_places"]

#: calls after which each chunk has been made again
PERIOD = 256

#: of Triton's compiler. There is nothing to fuse; Triton 3.9 warns where nobody says so
OPTIONS = {"enable_fp_fusion": False}

#: elements that are converted at a time
_BLOCK = 2048

#: sampled elements of a chunk, spread evenly; a power of two
_SPREAD = 64

#: slices along a dimension of which each has a sampled element
_SLICES = 64

#: magnitudes below count as this: see amp_fx.policy.scaled
_LEAST = tl.constexpr(2.0**-100)
_LARGEST = tl.constexpr(448.0)
#: of the bits of a float32, those of its exponent: the power of two below
_EXPONENT = tl.constexpr(0x7F800000)

_TYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
}

#: integers by bytes of an element
BITS = {4: (tl.int32, torch.int32), 2: (tl.int16, torch.int16)}


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
    copy_type: tl.constexpr,
    has_scales: tl.constexpr,
    sampled: tl.constexpr,
    block_size: tl.constexpr,
    period: tl.constexpr,
):
    """One program for each chunk.

    Args:
        table: int64 [chunks, 7]: addresses in the weight, the copy and the factors; rows, elements of a row; steps
            from row to row and from element to element in the weight.
        offsets: [chunks, sampled]: which elements after the chunk's first are sampled.
        seen: [chunks, sampled], integers of the size of a weight's elements: the bits of the sample.
        nonzero: [chunks]: where the first element is that is not zero.
        seen_nonzero: [chunks], as ``seen``: the bits of that.
        turns: int32 [chunks]: calls until the chunk is made again whatever its sample says.
        weight_type: of the weight's elements.
        bits_type: integers of their size.
        copy_type: of the copy's elements.
        has_scales: False: there is one row, whose elements lie one behind the other.
        sampled: elements of a sample, a power of two.
        block_size: elements that are converted at a time.
        period: what a turn is after the chunk was made in its turn.
    """
    chunk = tl.program_id(0).to(tl.int64)
    entry = table + 7 * chunk
    weight = tl.load(entry)
    bits = weight.to(tl.pointer_type(bits_type))  # pyright: ignore[reportArgumentType]  # a constant is its value
    lanes = chunk * sampled + tl.arange(0, sampled)
    now = tl.load(bits + tl.load(offsets + lanes))
    now_nonzero = tl.load(bits + tl.load(nonzero + chunk))
    differs = tl.max((now != tl.load(seen + lanes)).to(tl.int32), axis=0)
    differs += (now_nonzero != tl.load(seen_nonzero + chunk)).to(tl.int32)
    turn = tl.load(turns + chunk) - 1
    tl.store(turns + chunk, tl.where(turn <= 0, period, turn))
    if differs + (turn <= 0).to(tl.int32) > 0:
        source = weight.to(tl.pointer_type(weight_type))
        target = tl.load(entry + 1).to(tl.pointer_type(copy_type))
        rows, count = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
        row_step = tl.load(entry + 5)
        # of a cast it is known when the kernel is compiled
        step = tl.load(entry + 6) if has_scales else 1
        first = tl.full((), 0, tl.int64)
        has_first = tl.full((), 0, tl.int32)
        for row in range(rows):
            start_of_row = row * row_step
            scale = tl.full((), 1.0, tl.float32)
            if has_scales:
                amax = tl.full((), 0.0, tl.float32)
                is_nan = tl.full((), 0, tl.int32)
                for start in range(0, count, block_size):
                    at = start + tl.arange(0, block_size)
                    value = tl.load(source + start_of_row + at * step, mask=at < count, other=0.0).to(
                        tl.float32
                    )
                    amax = tl.maximum(amax, tl.max(tl.where(value == value, tl.abs(value), 0.0), axis=0))
                    is_nan = tl.maximum(is_nan, tl.max((value != value).to(tl.int32), axis=0))
                wanted = tl.math.div_rn(1.0, tl.maximum(amax, _LEAST)) * _LARGEST
                scale = (wanted.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
                scale = tl.where(is_nan > 0, float("nan"), scale)
                factors = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
                tl.store(factors + row, tl.math.div_rn(1.0, scale))
            where = count
            for start in range(0, count, block_size):
                at = start + tl.arange(0, block_size)
                inside = at < count
                value = tl.load(source + start_of_row + at * step, mask=inside, other=0.0).to(tl.float32)
                where = tl.minimum(where, tl.min(tl.where(value != 0, at, count), axis=0))
                low = (value * scale if has_scales else value).to(copy_type)
                tl.store(target + row * count + at, low, mask=inside)
            is_first = (has_first == 0) & (where < count)
            first = tl.where(is_first, start_of_row + where * step, first)
            has_first = tl.where(is_first, 1, has_first)
        # what was loaded before the copy was made: a write in between is seen at the next call
        tl.store(seen + lanes, now)
        tl.store(nonzero + chunk, first)
        tl.store(seen_nonzero + chunk, tl.load(bits + first))


def constants(weight: torch.dtype, copy: torch.dtype, sampled: int = _SPREAD) -> dict[str, Any]:
    """What the kernel is compiled for: dtypes of the weight and of its copy, and elements of a sample."""
    return {
        "weight_type": _TYPES[weight],
        "bits_type": BITS[weight.itemsize][0],
        "copy_type": _TYPES[copy],
        "has_scales": copy is torch.float8_e4m3fn,
        "sampled": sampled,
        "block_size": _BLOCK,
        "period": PERIOD,
    }


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
    found = np.arange(_SPREAD, dtype=np.int64) * (count - 1) // (_SPREAD - 1)
    for size, step in dimensions:
        if 1 < size <= _SLICES and len(np.unique((start + found) // step % size)) < size:
            slices = (start + np.arange(count)) // step % size
            missed = np.setdiff1d(slices, slices[found])
            first = [int(np.argmax(slices == one)) for one in missed]
            found = np.concatenate([found, np.array(first, np.int64)])
    return found
