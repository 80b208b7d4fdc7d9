"""The elements of weights, as bits where they lie: a sample of them, and digests of all of them.

A sample is small enough to be compared in each call. It has elements of every contiguous run of 1/16 of a weight's
memory, of every slice along a dimension with up to :data:`_SLICES` slices, and of every run of 1/16 of the slices along
another: channels are in the first dimension of a convolution's weight, in the second of a transposed one's and of what
is multiplied from the right. Zeros stay what they are under many writes, so if one of these elements is zero, there are
more pieces, and in each an element is sampled that is not zero where there is any.

A digest tells a chunk of memory from what it was before. A few chunks are compared in each call, in turn.
"""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from amp_fx._torch import borrowed

__all__ = ["Elements", "Samples", "is_dense", "sampled_offsets"]

#: a run of 1/16 has the middle of one of so many equal pieces, and all of one of so many
_MIDDLES, _PIECES = 18, 32

#: slices along a dimension of which each has a sampled element
_SLICES = 64

#: with so many slices along the first dimension in memory, it does not matter where in one of them an element lies
_LONG = 160

#: bytes of a word of a sample. Words lie at multiples of it; sampled are pairs, of one line of the cache
_WORD = 8

#: bytes of the chunks of one weight: at most so many, and between these sizes
_CHUNKS, _SMALLEST, _LARGEST = 256, 1024, 32768

#: calls in which all elements are compared: at most so many, fewer where there are fewer chunks
_TURNS = 2048

#: integers by element size
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: of digests on other devices than a CPU; even
_STEP = 0x3C6EF372FE94F82A


def is_dense(value: Tensor) -> bool:
    """True if the elements fill one piece of memory, in whatever order."""
    return value.numel() == _span(value)


