"""What leaves each module, and each call, beside the reference."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from amp_fx.comparison.distances import Distance
from amp_fx.comparison.running import ProgramGraph
from amp_fx.plans.plan import NodePlan, Plan, dtype_name

__all__ = ["CallError", "ModuleError", "call_error", "call_errors", "coloured", "module_errors"]

#: (graph, value) -> how far it is from the reference
Distances = Mapping[tuple[int, str], Distance]

#: modules that only hold others
_HOLDERS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class ModuleError:
    """What leaves one module, beside the reference.

    Attributes:
        module: path; the model itself is ``""``.
        error: relative L2 error of its result, of the worst if there are several; infinite where one is not finite.
        gradient_error: of the gradient of its result; None without a loss, or where it has none.
        precision: that its result is computed in, ``"bfloat16"``.
        lost: share of the gradient's elements that are zero, of those that are not in the reference.
    """

    module: str
    error: float
    gradient_error: float | None
    precision: str
    lost: float


@dataclass(frozen=True)
class CallError:
    """The result of one call, beside the reference.

    Attributes:
        call: its name in the plan.
        op: ATen name.
        module: path of the module that it is in.
        source: the user's source line.
        precision: that it computes in.
        error: relative L2 error; infinite where it is not finite.
        gradient_error: of its gradient; None without a loss, or where it has none.
    """

    call: str
    op: str
    module: str
    source: str
    precision: str
    error: float
    gradient_error: float | None


def module_errors(
    model: nn.Module, graphs: Sequence[tuple[ProgramGraph, Plan]], found: Distances
) -> tuple[ModuleError, ...]:
    """The modules of a model that return something, largest error first.

    Args:
        model: whose modules they are.
        graphs: with the plans by which they were compiled, in order.
        found: of the values that were taken.
    """
    holders = {path for path, module in model.named_modules() if isinstance(module, _HOLDERS)}
    rows: dict[str, tuple[Distance, str]] = {}
    for number, (graph, plan) in enumerate(graphs):
        calls = {row.name: row for row in plan.nodes}
        for value, modules in graph.results.items():
            here = found.get((number, value))
            if here is None:
                continue
            for path in [path for path in modules if path not in holders]:
                before = rows.get(path)
                worse = here if before is None else here.worse(before[0])
                rows[path] = worse, _precision(calls.get(value))
    errors = [
        ModuleError(path, each.error, each.gradient_error, precision, each.lost)
        for path, (each, precision) in rows.items()
    ]
    return tuple(sorted(errors, key=lambda row: -max(row.error, row.gradient_error or 0.0)))


def call_errors(plans: Sequence[Plan], found: Distances) -> tuple[CallError, ...]:
    """The calls whose results were taken, largest error first."""
    rows = [
        call_error(row, here)
        for number, plan in enumerate(plans)
        for row in plan.nodes
        if (here := found.get((number, row.name))) is not None
    ]
    return tuple(sorted(rows, key=lambda row: -max(row.error, row.gradient_error or 0.0)))


def call_error(row: NodePlan, here: Distance) -> CallError:
    """A call of a plan with its error."""
    return CallError(
        row.name, row.op, row.module_path, row.source, _precision(row), here.error, here.gradient_error
    )


def _precision(row: NodePlan | None) -> str:
    return "" if row is None or row.computed is None else dtype_name(row.computed)


def coloured(number: int, plan: Plan, found: Distances) -> dict[str, float | None]:
    """The errors of a graph's calls; None where one is not finite."""
    return {
        row.name: None if math.isinf(here.error) else here.error
        for row in plan.nodes
        if (here := found.get((number, row.name))) is not None
    }
