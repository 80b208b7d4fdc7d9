"""Which row of a plan a call of a graph follows, and which of several plans a graph is about.

A row finds its call by the path of the module, the kind of operator, the dtypes and, where the operator has a weight,
its shape; equal ones are told apart by the calls around them. Other sizes do not count, nor do views, copies and
tensors of literal numbers, so that one plan holds for other batches, for a compiled model and for an exported one,
decomposed or not. Blocks of one class that are compiled apart have equal graphs: they are told apart by their turn.
"""

from __future__ import annotations

import difflib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from amp_fx.errors import PlanError
from amp_fx.graphs.traits import Trait, has_trait, op_row
from amp_fx.precision.plans.plan import NodePlan, Plan, dtype_name
from amp_fx.precision.policy import OpClass
from amp_fx.runtime.state import cache_results

logger = logging.getLogger(__name__)

#: what stands for numbers that the program writes: other calls on another device and in an export
_LITERALS = frozenset({"empty.memory_format", "tensor"})
#: operators that multiply are one of three kinds, whatever they are called
_CONVOLUTION, _PRODUCT, _ATTENTION = "conv", "product", "scaled_dot_product"
#: nodes that a message names
_SHOWN = 6


@dataclass(frozen=True)
class Match:
    """The rows of a plan beside the calls of a graph."""

    #: in order; views and copies have none where the two have others of them: which is which, nobody knows
    pairs: list[tuple[NodePlan, NodePlan]]
    #: calls without a row, and rows without a call
    new: list[NodePlan]
    gone: list[NodePlan]

    @property
    def is_same_model(self) -> bool:
        """True where half of the products have a row, or of all calls where nothing is multiplied."""
        found = [row for _, row in self.pairs]
        counts = _multiplies if any(map(_multiplies, (*found, *self.new))) else _decides
        return sum(map(counts, found)) >= sum(map(counts, self.new))

    @property
    def moved(self) -> list[str]:
        """The calls that only one of the two has, and those that differ, one line each."""
        near, new, changed = _by_key(self.gone, 2), list[str](), set[int]()
        for row in self.new:
            old = next(iter(near.get(_key(row)[:2], ())), None)
            new.append(f"{_name(row)} is new" if old is None else _change(old, row))
            if old is not None:
                near[_key(row)[:2]].pop(0)
                changed.add(id(old))
        gone = (f"{_name(row)} is gone" for row in self.gone if id(row) not in changed)
        return [*filter(None, itertools.chain.from_iterable(itertools.zip_longest(new, gone)))]

    def with_rows(self, rows: Iterable[NodePlan]) -> Match:
        """With these rows for the calls that have none yet, each for the first that it fits."""
        waiting, more = _by_key(self.new), list[tuple[NodePlan, NodePlan]]()
        for row in rows:
            calls = waiting.get(_key(row), [])
            if (at := next((at for at, call in enumerate(calls) if _fits(row, call)), None)) is not None:
                more.append((row, calls.pop(at)))
        taken = {id(each) for pair in more for each in pair}
        new, gone = ([row for row in left if id(row) not in taken] for left in (self.new, self.gone))
        return Match(self.pairs + more, new, gone)


def match(plan: Plan, outline: Plan) -> Match:
    """The rows of a plan for the calls of a graph, of which this is the outline."""
    (ours, before), (theirs, there) = _runs(plan), _runs(outline)
    keys, calls = ([*map(_key, rows)] for rows in (ours, theirs))
    found = [*zip(range(len(keys)), range(len(calls)), strict=False)]
    if keys != calls:
        blocks = difflib.SequenceMatcher(None, keys, calls).get_matching_blocks()
        found = [(i + k, j + k) for i, j, size in blocks for k in range(size)]
    found = [(i, j) for i, j in found if _fits(ours[i], theirs[j])]
    pairs = [(ours[i], theirs[j]) for i, j in found]
    for i, j in (*found, (len(ours), len(theirs))):
        if [*map(_key, before[i])] == [*map(_key, there[j])]:
            pairs += zip(before[i], there[j], strict=True)
    taken = {id(each) for pair in pairs for each in pair}
    gone, new = ([row for row in rows if id(row) not in taken] for rows in (ours, theirs))
    # calls that were moved, or stand beside an equal one with another weight
    return Match(pairs, new, gone).with_rows(gone)


