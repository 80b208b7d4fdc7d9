"""The kernel that renews copies in e4m3: as :mod:`amp_fx.weights.device_copies`, but a row is made as a whole.

A row of the copy has one factor, so a chunk is some whole rows::

    now = load(weight[sampled])
    if any(now != load(seen)) or it is its turn:
        for row in chunk:
            scale = power of two below 448 / max(abs(row))
            store(copy, (row * scale).to(e4m3)); store(factor, 1 / scale)
        store(seen, now)

A write to a few elements of a row that no sample has is seen when the chunk's turn comes, as in casts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with builds of torch for GPUs
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from numpy.typing import NDArray
from torch import Tensor

from amp_fx.weights.device_sample import (
    BITS,
    BLOCK,
    TYPES,
    look_at_sample,
    note_sample,
    padded,
    sampled_places,
)

__all__ = ["renew_rows_kernel", "row_chunks", "row_constants"]

#: magnitudes below count as this: see amp_fx.policy.scaled
_LEAST = tl.constexpr(2.0**-100)
_LARGEST = tl.constexpr(448.0)
#: of the bits of a float32, those of its exponent: the power of two below
_EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def renew_rows_kernel(
    table,
    offsets,
    seen,
    nonzero,
    seen_nonzero,
    turns,
    weight_type: tl.constexpr,
    bits_type: tl.constexpr,
    sampled: tl.constexpr,
    block_size: tl.constexpr,
    period: tl.constexpr,
):
    """One program for each chunk.

    Args:
        table: int64 [chunks, 7]: addresses in the weight, the copy and the factors; rows, elements of a row; steps
            from row to row and from element to element in the weight.
        offsets: int64 [chunks, sampled]: which elements after the chunk's first are sampled.
        seen: [chunks, sampled], integers of the size of a weight's elements: the bits of the sample.
        nonzero: int64 [chunks]: where the first element is that is not zero.
        seen_nonzero: [chunks], as ``seen``: the bits of that.
        turns: int32 [chunks]: calls until the chunk is made again whatever its sample says.
        weight_type: of the weight's elements.
        bits_type: integers of their size.
        sampled: elements of a sample, a power of two.
        block_size: elements that are converted at a time.
        period: what a turn is after the chunk was made in its turn.
    """
    chunk = tl.program_id(0).to(tl.int64)
    entry = table + 7 * chunk
    weight = tl.load(entry)
    bits = weight.to(tl.pointer_type(bits_type))  # pyright: ignore[reportArgumentType]  # a constant is its value
    sample = look_at_sample(bits, offsets, seen, nonzero, seen_nonzero, turns, chunk, sampled, period)
    now, is_stale = sample  # pyright: ignore[reportGeneralTypeIssues]  # a kernel, called by a kernel
    if is_stale:
        source = weight.to(tl.pointer_type(weight_type))
        target = tl.load(entry + 1).to(tl.pointer_type(tl.float8e4nv))
        factors = tl.load(entry + 2).to(tl.pointer_type(tl.float32))
        rows, count = tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
        row_step, step = tl.load(entry + 5), tl.load(entry + 6)
        first = tl.full((), 0, tl.int64)
        has_first = tl.full((), 0, tl.int32)
        for row in range(rows):
            start_of_row = row * row_step
            amax = tl.full((), 0.0, tl.float32)
            is_nan = tl.full((), 0, tl.int32)
            where = count
            for start in range(0, count, block_size):
                at = start + tl.arange(0, block_size)
                value = tl.load(source + start_of_row + at * step, mask=at < count, other=0.0).to(tl.float32)
                amax = tl.maximum(amax, tl.max(tl.where(value == value, tl.abs(value), 0.0), axis=0))
                is_nan = tl.maximum(is_nan, tl.max((value != value).to(tl.int32), axis=0))
                where = tl.minimum(where, tl.min(tl.where(value != 0, at, count), axis=0))
            is_first = (has_first == 0) & (where < count)
            first = tl.where(is_first, start_of_row + where * step, first)
            has_first = tl.where(is_first, 1, has_first)
            wanted = tl.math.div_rn(1.0, tl.maximum(amax, _LEAST)) * _LARGEST
            scale = (wanted.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
            scale = tl.where(is_nan > 0, float("nan"), scale)
            for start in range(0, count, block_size):
                at = start + tl.arange(0, block_size)
                inside = at < count
                value = tl.load(source + start_of_row + at * step, mask=inside, other=0.0).to(tl.float32)
                tl.store(target + row * count + at, (value * scale).to(tl.float8e4nv), mask=inside)
            tl.store(factors + row, tl.math.div_rn(1.0, scale))
        note_sample(bits, seen, nonzero, seen_nonzero, chunk, now, first, sampled)


def row_constants(weight: torch.dtype, sampled: int, period: int) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "weight_type": TYPES[weight],
        "bits_type": BITS[weight.itemsize][0],
        "sampled": sampled,
        "block_size": BLOCK,
        "period": period,
    }


def row_chunks(
    weight: Tensor, data: Tensor, factors: Tensor, chunk: int, *, in_rows: bool
) -> Iterator[tuple[tuple[int, ...], NDArray[np.int64]]]:
    """The chunks of a matrix: rows of the table, and the offsets of sampled elements.

    Args:
        weight: 2-d, one dense piece of memory.
        data: e4m3 (columns, contracted).
        factors: float32 (columns, 1).
        chunk: elements, if a row is not longer.
        in_rows: the weight is (columns, contracted).
    """
    columns, count = data.shape
    row_step, step = weight.stride() if in_rows else reversed(weight.stride())
    size = max(1, chunk // count)
    for row in range(0, columns, size):
        rows = min(size, columns - row)
        yield (
            (
                weight.data_ptr() + row * row_step * weight.element_size(),
                data.data_ptr() + row * count,
                factors.data_ptr() + row * factors.element_size(),
                rows,
                count,
                row_step,
                step,
            ),
            _sampled(row, rows, data.shape, row_step, step, in_rows=in_rows),
        )


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
    return padded(np.concatenate(found))
