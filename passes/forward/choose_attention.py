"""Choose how attention is computed on a CPU: by the flash kernel, or as two products around a softmax."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from amp_fx.graphs.calls import argument_value
from amp_fx.graphs.keys import ATTENTION_MARK, CUSTOM
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.passes.base import Note, Pass, PassContext, PassResult, marked
from amp_fx.precision.placement.attention import (
    PAYS,
    Attention,
    operands,
    refusal,
    single_query,
    without_kernel,
)
from amp_fx.precision.plans.label import Reason, ReasonKind, label_of
from amp_fx.precision.policy.rules import Rule

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
#: takes dropout, and has a gradient of its mask
_WHOLE = torch.ops.aten._scaled_dot_product_efficient_attention.default

#: implementation -> the kind of its reason
_KINDS = {"flash": ReasonKind.FLASH, "products": ReasonKind.PRODUCTS, "products_low": ReasonKind.LOW_PRODUCTS}


@dataclass(frozen=True)
class ChooseAttention(Pass):
    """Says in the label of every attention in bf16 on a CPU what computes it, by what each takes for its sizes.

    Cases, first match wins:

    1. what the products cannot do is left to torch: sizes that are not known, other ranks than 4, heads of different
       widths, one query in training, dropout without gradients.
    2. ``numerics="eager"`` has what eager PyTorch has.
    3. a user's rule with ``"implementation"``.
    4. products, for sizes that are not known, too, in training with dropout or with a mask that has a gradient: there
       torch has no kernel, and multiplies in fp32.
    5. graphs without rates keep the kernel.
    6. a single query, whatever the number of keys, known or not: by what an element of a key takes. The products took
       0.08 to 0.6 of the kernel's time on a Zen 4, with 8 to 4,096 keys, and 0.7 to 1.3 of it with AMX (torch 2.13).
    7. the one that takes less time (:class:`amp_fx.precision.placement.attention.Attention`).

    Scores are as exact as in fp32, but with policy ``fast``, and in inference ``int8``: there they are in bf16.

    The graph is not changed. :class:`amp_fx.passes.inductor.attend.Attend` writes the products, forward and backward::

        scaled_dot_product_attention  low  two products ...; products take 0.42 of ... time for 12 x 64 x 64 scores
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        chosen, matched = 0, set[Rule]()
        for node in gm.graph.find_nodes(op="call_function", target=_ATTENTION):
            label = label_of(node)
            if label is None or label.dtype is not torch.bfloat16 or node.meta["val"].device.type != "cpu":
                continue
            rule = context.policy.rule_for(label.op, label.module_path)
            if rule is not None and rule.implementation is not None:
                # with operands that were low before, its precision changes nothing
                matched.add(rule)
            label.computed_by, why = choice(node, rule, context)
            others = [reason for reason in label.reasons if reason != why]
            label.reasons = (*others, Reason(_KINDS[label.computed_by]), why)
            chosen += label.computed_by != "flash"
        summary = f"{chosen} calls of attention are two products around a softmax"
        return PassResult(summary, chosen, {Note.MATCHED: matched})


def choice(node: fx.Node, rule: Rule | None, context: PassContext) -> tuple[str, Reason]:
    """The implementation of a call of attention in bf16 on a CPU, and why; ``rule`` is the user's about the call."""
    # scores as exact as the policy asks for: what int8 rounds is far beyond bf16's error of a score
    low_scores = context.policy.base == "fast" or (context.policy.base == "int8" and not context.training)
    products = "products_low" if low_scores else "products"
    if kind := refusal(node, training=context.training):
        return "flash", Reason(kind)
    if context.numerics == "eager":
        return "flash", Reason(ReasonKind.AS_EAGER)
    if rule is not None and rule.implementation is not None:
        how = products if rule.implementation == "products" else "flash"
        return how, Reason.of(ReasonKind.RULE, rule=str(rule))
    if why_none := without_kernel(node, training=context.training):
        return products, Reason(why_none)
    if context.profile is None:
        return "flash", Reason(ReasonKind.NO_RATES)
    query, key, _ = operands(node)
    *outer, queries, width = query.shape
    if queries == 1:
        # which is multiplied in fp32 anyway
        products, scores = "products", "a single query"
        times = single_query(context.profile)
        share = times and times[1] / times[2]
    else:
        heads, keys, is_causal = math.prod(outer), key.shape[-2], bool(argument_value(node, "is_causal"))
        sizes = Attention(heads, queries, keys, width, is_causal, context.training, low_scores)
        flash = sizes.flash(context.profile)
        share = flash and sizes.products(context.profile) / flash
        scores = f"{heads} x {queries} x {keys} scores"
    if share is None:
        return "flash", Reason(ReasonKind.NO_FLASH_TIMES)
    why = Reason.of(ReasonKind.PRODUCTS_TAKE, share=share, scores=scores)
    return products if share < PAYS else "flash", why


def keep_whole(gm: fx.GraphModule, computed_by: Mapping[str, str]) -> None:
    """Has marked calls of products that torch would decompose come whole to Inductor's joint graph, with a backward.

    They become an op that has a kernel on GPUs alone: whatever is left of it on a CPU fails to compile.
    ``computed_by`` has what computes marked calls.
    """
    graphs = [module.graph for module in gm.modules() if isinstance(module, fx.GraphModule)]
    for node in [
        node for graph in graphs for node in graph.find_nodes(op="call_function", target=_ATTENTION)
    ]:
        how = computed_by.get(marked(node, ATTENTION_MARK) or "", "")
        if how.startswith("products") and without_kernel(node, training=True):
            _keep_whole(node)


def _keep_whole(node: fx.Node) -> None:
    dropout, is_causal = argument_value(node, "dropout_p") or 0.0, bool(argument_value(node, "is_causal"))
    write = Rewriter(node.graph)
    with write.before(node):
        # with a head of key and value for each of the query: the op's gradients have no groups
        operands = [_spread(write, each, node.meta["val"].shape[:2]) for each in node.args[:3]]
        mask, scale = argument_value(node, "attn_mask"), argument_value(node, "scale")
        whole = write.call(_WHOLE, *operands, mask, True, dropout, is_causal, scale=scale)
        whole.meta[CUSTOM] = node.meta[CUSTOM]
        write.replace(node, write.call(operator.getitem, whole, 0))


def _spread(write: Rewriter, value: Any, outer: Sequence[Any]) -> fx.Node:
    """A key or a value for each sequence and head, where several share one."""
    batch, heads = outer
    _, groups, *_ = value.meta["val"].shape
    if groups not in (1, heads):
        value = write.call(torch.ops.aten.repeat_interleave.self_int, value, heads // groups, 1)
    if value.meta["val"].shape[:2] != tuple(outer):
        value = write.call(torch.ops.aten.expand.default, value, [batch, heads, -1, -1])
    return value