def choose_plan(
    plans: Sequence[Plan],
    outline: Plan,
    what: str = "plan",
    says: Callable[[Plan], object] = lambda plan: _decisions(plan),
) -> tuple[Plan, Match]:
    """The plan to follow in a graph, whose ``outline`` has its calls before any is placed; messages call it ``what``.

    A call without a row there has that of another of the plans, such as of a graph that ends elsewhere. PlanError where
    that leaves most of the products without one: the message names them. Warnings where a call is without, where a row
    is, and where several plans are about the graph and what each ``says`` differs.
    """
    if not plans:
        raise PlanError(f"graph {outline.graph}: the {what} file holds no {what} of a forward graph.")
    calls = [*_sizes(outline)]
    likeness = [(_likeness(plan, calls), _nearness(plan, outline)) for plan in plans]
    chosen, *others = (plan for plan, like in zip(plans, likeness, strict=True) if like == max(likeness))
    found = match(chosen, outline)
    for plan in plans:
        # a step has levels below 16 bits of its own
        if found.new and plan is not chosen and plan.training is chosen.training:
            found = found.with_rows(_runs(plan)[0])
    if not found.is_same_model:
        raise PlanError(
            f"graph {outline.graph} is not the one that {what} {chosen.graph} was made for: "
            f"{_shown(found.moved)}. Make a new {what}, or drop the option."
        )
    new, gone = ([*map(_name, filter(_decides, rows))] for rows in (found.new, found.gone))
    if new or gone:
        _warn(
            f"graph {outline.graph} follows {what} {chosen.graph}, which is not about all of it."
            + (f" As torch.autocast has them, without a row: {_shown(new)}." if new else "")
            + (f" Without a call here: {_shown(gone)}." if gone else "")
        )
    if any(says(other) != says(chosen) for other in others):
        _warn(
            f"graphs {', '.join(plan.graph for plan in (chosen, *others))} have the same calls, but each a {what} of "
            "its own, and neither sizes nor names say which a graph is to follow: it follows that of "
            f"{chosen.graph}. Calibrate again with the batch sizes that the model has now, or give one of them alone."
        )
    return chosen, found


def _likeness(plan: Plan, calls: list[tuple[Any, ...]]) -> tuple[int, int]:
    """How many calls have a row, and how many of them a weight of the same shape."""
    rows = [*_sizes(plan)]
    kinds, sizes = (
        Counter(each[:at] for each in rows) & Counter(each[:at] for each in calls) for at in (4, 5)
    )
    return kinds.total(), sizes.total()


def _nearness(plan: Plan, outline: Plan) -> tuple[bool, ...]:
    """Where a plan of an equal graph is like an outline: training, views, shapes, name, turn."""
    # an outline has no copies of weights yet
    shapes, theirs = (
        Counter(given.shape for given in each.inputs if not given.copy_of) for each in (plan, outline)
    )
    # Dynamo counts functions and, behind the slash, the graphs of each: other programs do not change that
    turn, turn_here = (each.graph.rpartition("/")[2] for each in (plan, outline))
    return (
        plan.training is outline.training,
        [*map(_key, _rows(plan))] == [*map(_key, _rows(outline))],
        shapes == theirs,
        plan.graph == outline.graph,
        turn == turn_here,
    )


def _runs(plan: Plan) -> tuple[list[NodePlan], list[list[NodePlan]]]:
    """The calls that compute, and the views and copies in front of each; last, those that are left."""
    calls, runs = list[NodePlan](), [list[NodePlan]()]
    for row in _rows(plan):
        if _hands_on(row.op):
            runs[-1].append(row)
        else:
            calls.append(row)
            runs.append([])
    return calls, runs


def _rows(plan: Plan) -> list[NodePlan]:
    """The rows of floating values, without literal numbers."""
    rows = [row for row in plan.nodes if row.traced is not None and row.op not in _LITERALS]
    return [row for row in rows if row.op != "full" or row.shape]


