"""Which calls of a plan are matmuls."""

from __future__ import annotations

from collections.abc import Iterator

from amp_fx._torch import nesting_change
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.plans.plan import NodePlan, Plan

__all__ = ["matmuls", "untouched_matmuls"]


def matmuls(plan: Plan) -> list[NodePlan]:
    """Matmuls, convolutions, attention and recurrent layers that amp_fx decides about, in graph order."""
    return [node for node in plan.nodes if node.flops or has_trait(node.op, Trait.RECURRENT)]


def untouched_matmuls(plan: Plan) -> list[NodePlan]:
    """Matmuls, convolutions and attention inside ``vmap`` and ``torch.func``: they stay as the program has them."""
    # the captured graph has no ATen calls there: these are their names in torch
    kinds = Trait.MATMUL, Trait.UNCOUNTED_MATMUL
    return [node for node in _inside_torch_func(plan) if has_trait(node.op.strip("_"), *kinds)]


def _inside_torch_func(plan: Plan) -> Iterator[NodePlan]:
    level = 0
    for node in plan.nodes:
        level += nesting_change(node.op)
        if level:
            yield node
