"""Write attention on a CPU as two products around a softmax."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx._torch import write_as_it_is
from amp_fx.graphs.calls import argument_value, readers
from amp_fx.graphs.keys import ATTENTION_MARK
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.passes.base import Pass, PassContext, PassResult, marked
from amp_fx.precision.placement.attention import Block, blocks_of

aten, prims = torch.ops.aten, torch.ops.prims

_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default

#: what AOTAutograd puts between a value and its reader in the backward
_ALIASES = (aten.alias.default, aten.detach.default)


@dataclass(frozen=True)
class Attend(Pass):
    """Runs on Inductor's joint graph (forward and backward together).

    The flash kernel for CPU multiplies blocks of 32 to 256 queries, each by library calls of its own. With few queries
    and keys those calls take most of its time; one product of all heads does not have them. Rounded to 16 bits, scores
    and gradients of probabilities would double the error of the call. So each is two products in 16 bits: what the
    first has rounded off, its sum minus itself, is the second. Probabilities and the gradients of the scores are
    multiplied in 16 bits, as in the kernel. Without a backward, heads follow each other in blocks.

    Before (8 heads in a batch), and after::

        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)   # bf16[1, 8, 64, 32]
        out = operator.getitem(flash, 0)
        # after
        bmm = torch.ops.aten.bmm.default(q, k_t)                      # bf16[8, 64, 64]
        baddbmm = torch.ops.aten.baddbmm.default(bmm, q, k_t, beta=-1)
        scores = torch.ops.aten.add.Tensor(bmm_fp32, baddbmm_fp32)    # f32[8, 64, 64]
        exp = torch.ops.aten.exp.default(mul)                         # minus the largest of each row, times the scale
        probabilities = torch.ops.aten.mul.Tensor(exp, reciprocal)
        low = torch.ops.prims.convert_element_type.default(probabilities, torch.bfloat16)
        out = torch.ops.aten.bmm.default(low, v)                      # bf16[8, 64, 32], viewed as [1, 8, 64, 32]

    The backward reads ``probabilities`` and ``out``, and is written likewise: gradients of scores are rounded once, as
    in the kernel, which has probabilities in fp32, too. Calls are marked on the captured graph, by
    :class:`amp_fx.passes.forward.choose_attention.ChooseAttention`.
    """

    #: names in the plan of calls, and what computes them: with ``"products_low"``, scores are rounded to 16 bits
    computed_by: tuple[tuple[str, str], ...] = ()
    at_once: int | None = None  # scores in a block of heads, in inference; None: all

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        written, computed_by = 0, dict(self.computed_by)
        for flash in gm.graph.find_nodes(op="call_function", target=_FLASH):
            how = computed_by.get(marked(flash, ATTENTION_MARK) or "", "flash")
            if not how.startswith("products"):
                continue
            backwards = _readers_of_sums(flash)
            if all(reader.target is _FLASH_BACKWARD for reader in backwards):
                _write(flash, backwards, low_scores=how == "products_low", at_once=self.at_once)
                written += 1
        return PassResult(f"{written} calls of attention are two products around a softmax", written)


def _readers_of_sums(flash: fx.Node) -> list[fx.Node]:
    """What reads the second result, the logarithms of the sums of exponentials."""

    def passes_on(node: fx.Node) -> bool:
        return node.target is operator.getitem or node.target in _ALIASES

    sums = [item for item in flash.users if item.args[1] == 1]
    return [reader for item in sums for reader in readers(item, passes_on) if not passes_on(reader)]


def _write(flash: fx.Node, backwards: list[fx.Node], *, low_scores: bool, at_once: int | None) -> None:
    """Writes the products, and takes the kernel and its backwards out of the graph."""
    write = _Writer(_tensors(flash, 1)[0])
    with write.before(flash):
        at_once = None if backwards else at_once
        probabilities, out = _forward(write, flash, low_scores=low_scores, at_once=at_once)
    for backward in backwards:
        with write.before(backward):
            made = dict(enumerate(_backward(write, backward, probabilities, out)))
        for item in list(backward.users):
            item.replace_all_uses_with(made[item.args[1]])  # type: ignore[index]  # getitem's number
    for item in flash.users:
        if item.args[1] == 0:
            item.replace_all_uses_with(out)
    # results, aliases, backwards
    gone = {flash, *readers(flash, lambda reader: True)}
    for node in [node for node in reversed(flash.graph.nodes) if node in gone]:
        flash.graph.erase_node(node)


def _tensors(call: fx.Node, count: int) -> list[fx.Node]:
    """Its first arguments."""
    return [arg for arg in call.args[:count] if isinstance(arg, fx.Node)]


def _factor(call: fx.Node) -> float:
    """What scores are multiplied by; all operands of the kernel, and of its backward, have the width of the query."""
    scale = argument_value(call, "scale")
    return 1 / math.sqrt(_tensors(call, 1)[0].meta["val"].shape[-1]) if scale is None else scale


class _Writer(Rewriter):
    """Adds calls that compute attention; the heads are those of the query."""

    def __init__(self, query: fx.Node) -> None:
        super().__init__(query.graph, captured=False)
        self._heads = query.meta["val"].shape[1]

    def wide(self, node: fx.Node) -> fx.Node:
        return self.cast(node, torch.float32)

    def matrices(self, node: fx.Node) -> fx.Node:
        """``[batch * heads, rows, columns]`` of ``[batch, heads, rows, columns]``, or of a head for several."""
        *outer, _, columns = node.meta["val"].shape
        (batch, groups), heads = outer, self._heads
        if groups != heads:
            node = self(aten.unsqueeze.default, node, 2)
            node = self(aten.expand.default, node, [batch, groups, heads // groups, -1, columns])
            outer = [batch, heads]
        if not node.meta["val"].is_contiguous():
            node = self(aten.clone.default, node, memory_format=torch.contiguous_format)
        # how many rows is not always known
        return self(aten.view.default, node, [math.prod(outer), -1, columns])

    def part(self, node: fx.Node, dim: int, start: int, size: int) -> fx.Node:
        """So many of a dimension, from one on; all where it has no more, or stands for all."""
        value = node.meta["val"]
        if value.ndim < -dim or value.shape[dim] in (1, size):
            return node
        return self(aten.slice.Tensor, node, dim % value.ndim, start, start + size)

    def turned(self, node: fx.Node) -> fx.Node:
        return self(aten.permute.default, node, [0, 2, 1])

    def bmm(self, one: fx.Node, other: fx.Node) -> fx.Node:
        return self(aten.bmm.default, one, other)

    def wide_product(self, one: fx.Node, other: fx.Node) -> fx.Node:
        """The product in fp32: one in 16 bits, and what its rounding lost, which is a product of the same minus it."""
        high = self.bmm(one, other)
        lost = self(aten.baddbmm.default, high, one, other, beta=-1)
        return self(aten.add.Tensor, self.wide(high), self.wide(lost))

    def shaped(self, node: fx.Node, like: torch.Tensor) -> fx.Node:
        """Matrices as the kernel returns them: four dimensions, in the order of its strides."""
        batch, heads, *matrix = like.shape
        shared = node.meta["val"].shape[0] // (batch * heads)
        if shared > 1:
            # a head that several have read: their gradients are added in fp32
            parts = self(aten.view.default, self.wide(node), [batch, heads, shared, *matrix])
            node = self.cast(self(aten.sum.dim_IntList, parts, [2]), like.dtype)
        node = self(aten.view.default, node, list(like.shape))
        order = sorted(range(like.ndim), key=lambda dim: (-like.stride(dim), dim))
        if order == list(range(like.ndim)):
            return node
        turned = self(aten.permute.default, node, order)
        turned = self(aten.clone.default, turned, memory_format=torch.contiguous_format)
        return self(aten.permute.default, turned, [order.index(dim) for dim in range(like.ndim)])


def _forward(
    write: _Writer, flash: fx.Node, *, low_scores: bool, at_once: int | None
) -> tuple[fx.Node, fx.Node]:
    """The probabilities of the last block in fp32, ``[heads of it, queries, keys]``, and the kernel's result."""
    query, key, value = _tensors(flash, 3)
    batch, heads, queries, _ = query.meta["val"].shape
    if queries == 1:
        # Inductor reads the keys once, where they lie, and adds up in fp32
        query, key = write.wide(query), write.wide(key)
        # once, too: it would be worked out for each key, with its rotary embedding
        write_as_it_is(query)
    matrices = write.matrices(query), write.turned(write.matrices(key)), write.matrices(value)
    mask = argument_value(flash, "attn_mask")
    if mask is not None and queries > 1 and _is_shared(mask, heads):
        # else it is worked out for each score, twice
        write_as_it_is(mask)
    blocks = [Block(0, batch, 0, heads)]
    if at_once is not None and queries > 1:
        blocks = blocks_of(batch, heads, queries, key.meta["val"].shape[-2], at_once)
    outs = []
    for block in blocks:
        start, count = block.sequence * heads + block.head, block.sequences * block.heads
        rows, columns, values = (write.part(each, 0, start, count) for each in matrices)
        if queries == 1 or low_scores:
            scores = write.wide(write.bmm(rows, columns))
        else:
            scores = write.wide_product(rows, columns)
        probabilities = _softmax(flash, write, scores, mask, block)
        outs.append(write.bmm(write.cast(probabilities, value.meta["val"].dtype), values))
    out = outs[0] if len(outs) == 1 else write(aten.cat.default, outs)
    return probabilities, write.shaped(out, flash.meta["val"][0])