def _sizes(plan: Plan) -> Iterator[tuple[Any, ...]]:
    return ((*_key(row), _weight(row)) for row in _runs(plan)[0])


def _key(row: NodePlan) -> tuple[str, ...]:
    return row.module_path, _kind(row.op), _dtype(row.traced), _dtype(row.low)


@cache_results()
def _kind(op: str) -> str:
    """The name that an operator shares with its overloads, its form in place and what it decomposes into."""
    base = op.partition(".")[0].strip("_").removeprefix("native_")
    if has_trait(op, Trait.MATMUL, Trait.UNCOUNTED_MATMUL, Trait.SOMETIMES_MATMUL):
        return next((kind for kind in (_CONVOLUTION, _ATTENTION) if kind in base), _PRODUCT)
    return "batch_norm" if "batch_norm" in base else base.removesuffix("_copy")


@cache_results()
def _hands_on(op: str) -> bool:
    """True for views and copies: another size, or an export, may have more of them or fewer."""
    if op == "getitem" or has_trait(op, Trait.UNCHANGED, Trait.RESHAPES, Trait.MOVES):
        return True
    name, _, overload = op.partition(".")
    found = getattr(getattr(torch.ops.aten, name, None), overload or "default", None)
    returns = [] if found is None or has_trait(op, Trait.CAST, Trait.IMPLIED_CAST) else found._schema.returns
    return any(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _weight(row: NodePlan) -> tuple[int, ...] | None:
    """The shape of a convolution's weight; of a product, how much is contracted, and to how much; None if not known."""
    # below 16 bits, a plan has scales among the operands
    if _kind(row.op) == _CONVOLUTION and len(row.operands) > 1 and not row.levels_below:
        return row.operands[1]
    form = op_row(row.op).linear
    if form is None or len(row.operands) <= form.input or not row.shape:
        return None
    return *row.operands[form.input][-1:], row.shape[-1]


def _fits(row: NodePlan, call: NodePlan) -> bool:
    """False where one of the two has a weight, and not in the shape that the other multiplies by."""
    ours, theirs = _weight(row), _weight(call)
    # what is no weight is as long as the batch
    has_weight = _kind(row.op) == _CONVOLUTION or "linear" in (row.op, call.op)
    return ours == theirs or None in (ours, theirs) or not has_weight


def _decides(row: NodePlan) -> bool:
    return row.op_class is not OpClass.KEEP


def _multiplies(row: NodePlan) -> bool:
    return _kind(row.op) in (_CONVOLUTION, _PRODUCT, _ATTENTION)


def _by_key(rows: Iterable[NodePlan], parts: int = 4) -> dict[tuple[str, ...], list[NodePlan]]:
    found = dict[tuple[str, ...], list[NodePlan]]()
    for row in rows:
        found.setdefault(_key(row)[:parts], []).append(row)
    return found


def _change(old: NodePlan, new: NodePlan) -> str:
    facts = {
        "dtype": (_dtype(new.traced), _dtype(old.traced)),
        "the low dtype": (_dtype(new.low), _dtype(old.low)),
        "a weight of": (_weight(new), _weight(old)),
    }
    what, now, was = next((what, now, was) for what, (now, was) in facts.items() if now != was)
    return f"{_name(new)} has {what} {now}, had {was}"


def _dtype(dtype: torch.dtype | None) -> str:
    return "none" if dtype is None else dtype_name(dtype)


def _name(row: NodePlan) -> str:
    return f"{row.name} ({f'{row.module_path} ' if row.module_path else ''}{row.op})"


def _shown(lines: Sequence[str]) -> str:
    more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; ".join(lines[:_SHOWN]) + more


def _decisions(plan: Plan) -> list[tuple[Any, ...]]:
    rows = _runs(plan)[0]
    return [
        (row.op_class, row.dtype, row.takes, row.pinned, row.levels, row.scales, row.equalisation)
        for row in rows
    ]


@cache_results()
def _warn(text: str) -> None:
    """Once for the same graphs."""
    logger.warning("%s", text)
