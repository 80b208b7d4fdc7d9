"""What the ways to compute attention on a CPU take, by the sizes of a call.

Both keep scores and gradients of probabilities in fp32, and multiply probabilities and gradients of scores in 16 bits:

* the flash kernel of torch goes through blocks of queries and keys, and multiplies two of them by calls of a library.
  With few queries and keys these calls take most of the time.
* two products of all heads, with a softmax between them, store the scores. With many queries and keys they leave the
  caches, and each pass over them reads memory.

Constants are fitted to 18 sizes on a Zen 4, torch 2.13, one thread (12 to 384 heads, 32 to 1024 queries): two
products took 0.19 to 1.47 of the flash kernel's time, forward and backward; predicted was 0.8 to 1.3 times what was
found. That was with 16-bit probabilities in the backward; fp32, 9 to 16 % of a call, is part of its softmax. With AMX
(Sapphire Rapids, one thread, 6 sizes) two products took 0.20 to 2.0 of the kernel's time, and 1.6 to 5 times as long in
the forward alone; predicted was 0.7 to 1.05 times what was found.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx.graphs.calls import argument_value, graph_inputs_of, is_parameter
from amp_fx.placement.profile import FLASH_BLOCK, FLASH_BLOCK_BACKWARD, FLASH_QUERY, DeviceProfile

#: share of the flash kernel's time from which products are taken: predictions are that good
PAYS = 0.88

#: keys in a block of the flash kernel; it skips blocks that a causal mask hides as a whole
_KEYS = 512
#: queries from which the flash kernel takes blocks of so many (``cpu_flash_attention`` of torch 2.13)
_QUERIES = ((768, 256), (192, 64), (0, 32))
#: share of the rate of products in 16 bits that the flash kernel reaches inside, in the forward and in the backward,
#: and how often that in fp32 the backward reaches at most: with AMX it stays far below the first
_FLASH_REACHES = 0.45, 0.65
_BACKWARD_REACHES = 1.9
#: share of the nominal rates that two products of all heads reach
_PRODUCTS_REACH = 1.5
#: operations of the softmax for a score, forward and backward: as many as a product in fp32 does meanwhile
_SOFTMAX = 70, 150
#: likewise where a row of scores is no multiple of a vector, and where a causal mask is applied
_RAGGED, _CAUSAL = 55, 40
#: likewise for an element of an operand, which is widened and laid out
_OPERAND = 130, 180
#: likewise for a score that is beyond the caches, and how many scores they hold
_BEYOND, _CACHE = 170, 2e6
#: times the time of a copy of so many bytes that products take for a single query: 0.37 ns for 4 bytes (Zen 4 and
#: Sapphire Rapids, one thread)
_READS = 1.4
#: products that are taken in fp32 and in 16 bits, forward and backward
_WIDE, _LOW = (1, 1), (1, 3)


@dataclass(frozen=True)
class Attention:
    """The sizes of one call."""

    heads: int  # of all sequences of the batch together
    queries: int  # in a sequence
    keys: int
    width: int  # of a head
    causal: bool = False  # a query reads no later key
    training: bool = False  # the call is differentiated, so that both take a backward, too
    low_scores: bool = False  # the product that gives the scores is in 16 bits, too (policy fast)

    def flash(self, profile: DeviceProfile) -> float | None:
        """Seconds of the flash kernel, and of its backward; None where the profile does not know."""
        if FLASH_BLOCK not in profile.calls or FLASH_BLOCK_BACKWARD not in profile.calls:
            return None
        rows = next(rows for least, rows in _QUERIES if self.queries >= least)
        starts = range(0, self.queries, rows)
        read = [min(self.keys, start + rows) if self.causal else self.keys for start in starts]
        blocks = self.heads * sum(-(-keys // _KEYS) for keys in read)
        scores = self.heads * rows * sum(min(self.keys, -(-keys // _KEYS) * _KEYS) for keys in read)
        seconds = 0.0
        for backward, block in enumerate((FLASH_BLOCK, FLASH_BLOCK_BACKWARD)[: 1 + self.training]):
            products = (2, 5)[backward]
            rate = profile.peak["bfloat16"] * _FLASH_REACHES[backward]
            rate = min(rate, profile.peak["float32"] * _BACKWARD_REACHES) if backward else rate
            seconds += blocks * profile.calls[block] + products * 2 * scores * self.width / rate
        return seconds

    def products(self, profile: DeviceProfile) -> float:
        """Seconds of two products around a softmax, and of their backward."""
        scores = self.heads * self.queries * self.keys
        operands = self.heads * (self.queries + self.keys) * self.width
        each = _RAGGED * (self.keys % 16 > 0) + _CAUSAL * self.causal
        beyond = max(0.0, scores - _CACHE) * _BEYOND
        wide, low = profile.peak["float32"], profile.peak["bfloat16"]
        seconds = 0.0
        for backward in range(1 + self.training):
            lowered = self.low_scores and not backward
            products = (_WIDE[backward] - lowered) / wide + (_LOW[backward] + lowered) / low
            seconds += 2 * scores * self.width * products / _PRODUCTS_REACH
            seconds += (scores * (_SOFTMAX[backward] + each) + operands * _OPERAND[backward] + beyond) / wide
        return seconds


def single_query(profile: DeviceProfile) -> tuple[float, float, float] | None:
    """Seconds that one query takes for an element of a key and of a value: in fp32, by products, by the flash kernel.

    The first two read each once, where it lies. None where the profile does not know the kernel's time.
    """
    read, kernel = 2 * torch.bfloat16.itemsize / profile.bandwidth, profile.calls.get(FLASH_QUERY)
    return None if kernel is None else (2 * read, _READS * read, kernel)


# ---- what products can do


def operands(node: fx.Node) -> list[torch.Tensor]:
    """Query, key and value of a call of attention, fake."""
    return [source.meta["val"] for source in node.args[:3] if isinstance(source, fx.Node)]


def refusal(node: fx.Node, *, training: bool) -> str:
    """Why the products cannot compute a call, or nothing gains by it; else an empty string."""
    query, key, value = values = operands(node)
    if any(tensor.ndim != 4 for tensor in values):
        return "no heads in a dimension of their own"
    is_single = isinstance(query.shape[-2], int) and query.shape[-2] == 1
    if is_single and training:
        return "a single query in training"
    # the number of keys may be anything
    ends = [-1] if is_single and not argument_value(node, "is_causal") else [-2, -1]
    if not all(
        isinstance(size, int)
        for tensor in values
        for size in (*tensor.shape[:2], *(tensor.shape[end] for end in ends))
    ):
        return "its sizes are not known"
    if argument_value(node, "dropout_p"):
        return "it drops probabilities"
    mask = argument_value(node, "attn_mask")
    is_learned = isinstance(mask, fx.Node) and any(map(is_parameter, graph_inputs_of(mask)))
    if training and is_learned and mask.meta["val"].is_floating_point():
        # then torch takes neither: it writes products itself
        return "its mask has a gradient"
    if not query.shape[-1] == key.shape[-1] == value.shape[-1]:
        return "keys and values of different widths"
    return ""