def _is_shared(mask: fx.Node, heads: int) -> bool:
    """Whether a mask is computed in the graph, and one for all heads."""
    shape = mask.meta["val"].shape
    return mask.op != "placeholder" and heads > 1 and (len(shape) < 3 or shape[-3] == 1)


def _softmax(flash: fx.Node, write: _Writer, scores: fx.Node, mask: fx.Node | None, block: Block) -> fx.Node:
    """Probabilities of the scores of a block."""
    factor, queries = _factor(flash), scores.meta["val"].shape[-2]
    # Inductor looks for a scale in front of a softmax, and would keep a way for scores that are not finite
    late = mask is None and factor > 0
    if not late:
        scores = write(aten.mul.Tensor, scores, factor)
    if mask is not None:
        mask = write.part(mask, -4, block.sequence, block.sequences)
        mask = write.part(mask, -3, block.head, block.heads)
        # in four dimensions to the end: Inductor fuses no loops over three with them
        scores = write(aten.view.default, scores, [block.sequences, block.heads, queries, -1])
        scores = write(aten.add.Tensor, scores, write.wide(mask))
    device = scores.meta["val"].device
    if argument_value(flash, "is_causal"):
        options = {"start": 0, "step": 1, "dtype": torch.int64, "device": device, "requires_grad": False}
        rows, columns = (write(prims.iota.default, size, **options) for size in scores.meta["val"].shape[-2:])
        seen = write(aten.ge.Tensor, write(aten.unsqueeze.default, rows, 1), columns)
        hidden = write(aten.full.default, [], -math.inf, dtype=torch.float32, device=device)
        scores = write(aten.where.self, seen, scores, hidden)
    largest = write(aten.amax.default, scores, [-1], True)
    if mask is not None:
        # a row in which all is masked: the kernel returns zeros
        nothing = write(aten.eq.Scalar, largest, -math.inf)
        zero = write(aten.full.default, [], 0.0, dtype=torch.float32, device=device)
        largest = write(aten.where.self, nothing, zero, largest)
    below = write(aten.sub.Tensor, scores, largest)
    exp = write(aten.exp.default, write(aten.mul.Tensor, below, factor) if late else below)
    total = write(aten.sum.dim_IntList, exp, [-1], True)
    if mask is not None:
        total = write(aten.where.self, nothing, write(aten.add.Tensor, total, 1.0), total)
    probabilities = write(aten.mul.Tensor, exp, write(aten.reciprocal.default, total))
    return write(aten.view.default, probabilities, [block.sequences * block.heads, queries, -1])


