"""One line about a plan, for the log: how many matmuls are low, how many casts that took, and why others stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from amp_fx._torch import nesting_change
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.plans.plan import NodePlan, Plan, dtype_name

__all__ = ["TOO_SMALL", "matmuls", "more_bytes", "summary", "untouched_matmuls"]

#: what :mod:`amp_fx.passes.forward.place` writes where a device profile keeps a matmul in fp32
TOO_SMALL = "casting would cost more"

_SHORT = {"float8_e4m3fn": "fp8", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def summary(plan: Plan) -> str:
    """What a compiled graph computes in which precision.

    ``"12 of 14 matmuls in bf16, 9 casts; 2 in fp32: too small to gain on cpu avx512_bf16 zen5 (options={'profile':
    'off'} forces them)"``. Matmuls are convolutions, attention and recurrent layers, too.
    """
    if plan.fallback:
        return f"not rewritten: {plan.fallback}"
    casts = f"{len(plan.casts)} cast{'s' * (len(plan.casts) != 1)}"
    outside, inside = matmuls(plan), untouched_matmuls(plan)
    total = len(outside) + len(inside)
    if not total:
        return f"no matmuls, {casts}"
    low = Counter(_dtype(row) for row in outside if row.dtype in LOW_DTYPES)
    wide = Counter((_dtype(row), _why(row, plan)) for row in outside if row.dtype not in LOW_DTYPES)
    lowered = " and ".join(f"{count} in {dtype}" for dtype, count in low.items())
    if len(low) == 1:
        ((dtype, count),) = low.items()
        text = f"{count} of {total} matmuls in {dtype}, {casts}"
    else:
        text = f"{total} matmul{'s' * (total != 1)}, {lowered or 'none in low precision'}, {casts}"
    parts = [f"{count} in {dtype}: {why}" for (dtype, why), count in wide.items()]
    if inside:
        parts.append(f"{len(inside)} inside vmap or torch.func: left as written")
    if plan.meaning:
        parts.append(f"below 16 bits: {plan.meaning}")
    return "; ".join([text, *parts])


def more_bytes(plans: Sequence[Plan], ours: int | None, theirs: int | None) -> str:
    """Why a program moves more bytes than under torch.autocast, in words; empty where it does not, or nobody counted.

    Args:
        plans: of the program.
        ours: bytes that all its kernels move.
        theirs: the same under torch.autocast.
    """
    if not ours or not theirs or ours < 1.0005 * theirs:
        return ""
    rows = [row for plan in plans if plan.phase == "forward" for row in matmuls(plan)]
    wide = [row for row in rows if row.dtype not in LOW_DTYPES]
    small = sum(TOO_SMALL in row.reason for row in wide)
    ruled = sum(row.reason.startswith("user rule") for row in wide)
    causes = [
        f"{small} of {len(rows)} matmuls stay in fp32, where their casts would take longer than low precision saves",
        f"rules keep {ruled} of {len(rows)} matmuls in fp32",
    ]
    why = " and ".join(text for text, count in zip(causes, (small, ruled), strict=True) if count)
    more = f"{100 * (ours / theirs - 1):.1f} % more bytes than torch.autocast moves"
    return f"{more}, because {why}" if why else more


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


def _why(node: NodePlan, plan: Plan) -> str:
    if TOO_SMALL in node.reason:
        device = f" on {plan.profile}" if plan.profile else ""
        return f"too small to gain{device} (options={{'profile': 'off'}} forces them)"
    # the last word counts: what comes after the list's own reason overruled it
    return node.reason.rpartition("; ")[2]


def _dtype(node: NodePlan) -> str:
    name = "mixed dtypes" if node.computed is None else dtype_name(node.computed)
    return _SHORT.get(name, name)
