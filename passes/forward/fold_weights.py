"""Casts of weights leave the graph: the weight itself is stored in the low dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx.graphs.calls import argument_value, is_cast
from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.keys import CAST_META, COPY_META, PART, RECIPE_META, STEP_META
from amp_fx.graphs.values import LOW_DTYPES, is_eligible, storage_of, written_storages
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.levels.quantise_matmuls import erase_unread
from amp_fx.plans.label import Kind, Reason, label_of
from amp_fx.policy import OpClass
from amp_fx.policy.levels import LEVELS
from amp_fx.weights.recipes import Scaled

__all__ = ["FoldWeights"]

aten = torch.ops.aten


@dataclass(frozen=True)
class FoldWeights(Pass):
    """Re-types the inputs that hold weights, for a program whose weights are stored with it.

    Cases:

    1. every reader casts the weight to one low dtype: the input has that dtype and the casts go.
    2. the same, but rows of the weight are looked up, too (an embedding tied to a head): rows are widened after
       the lookup. Left out if ``tables`` is ``"keep"``.
    3. rows are looked up and nothing else: as case 2 if ``tables`` is ``"low"``.
    4. only copies with scales, by one recipe, are made of the weight: the input is the copy, and its factors are one
       more input behind it.
    5. anything else (written to, or read in fp32 too) keeps its dtype and its casts.

    The caller must store each weight in the dtype that its input has afterwards.

    Before::

        w_bf16 = torch.ops.aten.to.dtype(w, torch.bfloat16)             # w: f32
        linear = torch.ops.aten.linear.default(x_bf16, w_bf16)

    After::

        linear = torch.ops.aten.linear.default(x_bf16, w)               # w: bf16

    Attributes:
        weights: names of the inputs that hold weights; inputs that hold the same one stand together.
        tables: ``"tied"``, ``"low"`` or ``"keep"``: which tables of lookups are rounded.
    """

    name: ClassVar[str] = "fold-weights"
    needs: ClassVar[frozenset[str]] = frozenset({"casts"})

    weights: tuple[tuple[str, ...], ...]
    tables: str = "tied"

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        if context.path:
            return PassResult(0, "a body has no weights of its own")
        inputs = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
        written = {key for node in gm.graph.nodes for key in written_storages(node)}
        folded = 0
        for names in self.weights:
            holders = [inputs[name] for name in names]
            if any(storage_of(holder) in written for holder in holders):
                continue
            recipe, dtype = _scaled_recipe(holders), self._stored_dtype(holders)
            if recipe is not None:
                _store_scaled(holders, recipe)
            elif dtype is not None:
                for holder in holders:
                    _retype(holder, dtype)
            folded += recipe is not None or dtype is not None
        if any(RECIPE_META in node.meta for node in inputs.values()):
            erase_unread(gm.graph)
        return PassResult(folded, f"{folded} of {len(self.weights)} weights stored low")

    def _stored_dtype(self, holders: list[fx.Node]) -> torch.dtype | None:
        """The low dtype that serves all readers; None: as it is."""
        if not all(
            is_eligible(v := holder.meta.get("val")) and v.dtype is torch.float32 for holder in holders
        ):
            return None
        wanted: set[torch.dtype | None] = set()
        rows: set[torch.dtype | None] = set()
        for holder in holders:
            for user in holder.users:
                if _is_plain_cast(user):
                    wanted.add(user.meta["val"].dtype)
                elif self.tables != "keep" and _is_lookup(user, holder):
                    plan = label_of(user)
                    rows.add(plan.low if plan is not None else None)
                else:
                    return None
        dtypes = rows if self.tables == "low" and not wanted else wanted
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
        return dtype if dtype in LOW_DTYPES else None


def _scaled_recipe(holders: list[fx.Node]) -> Scaled | None:
    """The recipe of the copies with scales, if all that is made of these inputs are copies of one recipe."""
    recipes: set[Scaled] = set()
    waiting = list(holders)
    while waiting:
        for user in waiting.pop().users:
            part = PART.of(user)
            if part is not None:
                recipes.add(part.recipe)
            elif STEP_META in user.meta:
                waiting.append(user)
            else:
                return None
    return recipes.pop() if len(recipes) == 1 else None


def _store_scaled(holders: list[fx.Node], recipe: Scaled) -> None:
    """The inputs become the copy, and its factors inputs of their own where somebody reads them."""
    graph = holders[0].graph
    parts = [
        (node, part) for node in graph.nodes if (part := PART.of(node)) is not None and part.source in holders
    ]
    stored = next(node.meta["val"] for node, part in parts if part.index == 0)
    for holder in holders:
        holder.meta.update({"val": stored, RECIPE_META: (recipe, 0)})
        holder.meta.pop("tensor_meta", None)
    for node, part in parts:
        given = part.source
        if part.index:
            with graph.inserting_after(given):
                given = graph.placeholder(f"{part.source.name}_{LEVELS[recipe.level].policy}_scale")
            given.meta = {"val": node.meta["val"], COPY_META: part.source.name, RECIPE_META: (recipe, 1)}
        node.replace_all_uses_with(given)


def _is_plain_cast(user: fx.Node) -> bool:
    return is_cast(user) and len(user.args) == 2 and not user.kwargs


def _is_lookup(user: fx.Node, table: fx.Node) -> bool:
    """True for a lookup that the policy lets return rounded rows."""
    plan = label_of(user)
    return (
        user.target is aten.embedding.default
        and argument_value(user, "weight") is table
        and plan is not None
        and plan.op_class is OpClass.FOLLOW
    )


def _retype(holder: fx.Node, dtype: torch.dtype) -> None:
    holder.meta["val"] = holder.meta["val"].to(dtype)
    holder.meta.pop("tensor_meta", None)
    for user in list(holder.users):
        if is_cast(user):
            user.replace_all_uses_with(holder)
            user.graph.erase_node(user)
        else:
            _widen_rows(user)


def _widen_rows(lookup: fx.Node) -> None:
    lookup.meta["val"] = run_fake(lookup)
    lookup.meta.pop("tensor_meta", None)
    with lookup.graph.inserting_after(lookup):
        rows = lookup.graph.call_function(aten.to.dtype, (lookup, torch.float32))
    rows.meta = {
        key: value
        for key, value in lookup.meta.items()
        if key in ("nn_module_stack", "stack_trace", "custom")
    }
    rows.meta[CAST_META] = True
    rows.meta["val"] = run_fake(rows)
    lookup.replace_all_uses_with(rows, delete_user_cb=lambda user: user is not rows)
    plan = label_of(lookup)
    if plan is not None:
        plan.dtype = lookup.meta["val"].dtype
        plan.reasons += (Reason.of(Kind.STORED_TABLE, dtype=plan.dtype),)
