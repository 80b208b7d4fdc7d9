"""Weights in a graph: copies of them become inputs, or they are stored low, or their readers run in fp32."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from amp_fx._torch import quantised_ops
from amp_fx.graphs.calls import add_input, argument_value, is_cast, is_returned, readers
from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.keys import CAST_META, COPY_META, PART, RECIPE_META, STEP_META, TIED
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.values import LOW_DTYPES, is_eligible, is_pure, is_view, storage_of, storages_written_in
from amp_fx.passes.base import Pass, PassContext, erase
from amp_fx.passes.levels.quantise_matmuls import Part, erase_unread
from amp_fx.plans.label import Kind, Reason, Takes, label_of
from amp_fx.plans.plan import dtype_name
from amp_fx.policy import OpClass
from amp_fx.policy.levels import LEVELS
from amp_fx.weights.derived import DerivedInputs, derivation
from amp_fx.weights.recipes import Cast, CopyRecipe, Scaled

aten = torch.ops.aten


@dataclass(frozen=True)
class CacheWeights(Pass):
    """Gives the graph an input more for every copy that it makes of a weight.

    The caller hands in the copies, and knows when they are out of date. The weight itself stays an input, for
    readers in fp32 and so that the signature only grows at its end. Weights that the graph writes to stay as they
    are, and so do copies that it writes to, or that it returns, as the caller may keep those.

    1. casts to a low dtype.
    2. copies with scales, and their factors (:class:`QuantiseMatmuls`).

    Before, and after::

        w_bf16 = torch.ops.aten.to.dtype(w, torch.bfloat16)             # w: f32, an input
        linear = torch.ops.aten.linear.default(x_bf16, w_bf16)
        # after
        w_bfloat16 = placeholder()                                      # bf16, after all others
        linear = torch.ops.aten.linear.default(x_bf16, w_bfloat16)
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        if context.path:
            return "a body has no weights of its own"
        written = storages_written_in(gm.graph)
        placeholders = gm.graph.find_nodes(op="placeholder")
        #: what is made of a weight, the weight, by which recipe, which of its tensors, and its name
        made: list[tuple[fx.Node, fx.Node, CopyRecipe, int, str]] = []
        parts: dict[fx.Node, list[tuple[fx.Node, Part]]] = {}
        for node in gm.graph.nodes:
            if (part := node.meta.get(PART)) is not None:
                parts.setdefault(part.source, []).append((node, part))
        for weight in placeholders:
            if weight.name not in context.folded or storage_of(weight) in written:
                continue
            for user in list(weight.users):  # case 1
                dtype = user.meta["val"].dtype if _is_kept_cast(user, written) else None
                if dtype in LOW_DTYPES:
                    made.append((user, weight, Cast(dtype), 0, dtype_name(dtype)))
            for node, part in parts.get(weight, ()):  # case 2
                suffix = LEVELS[part.recipe.level].policy + ("", "_scale")[part.index]
                made.append((node, weight, part.recipe, part.index, suffix))
        for copied, weight, recipe, part, suffix in made:
            own = {COPY_META: weight.name, RECIPE_META: (recipe, part)}
            name, value = f"{weight.name}_{suffix}", copied.meta["val"]
            copy = add_input(placeholders[-1], name, value, own, stays=True)
            copied.replace_all_uses_with(copy)
            erase(copied)
            placeholders.append(copy)
        if parts:
            erase_unread(gm.graph)
        return f"{len(made)} low copies of weights are inputs"


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
    5. what is computed from weights alone to quantise them, as of a convolution with a folded BatchNorm, becomes
       inputs; weights that nothing reads then are no inputs any more.
    6. anything else (written to, read in fp32 too, or with a cast that is written to or returned) keeps its dtype and
       its casts.

    The caller must store each weight in the dtype that its input has afterwards, and what ``derived`` makes of weights.

    Before, and after::

        w_bf16 = torch.ops.aten.to.dtype(w, torch.bfloat16)             # w: f32
        linear = torch.ops.aten.linear.default(x_bf16, w_bf16)
        # after
        linear = torch.ops.aten.linear.default(x_bf16, w)               # w: bf16
    """

    weights: tuple[tuple[str, ...], ...]  # names of inputs; those that hold the same weight stand together
    tables: str = "tied"  # or "low" or "keep": which tables of lookups are rounded
    #: names of weights, what is made of them, and the names of inputs that take it; filled in when the pass runs
    derived: list[tuple[Sequence[str], DerivedInputs, Sequence[str]]] = field(
        default_factory=list, repr=False, compare=False
    )

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        if context.path:
            return "a body has no weights of its own"
        inputs = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
        written = storages_written_in(gm.graph)
        folded = 0
        for names in self.weights:
            holders = [inputs[name] for name in names]
            if any(storage_of(holder) in written for holder in holders):
                continue
            recipe, dtype = _scaled_recipe(holders), self._stored_dtype(holders, written)
            if recipe is not None:
                _store_scaled(holders, recipe)
            elif dtype is not None:
                for holder in holders:
                    _retype(holder, dtype)
            folded += recipe is not None or dtype is not None
        if any(RECIPE_META in node.meta for node in inputs.values()):
            erase_unread(gm.graph)
        self._derive(gm, {name for names in self.weights for name in names})
        return f"{folded} of {len(self.weights)} weights stored low"

    def _derive(self, gm: fx.GraphModule, weights: set[str]) -> None:
        """Case 5."""
        whole = quantised_ops().dequantize_per_channel.default
        written, made = storages_written_in(gm.graph), dict[fx.Node, fx.Node]()
        for node in gm.graph.nodes:
            given = [made.get(each) for each in node.all_input_nodes]
            if node.name in weights and RECIPE_META not in node.meta and storage_of(node) not in written:
                made[node] = node
            elif STEP_META in node.meta and node.target is not whole and given and is_pure(node):
                known = [weight for weight in given if weight is not None]
                if len(known) == len(given) and not (is_cast(node) and node.all_input_nodes == known):
                    # it is named after the largest
                    made[node] = max(reversed(known), key=lambda weight: weight.meta["val"].numel())
        steps, ends = [node for node in made if made[node] is not node], (whole, aten.conv2d.default)
        read_by = {node: [u for u in node.users if u not in made and u.target in ends] for node in steps}
        wanted = [node for node, users in read_by.items() if users]
        used, derived = derivation(gm, [(node, None) for node in wanted])
        taken = []
        for node in wanted:
            reader, kind = read_by[node][0], "folded"
            if reader.target is whole:
                kind = ("int8", "int8_scale", "int8_zero_point")[reader.args.index(node)]
            with gm.graph.inserting_after(made[node]):
                given = gm.graph.placeholder(f"{made[node].name}_{kind}")
            given.target = given.name
            given.meta = {"val": node.meta["val"].detach(), COPY_META: made[node].name}
            node.replace_all_uses_with(given)
            taken.append(given.name)
        self.derived.append(([node.name for node in used], derived, taken))
        for node in reversed([*made]):
            if not node.users and (node in used or node.op != "placeholder"):
                erase(node)

    def _stored_dtype(self, holders: list[fx.Node], written: Collection[int | None]) -> torch.dtype | None:
        """The low dtype that serves all readers; None: as it is."""
        values = [holder.meta.get("val") for holder in holders]
        if not all(is_eligible(value) and value.dtype is torch.float32 for value in values):
            return None
        wanted: set[torch.dtype | None] = set()
        rows: set[torch.dtype | None] = set()
        for holder in holders:
            for user in holder.users:
                plan = label_of(user)
                is_lookup = user.target is aten.embedding.default and argument_value(user, "weight") is holder
                if _is_kept_cast(user, written):
                    wanted.add(user.meta["val"].dtype)
                elif self.tables != "keep" and is_lookup and plan and plan.op_class is OpClass.FOLLOW:
                    # the policy lets it return rounded rows
                    rows.add(plan.low)
                else:
                    return None
        dtypes = rows if self.tables == "low" and not wanted else wanted
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
        return dtype if dtype in LOW_DTYPES else None


def _scaled_recipe(holders: list[fx.Node]) -> Scaled | None:
    """The recipe of the copies with scales, if all that is made of these inputs are copies of one recipe."""

    def is_step(reader: fx.Node) -> bool:
        return STEP_META in reader.meta and reader.meta.get(PART) is None

    read = {reader for holder in holders for reader in readers(holder, is_step) if not is_step(reader)}
    recipes = {None if (part := reader.meta.get(PART)) is None else part.recipe for reader in read}
    return recipes.pop() if len(recipes) == 1 else None


def _store_scaled(holders: list[fx.Node], recipe: Scaled) -> None:
    """The inputs become the copy, and its factors inputs of their own where somebody reads them."""
    graph = holders[0].graph
    parts = [
        (node, part)
        for node in graph.nodes
        if (part := node.meta.get(PART)) is not None and part.source in holders
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


def _is_kept_cast(user: fx.Node, written: Collection[int | None]) -> bool:
    """True for a cast whose result another tensor may be: nobody writes to it, nor gets hold of it."""
    is_plain = is_cast(user) and len(user.args) == 2 and not user.kwargs
    return is_plain and storage_of(user) not in written and not is_returned(user)


def _retype(holder: fx.Node, dtype: torch.dtype) -> None:
    holder.meta["val"] = holder.meta["val"].to(dtype)
    holder.meta.pop("tensor_meta", None)
    for user in list(holder.users):
        if is_cast(user):
            user.replace_all_uses_with(holder)
            erase(user)
        else:
            _widen_rows(user)


def _widen_rows(lookup: fx.Node) -> None:
    lookup.meta["val"] = run_fake(lookup)
    lookup.meta.pop("tensor_meta", None)
    work = Rewriter(lookup.graph, meta={CAST_META: True})
    with work.after(lookup):
        rows = work.cast(lookup, torch.float32)
    lookup.replace_all_uses_with(rows, delete_user_cb=lambda user: user is not rows)
    if (plan := label_of(lookup)) is not None:
        plan.dtype = lookup.meta["val"].dtype
        plan.reasons += (Reason.of(Kind.STORED_TABLE, dtype=plan.dtype),)


@dataclass(frozen=True)
class KeepWeights(Pass):
    """Moves the readers of named inputs to fp32, also those that see them through views.

    Before, and after::

        linear = torch.ops.aten.linear.default(x, w)        # low; a value of w is infinite in fp16
        # after
        linear = torch.ops.aten.linear.default(x, w)        # fp32
    """

    weights: tuple[str, ...]  # names of inputs

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        moved = 0
        for node in gm.graph.find_nodes(op="placeholder"):
            if context.path or node.name not in self.weights:
                continue
            for reader in readers(node, is_view):
                plan = label_of(reader)
                if plan is None or is_view(reader) or reader.meta.get(TIED):
                    continue
                if plan.op_class not in (OpClass.KEEP, OpClass.FP32):
                    plan.op_class, plan.takes = OpClass.FP32, Takes.DTYPE
                    plan.reasons = (Reason.of(Kind.WEIGHT_RANGE, weight=node.name, low=plan.low),)
                    moved += 1
        return f"{moved} nodes to fp32 for their weights' sake"
