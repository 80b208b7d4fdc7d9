"""Choose how attention is computed on a CPU: by the flash kernel, or as two products around a softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx.graphs.calls import argument_value
from amp_fx.passes.base import Note, Pass, PassContext, PassResult
from amp_fx.precision.placement.attention import PAYS, Attention, operands, refusal, single_query
from amp_fx.precision.plans.label import Reason, ReasonKind, label_of
from amp_fx.precision.policy.rules import Rule

#: implementation -> the kind of its reason
_KINDS = {"flash": ReasonKind.FLASH, "products": ReasonKind.PRODUCTS, "products_low": ReasonKind.LOW_PRODUCTS}


@dataclass(frozen=True)
class ChooseAttention(Pass):
    """Says in the label of every attention in bf16 on a CPU what computes it, by what each takes for its sizes.

    Cases, first match wins:

    1. what the products cannot do is left to the flash kernel: dropout, sizes that are not known, other ranks than 4,
       heads of different widths, a mask with a gradient, one query in training.
    2. ``numerics="eager"`` and graphs without rates keep the kernel.
    3. a user's rule with ``"implementation"``.
    4. a single query, whatever the number of keys, known or not: by what an element of a key takes. The products took
       0.08 to 0.6 of the kernel's time on a Zen 4, with 8 to 4,096 keys, and 0.7 to 1.3 of it with AMX (torch 2.13).
    5. the one that takes less time (:class:`amp_fx.precision.placement.attention.Attention`).

    Scores are as exact as in fp32, but with policy ``fast``, and in inference ``int8``: there they are in bf16.

    The graph is not changed. :class:`amp_fx.passes.inductor.attend.Attend` writes the products, forward and backward::

        scaled_dot_product_attention  low  two products ...; products take 0.42 of ... time for 12 x 64 x 64 scores
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        chosen, matched = 0, set[Rule]()
        for node in gm.graph.find_nodes(
            op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
        ):
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
