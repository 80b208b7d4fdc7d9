"""Copies on a GPU that a kernel renews, so that the host waits for nothing.

Before each call of a graph one program runs for each chunk of its copies::

    now = load(weight[sampled])                     # as on a CPU: amp_fx.runtime.weights.changes.sampled_offsets
    if any(now != load(seen[chunk])):
        for row in chunk:
            scale = power of two below 448 / max(abs(row))               # where rows have scales
            store(copy, (row * scale).to(low)); store(factor, 1 / scale)
        store(seen[chunk], now)

A copy with scales has a factor for each row, so its chunks are some whole rows; a chunk of a cast is one row of any
elements that lie one behind the other. The chunks of one weight look at the same elements, which one line of memory
each has; each chunk has what it has seen for itself, as no program waits for another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with builds of torch for GPUs
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from numpy.typing import NDArray
from torch import Tensor

from amp_fx.precision.policy.forms import ScaledRows
from amp_fx.runtime.weights.changes import SAMPLED, sampled_offsets

#: elements of a chunk
CHUNK = 16384
#: of Triton's compiler. There is nothing to fuse; Triton 3.9 warns where nobody says so
OPTIONS = {"enable_fp_fusion": False}
#: elements that are converted at a time
_BLOCK = 2048
#: magnitudes below count as this: see amp_fx.precision.policy.scaled
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
_BITS = {4: (tl.int32, torch.int32), 2: (tl.int16, torch.int16)}


@triton.jit
def renew_kernel(
    table,
    sampled,
    seen,
    weight_type: tl.constexpr,
    bits_type: tl.constexpr,
    copy_type: tl.constexpr,
    has_scales: tl.constexpr,
    samples: tl.constexpr,
    block_size: tl.constexpr,
):
    """One program for each chunk.

    ``table``, int64 [chunks, 8]: address of the weight, and of the chunk's first element in it, in the copy and in the
    factors; rows, elements of a row; steps from row to row and from element to element in the weight.
    ``sampled``, int64 [chunks, samples]: which elements after the weight's first are sampled.
    ``seen``, [chunks, samples], integers of the size of a weight's elements: the bits of the sample.
    Without scales there is one row, of elements that lie one behind the other.
    """
    chunk = tl.program_id(0).to(tl.int64)
    entry = table + 8 * chunk
    bits = tl.load(entry).to(tl.pointer_type(bits_type))  # pyright: ignore[reportArgumentType]  # a constant is its value
    lanes = chunk * samples + tl.arange(0, samples)
    now = tl.load(bits + tl.load(sampled + lanes))
    differs = tl.max((now != tl.load(seen + lanes)).to(tl.int32), axis=0)
    if differs > 0:
        source = tl.load(entry + 1).to(tl.pointer_type(weight_type))
        target = tl.load(entry + 2).to(tl.pointer_type(copy_type))
        rows, count = tl.load(entry + 4).to(tl.int32), tl.load(entry + 5).to(tl.int32)
        row_step = tl.load(entry + 6)
        # of a cast it is known when the kernel is compiled
        step = tl.load(entry + 7) if has_scales else 1
        for row in range(rows):
            row_source = source + row * row_step
            scale = tl.full((), 1.0, tl.float32)
            if has_scales:
                amax = tl.full((), 0.0, tl.float32)
                is_nan = tl.full((), 0, tl.int32)
                for start in range(0, count, block_size):
                    at = start + tl.arange(0, block_size)
                    value = tl.load(row_source + at * step, mask=at < count, other=0.0).to(tl.float32)
                    amax = tl.maximum(amax, tl.max(tl.abs(value), axis=0))
                    is_nan = tl.maximum(is_nan, tl.max((value != value).to(tl.int32), axis=0))
                wanted = tl.math.div_rn(1.0, tl.maximum(amax, _LEAST)) * _LARGEST
                scale = (wanted.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)
                scale = tl.where(is_nan > 0, float("nan"), scale)
                factors = tl.load(entry + 3).to(tl.pointer_type(tl.float32))
                tl.store(factors + row, tl.math.div_rn(1.0, scale))
            for start in range(0, count, block_size):
                at = start + tl.arange(0, block_size)
                value = tl.load(row_source + at * step, mask=at < count, other=0.0).to(tl.float32)
                low = (value * scale if has_scales else value).to(copy_type)
                tl.store(target + row * count + at, low, mask=at < count)
        # what was loaded before the copy was made: a write in between is seen by the next call
        tl.store(seen + lanes, now)


def constants(weight: torch.dtype, copy: torch.dtype) -> dict[str, Any]:
    """The constants that the kernel is compiled for, by the dtypes of a weight and of its copy."""
    return {
        "weight_type": _TYPES[weight],
        "bits_type": _BITS[weight.itemsize][0],
        "copy_type": _TYPES[copy],
        "has_scales": copy is torch.float8_e4m3fn,
        "samples": SAMPLED,
        "block_size": _BLOCK,
    }


#: a weight, its copy, and the form of that: a dtype, or rows with scales
Copy = tuple[Tensor, tuple[Tensor, ...], object]


def places_of(copies: Sequence[Copy]) -> list[tuple[object, ...]]:
    """Where weights and copies lie, and what lies there."""
    tensors = [value for weight, copy, _ in copies for value in (weight, *copy)]
    return [(value.data_ptr(), value.shape, value.stride(), value.dtype) for value in tensors]


class Renewal:
    """Makes copies again from weights that were written to, chunk by chunk, on their device.

    Neither is kept alive: whoever calls has both, at the addresses that they had here. A weight is one dense piece of
    memory in float32, float16 or bfloat16.
    """

    def __init__(self, copies: Sequence[Copy]) -> None:
        self.places = places_of(copies)
        chunks: dict[_Kind, list[tuple[tuple[int, ...], NDArray[np.int64]]]] = {}
        for weight, tensors, form in copies:
            # what is in the copy's dtype, and factors in fp32 where there are some
            copy = sorted(tensors, key=lambda tensor: tensor.element_size())
            kind = _Kind(weight.device, weight.dtype, copy[0].dtype)
            # a smaller weight fills the sample by its first elements again
            sampled = np.resize(sampled_offsets(weight), SAMPLED)
            if isinstance(form, ScaledRows):
                rows = _chunks_of_rows(weight, copy[0], copy[1], form.in_rows)
            else:
                rows = _chunks(weight, copy[0])
            chunks.setdefault(kind, []).extend((row, sampled) for row in rows)
        self._launches = [self._launch(kind, *zip(*found, strict=True)) for kind, found in chunks.items()]

    @staticmethod
    def _launch(
        kind: _Kind, table: Sequence[tuple[int, ...]], sampled: Sequence[NDArray[np.int64]]
    ) -> tuple[_Kind, tuple[Tensor, ...]]:
        with torch.inference_mode(False):
            offsets = torch.from_numpy(np.stack(sampled)).to(kind.device)
            seen = torch.zeros(offsets.shape, dtype=_BITS[kind.weight.itemsize][1], device=kind.device)
            return kind, (torch.tensor(table, dtype=torch.int64, device=kind.device), offsets, seen)

    def launch(self) -> None:
        """Makes those copies again whose weights have changed."""
        for kind, tensors in self._launches:
            with torch.accelerator.device_index(kind.device.index):
                kernel: Any = renew_kernel
                kernel[(len(tensors[0]),)](*tensors, **constants(kind.weight, kind.copy), **OPTIONS)


class _Kind(NamedTuple):
    """The properties that all chunks of one launch share."""

    device: torch.device
    weight: torch.dtype
    copy: torch.dtype


def _chunks(weight: Tensor, copy: Tensor) -> Iterator[tuple[int, ...]]:
    """Rows of the table for a cast."""
    for start in range(0, weight.numel(), CHUNK):
        places = [value.data_ptr() + start * value.element_size() for value in (weight, copy)]
        yield weight.data_ptr(), *places, 0, 1, min(CHUNK, weight.numel() - start), 0, 1


def _chunks_of_rows(
    weight: Tensor, data: Tensor, factors: Tensor, in_rows: bool
) -> Iterator[tuple[int, ...]]:
    """Rows of the table for a matrix with scales."""
    columns, count = data.shape
    row_step, step = weight.stride() if in_rows else reversed(weight.stride())
    size = max(1, CHUNK // count)
    for row in range(0, columns, size):
        place = weight.data_ptr() + row * row_step * weight.element_size()
        copied = data.data_ptr() + row * count, factors.data_ptr() + row * factors.element_size()
        yield weight.data_ptr(), place, *copied, min(size, columns - row), count, row_step, step
