"""Why a kernel that does nothing but cast is still there, read off plans that Inductor was asked about."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from amp_fx.plans.plan import CastPlan, InputPlan, NodePlan, Plan, dtype_name
from amp_fx.policy import OpClass

__all__ = ["kept_casts", "kept_data", "kept_lines"]

_WEIGHT = "fp32 weights on their way to 16 bits, once a step"
_WEIGHT_EACH_CALL = (
    "fp32 weights on their way to 16 bits, in each call; options={'weights': 'cache'} keeps low copies"
)
_GIVEN = "what graphs are given in another dtype than their calls read"
_RETURNED = "what graphs return in another dtype than their calls write"
_GRADIENT = "gradients that are wanted in fp32, and made in 16 bits by a library's kernel"


def kept_casts(plans: Sequence[Plan]) -> dict[str, list[CastPlan]]:
    """Casts that are kernels of their own after fusion, by reason, largest first; an unknown reason is empty.

    Plans that were only recorded have none. Without a reason, another compiler might fuse them.
    """
    found: dict[str, list[CastPlan]] = {}
    for plan in plans:
        for cast, why in _reasons(plan):
            found.setdefault(why, []).append(cast)
    return dict(sorted(found.items(), key=lambda row: -sum(cast.bytes for cast in row[1])))


def kept_data(kept: dict[str, list[CastPlan]]) -> list[dict[str, Any]]:
    """Each reason in JSON-like form, with what the first of its casts is."""
    return [
        {
            "why": why,
            "kernels": len(casts),
            "bytes": sum(cast.bytes for cast in casts),
            "example": _described(casts[0]),
        }
        for why, casts in kept.items()
    ]


def kept_lines(kept: dict[str, list[CastPlan]]) -> list[str]:
    """Each reason in words: ``"8 x fp32 weights on their way to 16 bits, once a step, 9.5 MB"``."""
    lines = []
    for row in kept_data(kept):
        times = f"{row['kernels']} x " if row["kernels"] > 1 else ""
        lines.append(f"{times}{row['why'] or row['example']}, {row['bytes'] / 1e6:.3g} MB")
    return lines


def _reasons(plan: Plan) -> Iterator[tuple[CastPlan, str]]:
    values: dict[str, NodePlan | InputPlan] = {row.name: row for row in (*plan.inputs, *plan.nodes)}
    sources = {cast.name: cast.value for cast in plan.casts}
    read = {name for row in plan.nodes for name in row.inputs}
    for cast in plan.casts:
        if cast.kernel:
            yield cast, _why(plan, cast, _source(cast.value, values, sources), read)


def _source(
    name: str, values: dict[str, NodePlan | InputPlan], sources: dict[str, str]
) -> NodePlan | InputPlan | None:
    """What made a value, views and casts left out."""
    while True:
        row = values.get(name)
        if name in sources:
            name = sources[name]
        elif isinstance(row, NodePlan) and row.op_class is OpClass.FOLLOW and len(row.inputs) == 1:
            name = row.inputs[0]
        else:
            return row


def _why(plan: Plan, cast: CastPlan, source: NodePlan | InputPlan | None, read: set[str]) -> str:
    if isinstance(source, InputPlan):
        if source.parameter and plan.phase == "forward":
            return _WEIGHT if plan.training else _WEIGHT_EACH_CALL
        return _GIVEN
    is_returned = "output" in cast.users or cast.name not in read
    if cast.to_dtype is not torch.float32 or not is_returned:
        return ""
    return _GRADIENT if plan.phase == "backward" else _RETURNED


def _described(cast: CastPlan) -> str:
    place = f" [{cast.source}]" if cast.source else ""
    return f"{cast.value} to {dtype_name(cast.to_dtype)} for {', '.join(cast.users) or 'the caller'}{place}"
