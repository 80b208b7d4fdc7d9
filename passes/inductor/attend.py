"""Write attention on a CPU as two products around a softmax."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from amp_fx._torch import size_hint, write_as_it_is
from amp_fx.graphs.calls import args_of, argument_value, readers
from amp_fx.graphs.keys import ATTENTION_MARK
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.passes.base import Pass, PassContext, PassResult, marked
from amp_fx.precision.placement.attention import heads_at_once

aten = torch.ops.aten

_FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
#: op that stands for a call of attention -> the op that stands for its backward. On a CPU, the second pair is what
#: :func:`amp_fx.passes.forward.choose_attention.keep_whole` has written
_CALLS = {
    _FLASH: aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
    aten._scaled_dot_product_efficient_attention.default: (
        aten._scaled_dot_product_efficient_attention_backward.default
    ),
}


@dataclass(frozen=True)
class Attend(Pass):
    """Runs on Inductor's joint graph (forward and backward together).

    The flash kernel for CPU multiplies blocks of 32 to 256 queries, each by library calls of its own. With few queries
    and keys those calls take most of its time; one product of all heads does not have them. Rounded to 16 bits, scores
    and gradients of probabilities would double the error of the call. So each of them is the sum of two products in 16
    bits: the second is the same product minus the first, which is what rounding has taken from the first. Probabilities
    and the gradients of the scores are multiplied in 16 bits, as in the kernel. Heads follow each other in blocks.

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

    The backward keeps what the kernel keeps: operands, ``out`` and statistics of each row. It computes
    probabilities again, in fp32 as in the kernel, and rounds gradients of scores once.
    :class:`amp_fx.passes.forward.choose_attention.ChooseAttention` has marked the calls on the captured graph.
    """

    #: names in the plan of calls, and what computes them: with ``"products_low"``, scores are rounded to 16 bits
    computed_by: tuple[tuple[str, str], ...] = ()
    at_once: int | None = None  # scores in a block of heads; None: all

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        written, computed_by = 0, dict(self.computed_by)
        for call in [node for node in gm.graph.nodes if node.target in _CALLS]:
            how = computed_by.get(marked(call, ATTENTION_MARK) or "", "flash")
            # by the second result, the logarithms of the sums of exponentials, which nothing else reads
            sums = [item for item in call.users if item.args[1] == 1]
            found = [reader for item in sums for reader in readers(item, _passes_on)]
            backwards = [reader for reader in found if not _passes_on(reader)]
            if how.startswith("products") and all(node.target is _CALLS[call.target] for node in backwards):
                _write(call, backwards, low_scores=how == "products_low", at_once=self.at_once)
                written += 1
        # what was traced has calls that nothing reads, such as probabilities without a backward
        if written:
            gm.graph.eliminate_dead_code()
        return PassResult(f"{written} calls of attention are two products around a softmax", written)


def _passes_on(node: fx.Node) -> bool:
    """Whether AOTAutograd puts such a call between a value and its reader in the backward."""
    return node.target in (aten.alias.default, aten.detach.default)


def _write(call: fx.Node, backwards: list[fx.Node], *, low_scores: bool, at_once: int | None) -> None:
    """Has all readers of the kernel's result, and of its backwards' results, read those of products."""
    write = Rewriter(call.graph, captured=False)
    query, key, value = args_of(call)[:3]
    _, heads, queries, width = sizes = query.meta["val"].shape
    scale = argument_value(call, "scale")
    mask = argument_value(call, "attn_mask") or argument_value(call, "attn_bias")
    is_known = all(isinstance(size, int) for size in (*sizes, key.meta["val"].shape[-2]))
    how = {
        "scale": 1 / math.sqrt(width) if scale is None else scale,
        "is_causal": bool(argument_value(call, "is_causal")),
        "low_scores": low_scores,
        "at_once": at_once if is_known and queries != 1 else None,
        "dropout": argument_value(call, "dropout_p") or 0.0,
    }
    with write.before(call):
        if isinstance(queries, int) and queries == 1:
            # Inductor reads the keys once, where they lie, and adds up in fp32
            query, key = write.cast(query, torch.float32), write.cast(key, torch.float32)
            # once, too: it would be worked out for each key, with its rotary embedding
            write_as_it_is(query)
        elif mask is not None and mask.op != "placeholder" and heads > 1:
            shape = mask.meta["val"].shape
            if len(shape) < 3 or shape[-3] == 1:
                # all heads have the same, which would be worked out for each score, twice
                write_as_it_is(mask)
        statistics, out, kept = write.trace(
            products, query, key, value, mask, **how, like=call.meta["val"][0]
        )
    made = {(call, 0): out}
    for backward in backwards:
        of_mask = argument_value(backward, "grad_input_mask") or [False]
        with write.before(backward):
            # the kernel has these numbers; torch's own products have those that rounding the result does not touch
            of_rows = out if call.target is _FLASH else None
            operands = *args_of(backward)[:4], statistics, of_rows, mask, kept
            of_operands = write.trace(
                gradients, *operands, **how, like=backward.meta["val"], of_mask=of_mask[-1]
            )
        made |= {(backward, at): node for at, node in enumerate(of_operands)}
    for (source, at), node in made.items():
        for item in [item for item in source.users if item.args[1] == at]:
            item.replace_all_uses_with(node)
    # results, aliases, backwards; by hand: the kernel may draw numbers, and such calls stay though nothing reads them
    gone = {call, *readers(call, lambda _: True)}
    for node in [node for node in reversed(call.graph.nodes) if node in gone]:
        call.graph.erase_node(node)


def products(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None,
    *, scale: float, is_causal: bool, low_scores: bool, at_once: int | None, dropout: float, like: Tensor,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Attention, to be traced: statistics of each row, what the kernel returns, and which probabilities are kept.

    Operands are ``[batch, heads, rows, width]``. Query and key are in fp32 where the query is a single one; one head of
    key and value may be for several of the query. The statistics, ``[batch * heads, rows, 2]`` in fp32,
    are the largest score and 1 over the sum of exponentials of what is below it. With ``dropout``, the share of the
    probabilities that are dropped, the last result has a bool for each score. ``at_once`` are the scores of a block
    of heads, None: all; ``like`` has the kernel's result.
    """
    heads, kept = query.shape[1], None
    operands: list[Tensor | None] = [_matrices(each, heads) for each in (query, key, value)]
    operands += [None if mask is None else _mask(mask, query, key)]
    if dropout:
        # as torch draws them, also where Inductor is to draw as eager PyTorch does
        ones = torch.ones(query.shape[0] * heads, query.shape[-2], key.shape[-2], device=query.device)
        _, kept = aten.native_dropout(ones, dropout, True)
    sums, outs = [], []
    for q, k, v, m, kept_here in _blocks([*operands, kept], at_once):
        scores = _scores(q, k.mT, low_scores)
        probabilities, statistics = _softmax(scores, m, scale=scale, is_causal=is_causal)
        sums.append(statistics)
        outs.append(torch.bmm(_dropped(probabilities, kept_here, dropout).to(v.dtype), v))
    return _joined(sums), _laid_out(_joined(outs), query.shape, like), kept


