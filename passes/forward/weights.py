"""Weights in a graph: copies of them that are made once are marked, or their readers run in fp32."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx._torch import quantised_ops
from amp_fx.graphs.calls import argument_value, graph_inputs_of, is_cast, is_returned, readers
from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.keys import CAST_META, KEPT_META, PART, STEP_META, TIED, Kept
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.values import LOW_DTYPES, is_eligible, is_pure, is_view, storage_of, storages_written_in
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.levels.quantise_matmuls import Part
from amp_fx.precision.plans.label import Reason, ReasonKind, Takes, label_of
from amp_fx.precision.plans.plan import dtype_name
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.forms import ScaledRows
from amp_fx.precision.policy.levels import LEVELS

aten = torch.ops.aten

#: names of a copy with scales, its factors, and what the values that it multiplies are multiplied by
_BESIDE = "", "_scale", "_equalisation"


@dataclass(frozen=True)
class MarkCopies(Pass):
    """Marks every copy that the graph makes of a weight, so that it is made once and kept across calls.

    :mod:`amp_fx.runtime.weights.lift` takes what is marked out of the graph. Not marked are copies of weights that the
    graph writes to, copies that it writes to, and copies that it returns, as the caller may keep those.

    1. casts to a low dtype.
    2. copies with scales, their factors, and the powers by which values are equalised (:class:`QuantiseMatmuls`).

    Before, and after::

        x: bf16[2, 4]; w: f32[4, 4]
        low = torch.ops.aten.to.dtype(w, torch.bfloat16)        # bf16[4, 4]; inserted
        linear = torch.ops.aten.linear.default(x, low)
        # after
        low = torch.ops.aten.to.dtype(w, torch.bfloat16)        # bf16[4, 4]; inserted; kept w _bfloat16 torch.bfloat16
        linear = torch.ops.aten.linear.default(x, low)
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        if context.path:
            return PassResult("a body has no weights of its own", 0)
        written, parts = storages_written_in(gm.graph), _parts(gm.graph)
        marked = 0
        for weight in gm.graph.find_nodes(op="placeholder"):
            if weight.name not in context.folded or storage_of(weight) in written:
                continue
            copies: list[tuple[fx.Node, str, torch.dtype | ScaledRows]] = []
            for user in list(weight.users):  # case 1
                dtype = user.meta["val"].dtype if _is_kept_cast(user, written) else None
                if dtype in LOW_DTYPES:
                    copies.append((user, f"_{dtype_name(dtype)}", dtype))
            for node, part in parts.get(weight, ()):  # case 2
                suffix = LEVELS[part.form.level].policy + _BESIDE[part.index]
                copies.append((node, f"_{suffix}", part.form))
            for node, suffix, form in copies:
                _mark(node, weight, suffix, form)
            marked += len(copies)
        return PassResult(f"{marked} low copies of weights are kept", marked)