def _backward(write: _Writer, backward: fx.Node, probabilities: fx.Node, out: fx.Node) -> list[fx.Node]:
    """The gradients of query, key and value."""
    gradient, query, key, value = _tensors(backward, 4)
    factor, low = _factor(backward), value.meta["val"].dtype
    g = write.matrices(gradient)
    # turned first: the forward's cast would be kept for the backward beside the probabilities
    of_value = write.bmm(write.cast(write.turned(probabilities), low), g)
    of_probabilities = write.wide_product(g, write.turned(write.matrices(value)))
    row = write(aten.mul.Tensor, write.wide(gradient), write.wide(out))
    row = write(aten.sum.dim_IntList, row, [-1], True)
    row = write(aten.view.default, row, [*of_probabilities.meta["val"].shape[:2], 1])
    of_scores = write(aten.mul.Tensor, probabilities, write(aten.sub.Tensor, of_probabilities, row))
    of_scores = write.cast(write(aten.mul.Tensor, of_scores, factor), low)
    of_query = write.bmm(of_scores, write.matrices(key))
    of_key = write.bmm(write.turned(of_scores), write.matrices(query))
    made = (of_query, of_key, of_value)
    return [write.shaped(each, value) for each, value in zip(made, backward.meta["val"], strict=True)]
