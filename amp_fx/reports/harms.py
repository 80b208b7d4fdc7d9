"""What roundings cost, beside the reasons of a report's calls."""

from __future__ import annotations

import math
from collections.abc import Sequence

from amp_fx.plans.harm import CallHarm, Harm, as_number
from amp_fx.plans.plan import Plan
from amp_fx.plans.plan_files import choose_plan

__all__ = ["add_harms"]


def add_harms(plans: Sequence[Plan], harm: Harm) -> None:
    """Adds to every measured call's reason what rounding its operands, its result and their gradients does.

    Args:
        plans: of forward graphs; changed.
        harm: what was measured.

    Raises:
        PlanError: a graph was not measured; names what has moved.
    """
    for plan in plans:
        outline = choose_plan([graph.outline for graph in harm.graphs], plan, "harm")
        graph = next(graph for graph in harm.graphs if graph.outline is outline)
        calls = {call.name: call for call in graph.calls}
        for row, saved in zip(plan.nodes, outline.nodes, strict=True):
            if saved.name in calls and "; harm: " not in row.reason:
                row.reason += f"; harm: rounding {_cost(calls[saved.name])} to the gradient's error"


def _cost(call: CallHarm) -> str:
    parts = [call, *call.reads.values()]
    total = sum(as_number(part.value) + as_number(part.gradient) for part in parts)
    return (
        "overflows, and adds infinitely much" if math.isinf(total) else f"adds up to {math.sqrt(total):.1e}"
    )