@dataclass(frozen=True)
class MarkStored(Pass):
    """Marks what a program is stored with in the place of its weights.

    Cases:

    1. every reader casts the weight to one low dtype: the cast is stored in its place.
    2. the same, but rows of the weight are looked up, too (an embedding tied to a head): rows of the cast are looked
       up, and widened. Left out if ``tables`` is ``"keep"``.
    3. rows are looked up and nothing else: as case 2 if ``tables`` is ``"low"``.
    4. only copies with scales, in one form, are made of the weight: the copy is stored in its place, and its factors
       beside it.
    5. what is computed from weights alone to quantise them, as of a convolution with a folded BatchNorm, is stored
       beside them; weights that nothing reads then go.
    6. powers by which values are equalised, beside a weight that is read in other forms, too.
    7. anything else (written to, read in fp32 too, or with a cast that is written to or returned) keeps its dtype and
       its casts.

    Before, and after::

        x: bf16[2, 4]; w: f32[4, 4]
        low = torch.ops.aten.to.dtype(w, torch.bfloat16)        # bf16[4, 4]; inserted
        linear = torch.ops.aten.linear.default(x, low)
        # after
        low = torch.ops.aten.to.dtype(w, torch.bfloat16)        # bf16[4, 4]; inserted; kept w torch.bfloat16
        linear = torch.ops.aten.linear.default(x, low)
    """

    weights: tuple[tuple[str, ...], ...]  # names of inputs; those that hold the same weight stand together
    tables: str = "tied"  # or "low" or "keep": which tables of lookups are rounded

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        if context.path:
            return PassResult("a body has no weights of its own", 0)
        inputs = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
        written, parts = storages_written_in(gm.graph), _parts(gm.graph)
        stored = set[str]()
        for names in self.weights:
            holders = [inputs[name] for name in names]
            if any(storage_of(holder) in written for holder in holders):
                continue
            form, dtype = _scaled_form(holders), self._stored_dtype(holders, written)
            for holder in holders:
                if form is not None:
                    for node, part in parts.get(holder, ()):
                        suffix = f"_{LEVELS[form.level].policy}{_BESIDE[part.index]}" if part.index else ""
                        _mark(node, holder, suffix, form)
                elif dtype is not None:
                    for cast in _casts_of(holder, dtype):
                        _mark(cast, holder, "", dtype)
            if form is not None or dtype is not None:
                stored.update(names)
        names = {name for names in self.weights for name in names}
        self._mark_steps(gm.graph, names - stored)
        _mark_powers(gm.graph, names)
        return PassResult(f"{len(stored)} weights are stored low", len(stored))

    def _mark_steps(self, graph: fx.Graph, weights: Collection[str]) -> None:
        """Case 5."""
        whole = quantised_ops().dequantize_per_channel.default
        written, made = storages_written_in(graph), dict[fx.Node, fx.Node]()
        for node in graph.nodes:
            given = [made.get(each) for each in node.all_input_nodes]
            if node.op == "placeholder" and node.name in weights and storage_of(node) not in written:
                made[node] = node
            elif STEP_META in node.meta and node.target is not whole and given and is_pure(node):
                known = [weight for weight in given if weight is not None]
                if len(known) == len(given) and not (is_cast(node) and node.all_input_nodes == known):
                    # it is named after the largest
                    made[node] = max(reversed(known), key=lambda weight: weight.meta["val"].numel())
        ends = (whole, aten.conv2d.default)
        for node, weight in made.items():
            reader = next((user for user in node.users if user not in made and user.target in ends), None)
            if node is weight or reader is None:
                continue
            kind = "folded"
            if reader.target is whole:
                kind = ("int8", "int8_scale", "int8_zero_point")[reader.args.index(node)]
            _mark(node, weight, f"_{kind}")

    def _stored_dtype(self, holders: list[fx.Node], written: Collection[int | None]) -> torch.dtype | None:
        """The low dtype that serves all readers; None: as it is."""
        values = [holder.meta.get("val") for holder in holders]
        if not all(is_eligible(value) and value.dtype is torch.float32 for value in values):
            return None
        wanted: set[torch.dtype | None] = set()
        rows: set[torch.dtype | None] = set()
        for holder in holders:
            for user in holder.users:
                label = label_of(user)
                is_lookup = user.target is aten.embedding.default and argument_value(user, "weight") is holder
                if _is_kept_cast(user, written):
                    wanted.add(user.meta["val"].dtype)
                elif self.tables != "keep" and is_lookup and label and label.op_class is OpClass.FOLLOW:
                    # the policy lets it return rounded rows
                    rows.add(label.low)
                else:
                    return None
        dtypes = rows if self.tables == "low" and not wanted else wanted
        dtype = next(iter(dtypes)) if len(dtypes) == 1 else None
        return dtype if dtype in LOW_DTYPES else None


def _mark_powers(graph: fx.Graph, weights: Collection[str]) -> None:
    """Case 6 of :class:`MarkStored`: no program has the literals that powers are made of."""
    made = 0
    for literal in graph.find_nodes(op="call_function", target=torch.tensor):
        for powers in literal.users:
            sources = [*dict.fromkeys(graph_inputs_of(powers))]
            if STEP_META not in powers.meta or KEPT_META in powers.meta or len(sources) != 1:
                continue
            [weight] = sources
            if weight.name in weights:
                made += 1
                _mark(powers, weight, f"{_BESIDE[2]}_{made}")


