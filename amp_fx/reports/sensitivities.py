"""What roundings cost, beside the reasons of a report's calls, and as numbers for its picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from amp_fx.plans.label import SENSITIVITY, Kind, Reason
from amp_fx.plans.plan import Plan
from amp_fx.plans.sensitivity import CallSensitivity, Sensitivity, as_number

__all__ = ["add_sensitivities"]


def add_sensitivities(plans: Sequence[Plan], sensitivity: Sensitivity) -> dict[str, dict[str, float | None]]:
    """Adds to every measured call's reasons what rounding its operands, its result and their gradients does.

    Args:
        plans: of a program; those of forward graphs are changed.
        sensitivity: what was measured.

    Returns:
        Graph -> call -> what rounding adds to the relative error of the gradient; None where it overflows.

    Raises:
        PlanError: a graph was not measured; names what has moved.
    """
    found: dict[str, dict[str, float | None]] = {}
    for plan in plans:
        if plan.phase != "forward" or plan.fallback:
            continue
        rows = {row.name: at for at, row in enumerate(plan.nodes)}
        errors = found.setdefault(plan.graph, {})
        for call in sensitivity.graph(plan).renamed(plan):
            error = errors[call.name] = _error(call)
            row = plan.nodes[at := rows[call.name]]
            if row.is_because(*SENSITIVITY):
                continue
            adds = Reason.of(Kind.ROUNDING_ADDS_UP_TO, error=error)
            why = Reason(Kind.ROUNDING_OVERFLOWS) if error is None else adds
            plan.nodes[at] = replace(row, reasons=(*row.reasons, why))
    return found


def _error(call: CallSensitivity) -> float | None:
    """Of all that may be rounded in a call; None where something overflows."""
    parts = [call, *call.reads.values()]
    total = sum(as_number(part.value) + as_number(part.gradient) for part in parts)
    return None if math.isinf(total) else math.sqrt(total)