class Elements:
    """All bits of one weight at one moment.

    Args:
        weight: a plain tensor. Not kept alive: whoever asks later has it, where it lay.
    """

    def __init__(self, weight: Tensor) -> None:
        #: everything from the first element to the last; what lies between the elements of a view counts, too
        span = borrowed(_bits(weight).as_strided((_span(weight) if weight.numel() else 0,), (1,)))
        self.span = span
        offsets = sampled_offsets(weight)
        self.is_plain = span.device.type == "cpu"
        if self.is_plain:
            self.sample = _words(span, offsets)
        else:
            self.sample = torch.from_numpy(offsets).to(span.device)
        self.seen = self.look()
        self._start = self.span.data_ptr()
        self.size = self.span.numel() * self.span.element_size()
        #: bytes
        self.chunk = min(max(-(-self.size // _CHUNKS), _SMALLEST), _LARGEST) // _WORD * _WORD
        self.starts = range(0, self.size, self.chunk)
        self._digests = [self._digest(start) for start in self.starts]

    def look(self) -> NDArray[np.int64] | Tensor:
        """The sample as it is now."""
        if isinstance(self.sample, Tensor):
            return self.span.index_select(0, self.sample)
        return _memory(self.sample)[1]

    def sample_is_same(self) -> bool:
        """True if the sampled elements have the bits that they had."""
        now, seen = self.look(), self.seen
        if isinstance(now, Tensor):
            return isinstance(seen, Tensor) and torch.equal(now, seen)
        return np.array_equal(now, seen)

    def chunk_is_same(self, at: int) -> bool:
        """True if the chunk with this number has the bits that it had."""
        return self._digest(self.starts[at]) == self._digests[at]

    def are_same(self) -> bool:
        """True if all elements have the bits that they had. Reads all of them."""
        return all(map(self.chunk_is_same, range(len(self.starts))))

    def _digest(self, start: int) -> int:
        if self.is_plain:
            size = min(self.chunk, self.size - start)
            return zlib.crc32((ctypes.c_char * size).from_address(self._start + start))
        width = self.span.element_size()
        part = self.span[start // width : (start + self.chunk) // width].to(torch.int64)
        return int((part * _keys(len(part), part.device)).sum())


class Samples:
    """Compares samples of several weights, and a part of all their elements, in little time.

    Args:
        elements: of the weights, as they were.
    """

    def __init__(self, elements: Sequence[Elements]) -> None:
        self._read, self._seen = _read_together(elements)
        #: elsewhere, one tensor and so one comparison for each device and dtype
        groups: dict[tuple[torch.device, torch.dtype], list[Elements]] = {}
        for each in elements:
            if not each.is_plain:
                groups.setdefault((each.span.device, each.span.dtype), []).append(each)
        self._others = list(groups.values())
        self._turns = cycle(_turns(elements))

    def is_same(self) -> bool:
        """True if no sample has changed."""
        if self._read() != self._seen:
            return False
        return all(
            torch.equal(
                torch.cat([torch.as_tensor(each.look()) for each in group]),
                torch.cat([torch.as_tensor(each.seen) for each in group]),
            )
            for group in self._others
        )

    def changed(self) -> Elements | None:
        """Compares the next part of all elements; returns where it has changed."""
        for elements, at in next(self._turns):
            if not elements.chunk_is_same(at):
                return elements
        return None


def _read_together(elements: Sequence[Elements]) -> tuple[Callable[[], bytes], bytes]:
    """Reads the samples of weights in the memory of the host by one call, and what they were; others are left out."""
    plain = [each for each in elements if each.is_plain]
    words = [each.sample for each in plain if isinstance(each.sample, np.ndarray)]
    # whatever lies between
    read, _ = _memory(np.concatenate(words)) if words else (bytes, None)
    return read, b"".join(each.seen.tobytes() for each in plain if isinstance(each.seen, np.ndarray))


def sampled_offsets(weight: Tensor) -> NDArray[np.int64]:
    """Which elements are sampled: how many elements after the first each lies, in order."""
    count = weight.numel()
    if not count:
        return np.empty(0, np.int64)
    order = sorted(range(weight.ndim), key=lambda at: (-weight.stride(at), -weight.shape[at]))
    # dimensions in the order of memory
    bits = _bits(weight).permute(order)
    slices = bits.shape[0] if bits.ndim and bits.shape[0] <= _SLICES else 1
    # each slice in as many pieces as make enough
    few, many = (slices * -(-pieces // slices) for pieces in (_MIDDLES, _PIECES))
    if count > _MIDDLES * _PIECES:
        positions = _diagonal(bits.shape)
        if bits.shape[0] < _LONG:
            positions = torch.cat([positions, _middles(count, few)[1]])
        if bool((bits.reshape(-1)[positions.to(bits.device)] != 0).all()):
            return np.unique(_offsets(bits, positions))
    inner = [_nonzero_slices(bits.movedim(at, 0)) for at in range(1, bits.ndim)]
    return np.unique(np.concatenate([_nonzero(bits, many), *inner]))


def _diagonal(shape: torch.Size) -> Tensor:
    """An element of each slice along the inner dimensions, or of each run of slices where there are many.

    With many slices along the first dimension, too, these are evenly spaced in memory.
    """
    count = max(_MIDDLES, *(size for size in shape[1:] if size <= _SLICES), 1)
    positions = torch.zeros(count, dtype=torch.int64)
    for size in shape:
        positions = positions * size + (2 * torch.arange(count) + 1) * size // (2 * count)
    return positions


def _nonzero_slices(bits: Tensor) -> NDArray[np.int64]:
    """An element of each slice along the first dimension, or of each of many runs, as :func:`_nonzero`."""
    flat = bits.reshape(len(bits), -1)
    first = (flat != 0).to(torch.uint8).argmax(1, keepdim=True)
    chosen = torch.arange(len(bits))
    if len(bits) > _SLICES:
        chosen = torch.from_numpy(_nonzero(flat.gather(1, first).flatten(), _PIECES))
    return _offsets(bits, chosen * flat.shape[1] + first.flatten().cpu()[chosen])


def _nonzero(bits: Tensor, pieces: int) -> NDArray[np.int64]:
    """An element of each of so many equal pieces, one that is not zero where there is any: offsets in memory."""
    flat = bits.reshape(-1)
    bounds, positions = _middles(bits.numel(), pieces)
    is_zero = (flat[positions.to(flat.device)] == 0).cpu()
    for piece in is_zero.nonzero().flatten().tolist():
        first, last = int(bounds[piece]), int(bounds[piece + 1])
        positions[piece] = first + int((flat[first:last] != 0).to(torch.uint8).argmax())
    return _offsets(bits, positions)


def _middles(count: int, pieces: int) -> tuple[Tensor, Tensor]:
    """The bounds and the middles of equal pieces."""
    bounds = torch.linspace(0, count, min(pieces, count) + 1, dtype=torch.float64).round().long()
    return bounds, (bounds[:-1] + bounds[1:]) // 2


def _offsets(bits: Tensor, positions: Tensor) -> NDArray[np.int64]:
    """Where in memory elements lie that are counted in the order of the dimensions."""
    offsets = np.zeros(len(positions), np.int64)
    rest = positions.numpy()
    for size, stride in zip(reversed(bits.shape), reversed(bits.stride()), strict=True):
        offsets += rest % size * stride
        rest = rest // size
    return offsets


def _words(span: Tensor, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """Addresses of the pairs of words with these elements."""
    start, end = span.data_ptr(), span.data_ptr() + span.numel() * span.element_size()
    words = (start + offsets * span.element_size()) // _WORD * _WORD
    beside = words ^ _WORD
    return np.unique(np.concatenate([words, beside[(beside >= start) & (beside + _WORD <= end)]]))


def _memory(words: NDArray[np.int64]) -> tuple[Callable[[], bytes], NDArray[np.int64]]:
    """Reads words at these addresses: a function that does, and what it reads now. Whoever calls keeps them alive."""
    if not len(words):
        return bytes, np.empty(0, np.int64)
    first = int(words.min())
    size = int(words.max()) + _WORD - first
    memory = np.frombuffer(memoryview((ctypes.c_char * size).from_address(first)), np.int64)
    index = (words - first) // _WORD

    def read() -> bytes:
        return memory.take(index, mode="clip").tobytes()

    return read, memory[index]


def _turns(elements: Sequence[Elements]) -> list[list[tuple[Elements, int]]]:
    """The chunks that are compared in each call."""
    total = sum(each.size for each in elements)
    turns: dict[int, list[tuple[Elements, int]]] = {}
    before = 0
    for each in elements:
        for at, start in enumerate(each.starts):
            turns.setdefault((before + start) * _TURNS // total, []).append((each, at))
        before += each.size
    return list(turns.values()) or [[]]


def _keys(count: int, device: torch.device) -> Tensor:
    """A factor for each place, odd: no change of a single element is lost."""
    return torch.arange(count, device=device) * _STEP + 1


def _span(value: Tensor) -> int:
    """Elements of memory from the first to the last."""
    return 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride(), strict=True))


def _bits(weight: Tensor) -> Tensor:
    """The values as integers: nan is not equal to itself."""
    value = weight.detach()
    if value.element_size() not in _INTEGERS:
        # complex numbers of two doubles
        value = torch.view_as_real(value)
    return value.view(_INTEGERS[value.element_size()])
