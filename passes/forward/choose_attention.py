"""Choose how attention is computed on a CPU: by the flash kernel, or as two products around a softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx.graphs.calls import argument_value
from amp_fx.passes.base import Note, Pass, PassContext, PassResult
from amp_fx.precision.placement.attention import PAYS, Attention, operands, refusal, single_query
from amp_fx.precision.plans.label import Kind, Reason, label_of
from amp_fx.precision.policy.rules import Rule

#: implementation -> the kind of its reason
_KINDS = {"flash": Kind.FLASH, "products": Kind.PRODUCTS, "products_low": Kind.LOW_PRODUCTS}


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

        scaled_dot_product_attention  low  two products ...: products take 0.42 of its time for 12 x 64 x 64 scores
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        chosen, matched = 0, set[Rule]()
        for node in gm.graph.find_nodes(
            op="call_function", target=torch.ops.aten.scaled_dot_product_attention.default
        ):
            plan = label_of(node)
            if plan is None or plan.dtype is not torch.bfloat16 or node.meta["val"].device.type != "cpu":
                continue
            rule = context.policy.rule_for(plan.op, plan.module_path)
            if rule is not None and rule.implementation is not None:
                # with operands that were low before, its precision changes nothing
                matched.add(rule)
            plan.computed_by, why = choice(node, rule, context)
            plan.reasons += (Reason.of(_KINDS[plan.computed_by], why=why),)
            chosen += plan.computed_by != "flash"
        summary = f"{chosen} calls of attention are two products around a softmax"
        return PassResult(summary, chosen, {Note.MATCHED: matched})


def choice(node: fx.Node, rule: Rule | None, context: PassContext) -> tuple[str, str]:
    """The implementation of a call of attention in bf16 on a CPU, and why; ``rule`` is the user's about the call."""
    if why := refusal(node, training=context.training):
        return "flash", why
    if context.numerics == "eager":
        return "flash", "as eager PyTorch has it"
    if rule is not None and rule.implementation is not None:
        return _products(context) if rule.implementation == "products" else "flash", "as the rule has it"
    if context.profile is None:
        return "flash", "without a profile nothing is known of their times"
    query, key, _ = operands(node)
    *outer, queries, width = query.shape
    if queries == 1:
        times = single_query(context.profile)
        return _cheaper("products", times and times[1] / times[2], "a single query")
    sizes = Attention(
        heads=math.prod(outer),
        queries=queries,
        keys=key.shape[-2],
        width=width,
        causal=bool(argument_value(node, "is_causal")),
        training=context.training,
        low_scores=_products(context) == "products_low",
    )
    flash = sizes.flash(context.profile)
    share = flash and sizes.products(context.profile) / flash
    return _cheaper(_products(context), share, f"{sizes.heads} x {sizes.queries} x {sizes.keys} scores")


def _products(context: PassContext) -> str:
    """Products with scores as exact as the policy asks for: what int8 rounds is far beyond bf16's error of a score."""
    rounds = context.policy.base == "fast" or (context.policy.base == "int8" and not context.training)
    return "products_low" if rounds else "products"


def _cheaper(products: str, share: float | None, what: str) -> tuple[str, str]:
    if share is None:
        return "flash", "the profile has no times of the flash kernel"
    return products if share < PAYS else "flash", f"products take {share:.2f} of its time for {what}"
