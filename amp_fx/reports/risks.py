"""Which nodes are likeliest to matter when a result differs, and the rule that keeps them in fp32."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amp_fx.plans.plan import NodePlan, Plan, dtype_name
from amp_fx.plans.reasons import Kind
from amp_fx.policy import OpClass, Policy

__all__ = ["Risk", "origin_of", "rank_risks", "starred", "with_rule"]


@dataclass(frozen=True)
class Risk:
    """Nodes of one kind whose precision is likeliest to matter.

    Attributes:
        where: module path, with ``*`` for the numbers of repeated blocks.
        op: ATen name.
        dtype: in which they compute.
        count: how many.
        why: what can go wrong.
        score: to sort by; larger is riskier.
        options: the remedy: these nodes in fp32.
    """

    where: str
    op: str
    dtype: str
    count: int
    why: str
    score: float
    options: dict[str, Any]

    def __str__(self) -> str:
        times = f" x{self.count}" if self.count > 1 else ""
        return f"{self.where or '(no module)'} {self.op}{times}: {self.why}"


def rank_risks(plans: Sequence[Plan]) -> list[Risk]:
    """The kinds of nodes of the forward most sensitive to rounding, these first; the backward mirrors them."""
    found: dict[tuple[str, str, str], list[tuple[float, str, NodePlan]]] = {}
    for plan in plans:
        if plan.phase != "forward":
            continue
        readers = _readers(plan)
        for node in plan.nodes:
            score, why = _risk(node, readers.get(node.name, []))
            if score:
                key = starred(node.module_path), node.op, why
                found.setdefault(key, []).append((score, why, node))
    risks = []
    for (where, op, why), rows in found.items():
        score, _, node = max(rows, key=lambda row: row[0])
        rule = {"op": op, "precision": "fp32"}
        if where:
            rule["module"] = f"^{re.escape(where)}$".replace(r"\*", r"\d+")
        dtype = "" if node.dtype is None else dtype_name(node.dtype)
        risks.append(Risk(where, op, dtype, len(rows), why, score, with_rule(plans, rule)))
    return sorted(risks, key=lambda risk: -risk.score)


def with_rule(plans: Sequence[Plan], rule: dict[str, str]) -> dict[str, Any]:
    """The options that add a rule to the policy in use."""
    policies = [Policy.parse(plan.policy) for plan in plans]
    policy = policies[0] if policies else Policy()
    form = {key: value for key, value in policy.to_dict().items() if (key, value) != ("base", Policy.base)}
    return {"policy": {**form, "rules": [*form["rules"], rule]}}


def _risk(node: NodePlan, readers: list[NodePlan]) -> tuple[float, str]:
    """(score, why): rules that overrule the lists, then sums that may overflow, then what feeds the loss."""
    if node.dtype is None or node.dtype != node.low or node.op_class is OpClass.KEEP:
        return 0.0, ""
    if node.is_because(Kind.WIDE_RESULT):
        return 0.0, ""
    low = dtype_name(node.dtype)
    if node.is_because(Kind.RULE) and not node.flops:
        return 1000.0, f"{low} by your rule"
    length = _summed(node) if node.flops else 0
    if node.flops and node.dtype is torch.float16:
        # |sum of K products| < 65504 holds for operands below sqrt(65504 / K)
        bound = (65504 / max(length, 1)) ** 0.5
        return (
            100.0 + length**0.5,
            f"float16 sum of {length} products: safe while operands stay below {bound:.0f}",
        )
    if node.flops and any(reader.op_class is OpClass.FP32 for reader in readers):
        return (
            50.0 + length**0.5,
            f"its {low} result feeds {next(r.op for r in readers if r.op_class is OpClass.FP32)}, which works in fp32",
        )
    if node.flops:
        return length**0.5 / 10, f"{low} sum of {length} products"
    if node.is_because(Kind.LOW_IO, Kind.STORED_LOW):
        return 20.0, f"stored in {low} by policy fast, where autocast has fp32"
    return 0.0, ""


def _summed(node: NodePlan) -> int:
    """How many products are added up for one element of a matmul's result; for attention, of the scores."""
    if "attention" in node.op:
        return node.operands[0][-1]
    # two operations for every product
    return node.flops // (2 * max(math.prod(node.shape), 1))


def _readers(plan: Plan) -> dict[str, list[NodePlan]]:
    """Who computes with a node's result, through casts and views."""
    origin = {cast.name: cast.value for cast in plan.casts}
    readers: dict[str, list[NodePlan]] = {}
    # backwards, so that a view knows its readers
    for node in reversed(plan.nodes):
        rows = readers.get(node.name, []) if node.op_class is OpClass.FOLLOW else [node]
        for name in node.inputs:
            readers.setdefault(origin_of(name, origin), []).extend(rows)
    return readers


def origin_of(name: str, casts: dict[str, str]) -> str:
    """The value that a name stands for, through casts of casts; ``casts`` says what each cast converts."""
    while name in casts:
        name = casts[name]
    return name


def starred(path: str) -> str:
    """A module path with ``*`` for the numbers of repeated blocks: ``"layers.*.up"``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
