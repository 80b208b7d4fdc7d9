"""Plan files: what ``options={"plan": ...}`` takes, and which of several plans a graph is to follow.

A plan is matched with a graph by content, not by name: the same calls, in the same modules, in the same order.
Shapes do not count, so that a plan holds for other batch sizes, nor do calls on integers and tensors of literal
numbers, so that it holds on another device and for an export.
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from amp_fx.errors import PlanError
from amp_fx.plans.files import decode, read_object
from amp_fx.plans.plan import NodePlan, Plan, dtype_name

__all__ = ["choose_plan", "counterparts", "load_plans", "moved_nodes"]

#: calls that do not compute: what stands for numbers that the program writes, other calls on another device and in an
#: export
_NOT_COMPUTING = frozenset({"detach", "detach_", "empty.memory_format", "lift_fresh_copy", "tensor"})

#: copies that an export may lack: they have counterparts where both graphs have them
_COPIES = frozenset({"contiguous"})

#: nodes that a message names
_SHOWN = 6


def load_plans(path: str | os.PathLike[str]) -> tuple[Plan, ...]:
    """The forward plans in a file of :meth:`amp_fx.Plan.save` or :meth:`amp_fx.Report.save`; else PlanError."""
    how = f"Write one with amp_fx.explain(...).plan.save({os.fspath(path)!r})."

    def read(data: dict[str, Any]) -> tuple[Plan, ...]:
        if "version" not in data:
            keys = ", ".join(map(repr, sorted(data)[:_SHOWN]))
            raise PlanError(f"JSON of something else: its keys are {keys}. {how}")
        # a report holds the plans of several graphs
        plans = decode(list[Plan], data.get("plans", [data]), "plans")
        return tuple(plan for plan in plans if plan.phase == "forward")

    return read_object(path, "a plan", read, PlanError, how)


def choose_plan(plans: Sequence[Plan], outline: Plan, what: str = "plan") -> Plan:
    """The plan to follow in a graph, whose ``outline`` has its calls before any is placed; messages call it ``what``.

    PlanError where none of the plans is about this graph: the message says which nodes moved.
    """
    calls = _calls(outline)
    matching = [plan for plan in plans if _calls(plan) == calls]
    if matching:
        # of equal graphs: the one that was trained alike, of equal shapes, of the same name
        return min(matching, key=lambda plan: _distance(plan, outline))
    if not plans:
        raise PlanError(f"graph {outline.graph}: the {what} file holds no {what} of a forward graph.")
    nearest = max(plans, key=lambda plan: difflib.SequenceMatcher(None, _calls(plan), calls).quick_ratio())
    moved = moved_nodes(nearest, outline)
    more = f"; and {len(moved) - _SHOWN} more" if len(moved) > _SHOWN else ""
    raise PlanError(
        f"graph {outline.graph} is not the one that {what} {nearest.graph} was made for: "
        f"{'; '.join(moved[:_SHOWN])}{more}. Make a new {what}, or drop the option."
    )


def moved_nodes(plan: Plan, outline: Plan) -> list[str]:
    """What the graph has more, has not, and has otherwise than the plan, one line each."""
    before, after = _calls(plan), _calls(outline)
    moved: list[str] = []
    for kind, i, j, k, m in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        gone, new = _computing(plan)[i:j], _computing(outline)[k:m]
        if len(gone) == len(new):
            moved += [_change(old, row) for old, row in zip(gone, new, strict=True)]
        else:
            moved += [f"{_name(row)} is gone" for row in gone] + [f"{_name(row)} is new" for row in new]
    return moved


def counterparts(plan: Plan, outline: Plan) -> Iterator[tuple[NodePlan, NodePlan]]:
    """(row of a plan, row of a graph that it is about), in order.

    What does not compute has none, nor have copies where only one of the two has them.
    """
    copies = _calls(plan, copies=True) == _calls(outline, copies=True)
    return zip(_computing(plan, copies=copies), _computing(outline, copies=copies), strict=True)


def _calls(plan: Plan, *, copies: bool = False) -> list[tuple[str, ...]]:
    rows = _computing(plan, copies=copies)
    return [(row.module_path, row.op, _dtype(row.traced), _dtype(row.low)) for row in rows]


def _computing(plan: Plan, *, copies: bool = False) -> list[NodePlan]:
    """The rows of calls that compute floating values."""
    left_out = _NOT_COMPUTING if copies else _NOT_COMPUTING | _COPIES
    rows = [row for row in plan.nodes if row.traced is not None]
    return [row for row in rows if row.op not in left_out and (row.op != "full" or row.shape)]


def _change(old: NodePlan, new: NodePlan) -> str:
    if (old.module_path, old.op) != (new.module_path, new.op):
        return f"{_name(old)} is now {_name(new)}"
    if old.traced is not new.traced:
        return f"{_name(new)} has dtype {_dtype(new.traced)}, had {_dtype(old.traced)}"
    return f"{_name(new)} has the low dtype {_dtype(new.low)}, had {_dtype(old.low)}"


def _dtype(dtype: torch.dtype | None) -> str:
    return "none" if dtype is None else dtype_name(dtype)


def _name(row: NodePlan) -> str:
    return f"{row.name} ({f'{row.module_path} ' if row.module_path else ''}{row.op})"


def _distance(plan: Plan, outline: Plan) -> tuple[bool, bool, bool]:
    shapes, theirs = (Counter(given.shape for given in each.inputs) for each in (plan, outline))
    return plan.training is not outline.training, shapes != theirs, plan.graph != outline.graph
