"""The times of the implementations of attention on a CPU, by the sizes of a call.

Both have scores and gradients of probabilities as exact as in fp32, and multiply probabilities and gradients of scores
in 16 bits:

* the flash kernel of torch goes through blocks of queries and keys, and multiplies two of them by calls of a library.
  With few queries and keys these calls take most of the time.
* two products of all heads, with a softmax between them, store the scores, and compute them again in the backward. What
  is in fp32 is two products in 16 bits: the second gives what rounding has taken from the first.

Constants are fitted to 22 sizes on a Zen 5, torch 2.13, one thread (2 to 256 heads, 16 to 2,048 queries), where the
backward kept probabilities and had two products fewer: two products took 0.42 to 0.86 of the flash kernel's time,
forward and backward 0.11 to 0.69 (1.1 where glibc hands memory back), but for a head of 2,048 x 2,048 scores (1.0 to
1.65) and, forward alone, for four heads of 16 x 16 (3.5). Predicted was 0.65 to 1.6 times what was found. Of a Zen 4
only the flash kernel's constants were measured. With AMX a product is so fast that softmax, copies and the start of a
product for each head are what takes time: what is found there stands in the profile, and counts in place of these.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx.graphs.calls import argument_value, graph_inputs_of, is_parameter
from amp_fx.precision.placement.profile import (
    FLASH,
    FLASH_BLOCKS,
    FLASH_QUERY,
    PRODUCTS,
    DeviceProfile,
)
from amp_fx.precision.plans.label import ReasonKind

#: share of the flash kernel's time from which products are taken: predictions are that good
PAYS = 0.88

#: keys in a block of the flash kernel; it skips blocks that a causal mask hides as a whole
_KEYS = 512
#: queries from which the flash kernel takes blocks of so many (``cpu_flash_attention`` of torch 2.13)
_QUERIES = ((768, 256), (192, 64), (0, 32))
#: operations of the softmax for a score, forward and backward: as many as a product in fp32 does meanwhile
_SOFTMAX = 70, 100
#: likewise where a causal mask is applied
_CAUSAL = 20
#: likewise for an element of an operand, which is laid out
_OPERAND = 10, 20
#: likewise for a score that is beyond the caches, and how many scores they hold
_BEYOND, _CACHE = 170, 2e6
#: products, forward and backward, which computes scores again: one in fp32 is two in 16 bits
_PRODUCTS = 3, 7
#: kernels and calls that there are besides the flash kernel's
_KERNELS = 5, 8
#: how many scores a thread has at a time in inference, where a head has no more: they stay in its cache, and in memory
#: that the block before has left. Each value is 1 MB; larger ones glibc hands back, and the next call faults them in
#: again: 48 x 256 x 256 took 1.33 of the flash kernel's time at once, and 0.53 in blocks
SCORES_AT_ONCE = 500_000
#: blocks in a call, or up to twice as many where they do not divide the heads: each takes 0.1 s to compile
_BLOCKS = 8
#: times the time of a copy of so many bytes that products take for a single query: 0.37 ns for 4 bytes (Zen 4 and
#: Sapphire Rapids, one thread)
_READS = 1.4


@dataclass(frozen=True)
class Attention:
    """The sizes of one call."""

    heads: int  # of all sequences of the batch together
    queries: int  # in a sequence
    keys: int
    width: int  # of a head
    causal: bool = False  # a query reads no later key
    training: bool = False  # the call is differentiated, so that both take a backward, too
    low_scores: bool = False  # the product that gives the scores is in 16 bits, too

    def flash(self, profile: DeviceProfile) -> float | None:
        """Seconds of the flash kernel, and of its backward; None where the profile does not know."""
        if not profile.calls.keys() >= set(FLASH):
            return None
        rows = next(rows for least, rows in _QUERIES if self.queries >= least)
        starts = range(0, self.queries, rows)
        read = [min(self.keys, start + rows) if self.causal else self.keys for start in starts]
        blocks = self.heads * sum(-(-keys // _KEYS) for keys in read)
        scores = self.heads * rows * sum(min(self.keys, -(-keys // _KEYS) * _KEYS) for keys in read)
        seconds = 0.0
        for (block, product), products in zip(FLASH_BLOCKS[: 1 + self.training], (2, 5), strict=False):
            flop = products * 2 * scores * self.width
            seconds += blocks * profile.calls[block] + flop * profile.calls[product]
        return seconds

    def products(self, profile: DeviceProfile) -> float:
        """Seconds of two products around a softmax, and of their backward."""
        scores = self.heads * self.queries * self.keys
        operands = self.heads * (self.queries + self.keys) * self.width
        wide, low = profile.peak["float32"], profile.peak["bfloat16"]
        found = PRODUCTS[: 1 + self.training]
        if profile.calls.keys() >= {name for names in found for name in names}:
            parts = zip(*found, strict=True)
            seconds = sum(
                work * sum(profile.calls[name] for name in names)
                for names, work in zip(parts, (self.heads, scores, operands), strict=True)
            )
            return seconds - self.low_scores * 2 * scores * self.width / low
        # in inference blocks of heads follow each other
        at_once = scores if self.training else max(self.queries * self.keys, scores // _BLOCKS)
        beyond = scores * max(0.0, 1 - _CACHE / at_once) * _BEYOND
        seconds = 0.0
        for backward in range(1 + self.training):
            products = _PRODUCTS[backward] - (self.low_scores and not backward)
            softmax = scores * (_SOFTMAX[backward] + _CAUSAL * self.causal) + beyond
            seconds += products * 2 * scores * self.width / low
            seconds += (softmax + operands * _OPERAND[backward]) / wide + _KERNELS[backward] * profile.launch
        return seconds


def heads_at_once(heads: int, scores: int, at_once: int) -> int:
    """How many heads make a block of about so many scores at once: nearly alike, twice :data:`_BLOCKS` at most."""
    fitting = max(1, at_once // scores, heads // _BLOCKS)
    return -(-heads // -(-heads // fitting))


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


def without_kernel(node: fx.Node, *, training: bool) -> ReasonKind | None:
    """Why torch takes no kernel for a call in training on a CPU, and writes products in fp32 instead; None: it may."""
    if not training:
        return None
    if argument_value(node, "dropout_p"):
        return ReasonKind.DROPOUT
    mask = argument_value(node, "attn_mask")
    is_learned = isinstance(mask, fx.Node) and any(map(is_parameter, graph_inputs_of(mask)))
    return ReasonKind.LEARNED_MASK if is_learned and mask.meta["val"].is_floating_point() else None


def refusal(node: fx.Node, *, training: bool) -> ReasonKind | None:
    """Why the products cannot compute a call, or nothing gains by it."""
    query, key, value = values = operands(node)
    if any(tensor.ndim != 4 for tensor in values):
        return ReasonKind.NO_HEADS
    is_single = isinstance(query.shape[-2], int) and query.shape[-2] == 1
    if is_single and training:
        return ReasonKind.QUERY_IN_TRAINING
    # the number of keys may be anything
    ends = [-1] if is_single and not argument_value(node, "is_causal") else [-2, -1]
    sizes = [size for tensor in values for size in (*tensor.shape[:2], *(tensor.shape[end] for end in ends))]
    if not all(isinstance(size, int) for size in sizes) and not without_kernel(node, training=training):
        return ReasonKind.UNKNOWN_SIZES
    if any(isinstance(size, int) and size == 0 for tensor in values for size in tensor.shape):
        return ReasonKind.EMPTY
    if argument_value(node, "dropout_p") and not training:
        return ReasonKind.DROPOUT
    return None if query.shape[-1] == key.shape[-1] == value.shape[-1] else ReasonKind.UNEQUAL_WIDTHS