def _parts(graph: fx.Graph) -> dict[fx.Node, list[tuple[fx.Node, Part]]]:
    """The tensors that :class:`QuantiseMatmuls` has made of each matrix that may be kept."""
    found: dict[fx.Node, list[tuple[fx.Node, Part]]] = {}
    for node in graph.nodes:
        if (part := node.meta.get(PART)) is not None:
            found.setdefault(part.source, []).append((node, part))
    return found


def _mark(node: fx.Node, weight: fx.Node, suffix: str, form: torch.dtype | ScaledRows | None = None) -> None:
    node.meta[KEPT_META] = Kept(weight.name, suffix, form)
    # it is read as a weight is
    node.meta.pop(STEP_META, None)


def _scaled_form(holders: Sequence[fx.Node]) -> ScaledRows | None:
    """The form of the copies with scales, if all that is made of these inputs are copies of one form."""

    def is_step(reader: fx.Node) -> bool:
        return STEP_META in reader.meta and reader.meta.get(PART) is None

    read = {reader for holder in holders for reader in readers(holder, is_step) if not is_step(reader)}
    forms = {None if (part := reader.meta.get(PART)) is None else part.form for reader in read}
    return forms.pop() if len(forms) == 1 else None


def _is_kept_cast(user: fx.Node, written: Collection[int | None]) -> bool:
    """True for a cast whose result another tensor may be: nobody writes to it, nor gets hold of it."""
    is_plain = is_cast(user) and len(user.args) == 2 and not user.kwargs
    return is_plain and storage_of(user) not in written and not is_returned(user)


def _casts_of(holder: fx.Node, dtype: torch.dtype) -> list[fx.Node]:
    """The casts of a weight to a dtype, once its lookups read one, too."""
    casts = list[fx.Node]()
    for user in list(holder.users):
        casts.append(user if is_cast(user) else _look_up_low(user, holder, dtype))
    return casts


def _look_up_low(lookup: fx.Node, table: fx.Node, dtype: torch.dtype) -> fx.Node:
    """Has a lookup read a low table, whose rows are widened; returns the cast of the table."""
    work = Rewriter(lookup.graph, meta={CAST_META: True})
    with work.before(lookup):
        low = work.cast(table, dtype)
    lookup.replace_input_with(table, low)
    lookup.meta["val"] = run_fake(lookup)
    lookup.meta.pop("tensor_meta", None)
    with work.after(lookup):
        rows = work.cast(lookup, torch.float32)
    lookup.replace_all_uses_with(rows, delete_user_cb=lambda user: user is not rows)
    if (label := label_of(lookup)) is not None:
        label.dtype = lookup.meta["val"].dtype
        label.reasons += (Reason.of(ReasonKind.STORED_TABLE, dtype=label.dtype),)
    return low


@dataclass(frozen=True)
class KeepWeights(Pass):
    """Moves the readers of named inputs to fp32, also those that see them through views.

    Before, and after::

        x: f32[2, 4]; w: f32[4, 4]
        linear = torch.ops.aten.linear.default(x, w)        # low
        # after: a value of w is infinite in fp16
        linear = torch.ops.aten.linear.default(x, w)        # fp32: weight-range
    """

    weights: tuple[str, ...]  # names of inputs

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        moved = 0
        for node in gm.graph.find_nodes(op="placeholder"):
            if context.path or node.name not in self.weights:
                continue
            for reader in readers(node, is_view):
                label = label_of(reader)
                if label is None or is_view(reader) or reader.meta.get(TIED):
                    continue
                if label.op_class not in (OpClass.KEEP, OpClass.FP32):
                    label.op_class, label.takes = OpClass.FP32, Takes.DTYPE
                    label.reasons = (Reason.of(ReasonKind.WEIGHT_RANGE, weight=node.name, low=label.low),)
                    moved += 1
        return PassResult(f"{moved} nodes to fp32 for their weights' sake", moved)
