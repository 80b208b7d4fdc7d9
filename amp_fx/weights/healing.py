"""Low copies on a GPU that heal themselves, so that the host waits for nothing.

Whether a weight was written to is asked where it lies. A weight and its copy are cut into chunks, and a Triton kernel
runs before the graph with one program for each chunk::

    now = load(weight[sampled])
    if any(now != load(seen)):
        store(copy, load(weight).to(low))
        store(seen, now)

A chunk that is not written to costs the loads of its sample. The sample is spread over the chunk, and has the first
element that is not zero: zeros stay what they are under many writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]  # comes with builds of torch for GPUs
import triton.language as tl  # pyright: ignore[reportMissingImports]  # as above
from torch import Tensor

__all__ = ["CHUNK", "OPTIONS", "HealedCopies", "constants", "heal_kernel"]

#: elements; of a chunk in float32, 1.6 % of the lines of 32 bytes are read to compare it
CHUNK = 16384
_BLOCK = 2048
#: sampled elements of a chunk; a power of two
_SAMPLED = 32

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
#: integers by bytes of an element
_BITS = {4: (tl.int32, torch.int32), 2: (tl.int16, torch.int16)}

#: of Triton's compiler. There is nothing to fuse; Triton 3.9 warns where nobody says so
OPTIONS = {"enable_fp_fusion": False}


@triton.jit(do_not_specialize=["everything"])
def heal_kernel(
    table,
    seen,
    nonzero,
    everything,
    weight_type: tl.constexpr,
    bits_type: tl.constexpr,
    low_type: tl.constexpr,
    sampled: tl.constexpr,
    chunk_size: tl.constexpr,
    block_size: tl.constexpr,
):
    """One program for each chunk.

    Args:
        table: int64 [chunks, 3]: addresses in the weight and in the copy, elements.
        seen: [chunks, sampled], integers of the size of a weight's elements: the bits of the sample.
        nonzero: int32 [chunks]: where the first element is that is not zero, the last one of the sample.
        everything: 1: every chunk is cast.
        weight_type: of the weight's elements.
        bits_type: integers of their size.
        low_type: of the copy's elements.
        sampled: elements of a sample, a power of two.
        chunk_size: elements.
        block_size: elements that are cast at a time.
    """
    chunk = tl.program_id(0).to(tl.int64)
    weight = tl.load(table + 3 * chunk)
    count = tl.load(table + 3 * chunk + 2).to(tl.int32)
    bits = weight.to(tl.pointer_type(bits_type))  # pyright: ignore[reportArgumentType]  # a constant is its value
    lane = tl.arange(0, sampled)
    spread = (lane * count) // sampled
    is_last = lane == sampled - 1
    now = tl.load(bits + tl.where(is_last, tl.load(nonzero + chunk), spread))
    before = tl.load(seen + chunk * sampled + lane)
    if tl.max((now != before).to(tl.int32), axis=0) + everything > 0:
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
        # what was loaded before the cast: a write in between is seen at the next call
        now = tl.where(is_last, tl.load(bits + first), now)
        tl.store(nonzero + chunk, first)
        tl.store(seen + chunk * sampled + lane, now)


def constants(weight: torch.dtype, low: torch.dtype) -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {
        "weight_type": _TYPES[weight],
        "bits_type": _BITS[weight.itemsize][0],
        "low_type": _TYPES[low],
        "sampled": _SAMPLED,
        "chunk_size": CHUNK,
        "block_size": _BLOCK,
    }


@dataclass(frozen=True)
class _Group:
    """Chunks that one launch looks at."""

    constants: dict[str, Any]
    table: Tensor
    seen: Tensor
    nonzero: Tensor

    def launch(self, *, everything: bool) -> None:
        with torch.accelerator.device_index(self.table.device.index):
            launch = heal_kernel[(len(self.table),)]  # pyright: ignore[reportIndexIssue]  # triton.jit's own
            launch(self.table, self.seen, self.nonzero, int(everything), **self.constants, **OPTIONS)  # pyright: ignore[reportArgumentType]  # of constants


class HealedCopies:
    """Copies that are made from their weights, chunk by chunk, on the device.

    Neither is kept alive: whoever calls has both, at the addresses that they had here.

    Args:
        weights: each one dense piece of memory, float32, float16 or bfloat16.
        copies: of the same sizes and strides, each on the device of its weight.
    """

    def __init__(self, weights: Sequence[Tensor], copies: Sequence[Tensor]) -> None:
        groups: dict[tuple[torch.device, torch.dtype, torch.dtype], list[tuple[int, int, int]]] = {}
        for weight, copy in zip(weights, copies, strict=True):
            rows = groups.setdefault((weight.device, weight.dtype, copy.dtype), [])
            rows += _chunks(weight, copy)
        with torch.inference_mode(False):
            self._groups = [_group(*key, rows) for key, rows in groups.items()]
        self._lies = _where(weights, copies)

    def fits(self, weights: Sequence[Tensor], copies: Sequence[Tensor]) -> bool:
        """True if these are of them, where they were: a CUDA graph of the user may hold what belongs to them."""
        return self._lies == _where(weights, copies)

    def make(self) -> None:
        """Makes all copies."""
        for group in self._groups:
            group.launch(everything=True)

    def heal(self) -> None:
        """Makes the chunks again whose weights have changed."""
        for group in self._groups:
            group.launch(everything=False)


def _where(weights: Sequence[Tensor], copies: Sequence[Tensor]) -> list[tuple[object, ...]]:
    """Where they lie, and what lies there."""
    return [
        (value.data_ptr(), value.numel(), value.dtype, value.device)
        for values in (weights, copies)
        for value in values
    ]


def _chunks(weight: Tensor, copy: Tensor) -> list[tuple[int, int, int]]:
    return [
        (
            weight.data_ptr() + start * weight.element_size(),
            copy.data_ptr() + start * copy.element_size(),
            min(CHUNK, weight.numel() - start),
        )
        for start in range(0, weight.numel(), CHUNK)
    ]


def _group(
    device: torch.device, weight: torch.dtype, low: torch.dtype, rows: list[tuple[int, int, int]]
) -> _Group:
    return _Group(
        constants(weight, low),
        torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 3),
        torch.zeros(len(rows), _SAMPLED, dtype=_BITS[weight.itemsize][1], device=device),
        torch.zeros(len(rows), dtype=torch.int32, device=device),
    )