def _dropped(values: Tensor, kept: Tensor | None, dropout: float) -> Tensor:
    """What dropout leaves of values, so that their mean stays; its backward is the same."""
    return values if kept is None else values * kept * (1 / (1 - dropout) if dropout < 1 else 0.0)


def _softmax(
    scores: Tensor, mask: Tensor | None = None, *, scale: float, is_causal: bool
) -> tuple[Tensor, Tensor]:
    """Probabilities, zeros for a query from which all keys are masked, as the kernel has them; statistics of rows."""
    # Inductor looks for a scale in front of a softmax, and would keep a way for scores that are not finite
    is_late = mask is None and scale > 0
    scores = scores if is_late else scores * scale
    scores = scores if mask is None else scores + mask
    if is_causal:
        rows, columns = (torch.arange(size, device=scores.device) for size in scores.shape[-2:])
        scores = scores.where(rows[:, None] >= columns, -math.inf)
    largest = scores.amax(-1, keepdim=True)
    if mask is not None:
        largest = largest.clamp(min=torch.finfo(torch.float32).min)
    below = scores - largest
    exp = (below * scale if is_late else below).exp()
    total = exp.sum(-1, keepdim=True)
    # 1 or more where a key is seen
    total = total if mask is None else total.clamp(min=1)
    # apart: the logarithm of the sum would be lost beside the largest of a row that a mask of finite numbers hides
    shares = total.reciprocal()
    return exp * shares, torch.cat([largest * scale if is_late else largest, shares], -1)


def gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, statistics: Tensor,
    out: Tensor | None, mask: Tensor | None, kept: Tensor | None,
    *, scale: float, is_causal: bool, low_scores: bool, at_once: int | None, dropout: float, like: Sequence[Any],
    of_mask: bool,
) -> list[Tensor]:  # fmt: skip
    """The gradients of query, key, value, and the mask's with ``of_mask``, to be traced.

    ``statistics``, ``out`` and ``kept`` are :func:`products`'s. With ``out``, what is subtracted from the gradients
    of a row's probabilities is computed from it, as in the kernel, else from them, in fp32. Probabilities are
    computed again, with a row for each key: a call that stands in the forward, too, would be one with that of the
    forward, and its result would be kept.
    """
    heads = query.shape[1]
    operands: list[Tensor | None] = [_matrices(each, heads) for each in (query, key, value, gradient)]
    row = None if out is None else (gradient.float() * out.float()).sum(-1).view(*statistics.shape[:2], 1)
    operands += [statistics, row, None if mask is None else _mask(mask, query, key), kept]
    # three values are there of each score, where the forward has one
    at_once = None if at_once is None else at_once // 3
    made: list[list[Tensor]] = [[] for _ in range(3 + of_mask)]
    for q, k, v, g, of_rows, total, m, kept_here in _blocks(operands, at_once):
        scores = _scores(k, q.mT, low_scores) * scale
        scores = scores if m is None else scores + m.mT
        if is_causal:
            rows, columns = (torch.arange(size, device=scores.device) for size in scores.shape[-2:])
            scores = scores.where(rows[:, None] <= columns, -math.inf)
        largest, shares = of_rows.mT.split(1, -2)
        probabilities = (scores - largest).exp() * shares
        kept_here = None if kept_here is None else kept_here.mT
        of_value = torch.bmm(_dropped(probabilities, kept_here, dropout).to(v.dtype), g)
        of_probabilities = _dropped(_exact_product(v, g.mT), kept_here, dropout)
        if total is None:
            total = (probabilities * of_probabilities).sum(-2, keepdim=True).mT
        of_scores = probabilities * (of_probabilities - total.mT)
        low = (of_scores * scale).to(v.dtype)
        parts = [torch.bmm(low.mT, k), torch.bmm(low, q), of_value, *([of_scores.mT] if of_mask else [])]
        for found, part in zip(made, parts, strict=True):
            found.append(part)
    joined = [_joined(parts) for parts in made]
    shapes = [each.shape for each in (query, key, value)]
    results = [_laid_out(*each) for each in zip(joined[:3], shapes, like[:3], strict=True)]
    if of_mask and mask is not None:
        shape = *query.shape[:3], key.shape[-2]
        results.append(joined[3].view(shape).sum_to_size(mask.shape).to(mask.dtype))
    return results


def _blocks(operands: list[Any], at_once: int | None) -> Iterator[list[Any]]:
    """Blocks of heads with about ``at_once`` scores of the first operand's rows and the second's; None: one block.

    In place of an operand may stand None.
    """
    if at_once is None:
        yield operands
        return
    count, scores = len(operands[0]), operands[0].shape[1] * operands[1].shape[1]
    size = heads_at_once(count, scores, at_once)
    for start in range(0, count, size):
        yield [None if each is None else each[start : start + size] for each in operands]


def _joined(blocks: list[Tensor]) -> Tensor:
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _scores(one: Tensor, other: Tensor, low: bool) -> Tensor:
    """The product of queries and keys in fp32, rounded to 16 bits where ``low``."""
    return torch.bmm(one, other).float() if low or one.dtype is torch.float32 else _exact_product(one, other)


def _exact_product(one: Tensor, other: Tensor) -> Tensor:
    """The product in fp32: the one in 16 bits, plus a second that gives what rounding has taken from the first."""
    high = torch.bmm(one, other)
    return high.float() + torch.baddbmm(high, one, other, beta=-1).float()


def _matrices(tensor: Tensor, heads: int) -> Tensor:
    """``[batch * heads, rows, columns]`` of ``[batch, heads, rows, columns]``, or of a head for several."""
    _, groups, *_ = tensor.shape
    if groups != heads:
        tensor = tensor[:, :, None].expand(-1, -1, heads // groups, -1, -1).flatten(1, 2)
    # a batch of one is a view else, of rows that lie apart
    return tensor.contiguous().flatten(0, 1)


def _mask(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The mask that is added, as ``[batch * heads, queries, keys]`` in fp32; bools say what is seen."""
    if mask.dtype is torch.bool:
        mask = torch.zeros((), device=mask.device).where(mask, -math.inf)
    return mask.float().expand(*query.shape[:3], key.shape[-2]).flatten(0, 1)


def _laid_out(matrices: Tensor, shape: Sequence[Any], like: Tensor) -> Tensor:
    """Matrices as the kernel returns them: four dimensions, in the order of its strides."""
    batch, heads, *matrix = shape
    if isinstance(heads, int) and isinstance(batch, int) and matrices.shape[0] > batch * heads:
        # a head that several have read: their gradients are added in fp32
        matrices = matrices.view(batch, heads, -1, *matrix).float().sum(2).to(like.dtype)
    order = sorted(range(4), key=lambda dim: -size_hint(like.stride(dim)))
    laid_out = matrices.view(shape).permute(order).contiguous()
    return laid_out.permute([order.index(dim) for dim in range(4)])
