"""Plan files, which of several plans a graph is to follow, and what differs between two sets of plans.

A plan is matched with a graph by content, not by name: the same calls, in the same modules, in the same order.
Shapes do not count, nor do views and copies (only some sizes slice what they take all of), so that a plan holds for
other sizes; nor do calls on integers and tensors of literal numbers, so that it holds on another device and for an
export. Blocks of one class that are compiled apart have equal graphs: they are told apart by their turn.

In a diff, nodes are matched by phase, module path, op and their turn among equals, so that two runs of one program
match although node names differ.
"""

from __future__ import annotations

import difflib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amp_fx.errors import PlanError
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.precision.plans.files import as_data, decode, read_object
from amp_fx.precision.plans.label import Reason
from amp_fx.precision.plans.plan import NodePlan, Plan, dtype_name
from amp_fx.precision.policy.levels import FORWARD
from amp_fx.runtime.state import cache_results

logger = logging.getLogger(__name__)

#: phase, module path, op, turn among equals
Key = tuple[str, str, str, int]

#: what stands for numbers that the program writes: other calls on another device and in an export
_LITERALS = frozenset({"empty.memory_format", "tensor"})
#: views and copies: another size, or an export, may have more of them or fewer
_HANDS_ON = (Trait.UNCHANGED, Trait.RESHAPES, Trait.MOVES)
#: nodes that a message names, and lines of each list of a diff
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


def choose_plan(
    plans: Sequence[Plan],
    outline: Plan,
    what: str = "plan",
    says: Callable[[Plan], object] = lambda plan: _decisions(plan),
) -> Plan:
    """The plan to follow in a graph, whose ``outline`` has its calls before any is placed; messages call it ``what``.

    PlanError where none of the plans is about this graph: the message says which nodes moved. A warning where several
    are, and what each ``says`` differs.
    """
    calls = _calls(outline)
    if matching := [plan for plan in plans if _calls(plan) == calls]:
        distances = [_distance(plan, outline) for plan in matching]
        least = min(distances)
        first, *others = (plan for plan, far in zip(matching, distances, strict=True) if far == least)
        if any(says(other) != says(first) for other in others):
            _warn_of_several(what, tuple(plan.graph for plan in (first, *others)))
        return first
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
    """The calls that only the graph has, that only the plan has, and that differ, one line each."""
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

    Views and copies in front of a call have none where the two have others of them: which is which, nobody knows.
    """
    for pair in zip(_runs(plan), _runs(outline), strict=True):
        ours, theirs = pair if _keys(pair[0]) == _keys(pair[1]) else (filter(_computes, run) for run in pair)
        yield from zip(ours, theirs, strict=True)


def _runs(plan: Plan) -> list[list[NodePlan]]:
    """Each call that computes, behind the views and copies since the one before; last, those that are left."""
    runs: list[list[NodePlan]] = [[]]
    for row in _rows(plan):
        runs[-1].append(row)
        if _computes(row):
            runs.append([])
    return runs


def _keys(rows: Iterable[NodePlan]) -> list[tuple[str, ...]]:
    return [(row.module_path, row.op, _dtype(row.traced), _dtype(row.low)) for row in rows]


def _calls(plan: Plan) -> list[tuple[str, ...]]:
    """The keys of calls by which the plan of a graph is found."""
    return _keys(_computing(plan))


def _computing(plan: Plan) -> list[NodePlan]:
    return [*filter(_computes, _rows(plan))]


def _computes(row: NodePlan) -> bool:
    return not has_trait(row.op, *_HANDS_ON)


def _rows(plan: Plan) -> list[NodePlan]:
    """The rows of floating values, without literal numbers."""
    rows = [row for row in plan.nodes if row.traced is not None and row.op not in _LITERALS]
    return [row for row in rows if row.op != "full" or row.shape]


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


def _distance(plan: Plan, outline: Plan) -> tuple[bool, ...]:
    """Where a plan of an equal graph differs from an outline: training, views, shapes, name, turn."""
    # an outline has no copies of weights yet
    shapes, theirs = (
        Counter(given.shape for given in each.inputs if not given.copy_of) for each in (plan, outline)
    )
    # Dynamo counts functions and, behind the slash, the graphs of each: other programs do not change that
    turn, turn_here = (each.graph.rpartition("/")[2] for each in (plan, outline))
    return (
        plan.training is not outline.training,
        _keys(_rows(plan)) != _keys(_rows(outline)),
        shapes != theirs,
        plan.graph != outline.graph,
        turn != turn_here,
    )


def _decisions(plan: Plan) -> list[tuple[Any, ...]]:
    rows = _computing(plan)
    return [(row.op_class, row.dtype, row.takes, row.pinned, row.levels, row.scales) for row in rows]


@cache_results()
def _warn_of_several(what: str, graphs: tuple[str, ...]) -> None:
    """Once for the same graphs."""
    logger.warning(
        "graphs %s have the same calls, but each a %s of its own, and neither sizes nor names say which a graph is to "
        "follow: it follows that of %s. Calibrate again with the batch sizes that the model has now, or give one of "
        "them alone.",
        ", ".join(graphs),
        what,
        graphs[0],
    )


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
