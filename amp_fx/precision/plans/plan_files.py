"""Plan files, and what differs between two sets of plans.

Nodes are matched by phase, module path, op and their turn among equals, so that two runs of one program match although
node names differ.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from amp_fx.errors import PlanError
from amp_fx.precision.plans.files import as_data, decode, read_object
from amp_fx.precision.plans.label import Reason
from amp_fx.precision.plans.plan import NodePlan, Plan, dtype_name
from amp_fx.precision.policy.levels import FORWARD

#: phase, module path, op, turn among equals
Key = tuple[str, str, str, int]

#: keys that a message names, and lines of each list of a diff
_SHOWN, _SHOWN_OF_DIFF = 6, 8


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


# --- what differs between two sets of plans ---


@dataclass(frozen=True)
class Change:
    """One call that computes in another dtype."""

    module_path: str
    #: with the role behind it where that is the gradient of the call's input or weight
    op: str
    phase: str
    #: empty where the call is new
    before: str
    #: empty where it is gone
    after: str
    #: of the later plan that has the call
    reasons: tuple[Reason, ...]

    def __str__(self) -> str:
        where = self.module_path or "(no module)"
        return f"{where} {self.op} ({self.phase}): {self.before or 'new'} -> {self.after or 'gone'}"


@dataclass(frozen=True)
class Diff:
    """Before against after; ``str`` says it in a few lines."""

    #: number and bytes of casts, before and after
    casts: tuple[int, int]
    cast_bytes: tuple[int, int]
    #: nodes in another dtype, new nodes, nodes that are gone
    changes: list[Change]
    #: casts that only the second has, and those that only the first has: ``"value -> dtype"``, with how many
    added: dict[str, int]
    removed: dict[str, int]

    def __bool__(self) -> bool:
        return bool(self.changes or self.added or self.removed)

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form."""
        return as_data(vars(self))

    def __str__(self) -> str:
        before, after = (size / 1e6 for size in self.cast_bytes)
        lines = [f"casts {self.casts[0]} -> {self.casts[1]}, cast bytes {before:.2f} -> {after:.2f} MB"]
        if not self:
            return f"{lines[0]}\nno difference"
        for title, rows in (
            ("nodes", list(map(str, self.changes))),
            ("casts added", _counted(self.added)),
            ("casts removed", _counted(self.removed)),
        ):
            if rows:
                lines += [f"{title}: {len(rows)}", *(f"  {row}" for row in rows[:_SHOWN_OF_DIFF])]
            if len(rows) > _SHOWN_OF_DIFF:
                lines.append(f"  ... and {len(rows) - _SHOWN_OF_DIFF} more")
        return "\n".join(lines)


def diff_plans(before: Sequence[Plan], after: Sequence[Plan]) -> Diff:
    """Compares two lists of plans."""
    old, new = keyed(before), keyed(after)
    changes = []
    for key in dict.fromkeys((*old, *new)):
        pair = old.get(key), new.get(key)
        row = pair[1] or old[key]
        # of the matmuls in the backward, a plan may say what they multiply
        roles = [role for node in pair if node for role in node.levels if role != FORWARD]
        for role in dict.fromkeys(["", *roles]):
            was, now = (_dtype_in(node, role) for node in pair)
            if was != now:
                op = f"{row.op}, {role}" if role else row.op
                changes.append(Change(row.module_path, op, key[0], was, now, row.reasons))
    gone, come = _casts(before), _casts(after)
    sizes = [sum(cast.bytes for plan in plans for cast in plan.casts) for plans in (before, after)]
    return Diff(
        casts=(gone.total(), come.total()),
        cast_bytes=(sizes[0], sizes[1]),
        changes=changes,
        added=dict(come - gone),
        removed=dict(gone - come),
    )


def keyed(plans: Sequence[Plan]) -> dict[Key, NodePlan]:
    """The nodes of several plans by what names them across runs."""
    turns: Counter[tuple[str, str, str]] = Counter()
    found: dict[Key, NodePlan] = {}
    for plan in plans:
        for node in plan.nodes:
            kind = plan.phase, node.module_path, node.op
            found[(*kind, turns[kind])] = node
            turns[kind] += 1
    return found


def _dtype_in(node: NodePlan | None, role: str) -> str:
    """The dtype of a role's product, or of the call; where a plan says nothing of a role, the call's dtype."""
    if node is None or node.dtype is None:
        return ""
    level = node.levels_below.get(role or FORWARD)
    return dtype_name(node.dtype if level is None else level.dtype)


def _casts(plans: Sequence[Plan]) -> Counter[str]:
    """Casts by value and dtype: a value is named by the module and op that made it."""
    found: Counter[str] = Counter()
    for plan in plans:
        names = {node.name: f"{node.module_path}.{node.op}".lstrip(".") for node in plan.nodes}
        for cast in plan.casts:
            value = names.get(cast.value, cast.value)
            found[f"{value} -> {dtype_name(cast.to_dtype)} ({plan.phase})"] += 1
    return found


def _counted(casts: dict[str, int]) -> list[str]:
    return [cast if times == 1 else f"{cast} x{times}" for cast, times in casts.items()]
