"""Rules of the user's that are about nothing: what they were to protect, or to lower, is not."""

from __future__ import annotations

import json
from collections.abc import Sequence

from amp_fx.errors import did_you_mean
from amp_fx.plans.plan import Plan

__all__ = ["unused_rules"]


def unused_rules(plans: Sequence[Plan]) -> list[str]:
    """The rules that match no call in any of these graphs, each with the nearest name that is there, in words.

    Graphs that were planned under one policy are taken together: each may have what another has not.
    """
    # no rule holds where torch.autocast decides, and gradients have none of their own
    forward = [plan for plan in plans if plan.phase == "forward" and not plan.fallback]
    found: dict[str, list[dict[str, str]]] = {}
    for plan in forward:
        left = found.setdefault(plan.policy, plan.unused_rules)
        found[plan.policy] = [rule for rule in left if rule in plan.unused_rules]
    return [
        _describe(rule, [plan for plan in forward if plan.policy == policy])
        for policy, rules in found.items()
        for rule in rules
    ]


def _describe(rule: dict[str, str], plans: Sequence[Plan]) -> str:
    where = f"graph {plans[0].graph}" if len(plans) == 1 else f"any of {len(plans)} graphs"
    rows = [row for plan in plans for row in plan.nodes]
    ops, modules = sorted({_base(row.op) for row in rows}), sorted({row.module_path for row in rows})
    op, module = _base(rule.get("op", "")), rule.get("module", "")
    hint = did_you_mean(op, ops) if op and op not in ops else did_you_mean(module, modules)
    return f"policy rule {json.dumps(rule)} matched no call in {where}{'.' if hint else ''}{hint}"


def _base(op: str) -> str:
    """The op without its overload."""
    return op.partition(".")[0]
