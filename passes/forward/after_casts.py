"""Once casts are inserted: conversions that do nothing go, and the graph is checked."""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload
from amp_fx.errors import VerifyError
from amp_fx.graphs.calls import differentiated, grad_modes, is_cast, output_nodes, where
from amp_fx.graphs.fake_runs import fake_values, run_fake
from amp_fx.graphs.keys import CAST_META, RAN_META, STEP_META, TRACED_META
from amp_fx.graphs.values import (
    PLACED_DTYPES,
    dtypes_and_sizes,
    is_eligible,
    storage_of,
    storages_written_in,
    tensors,
)
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.forward.insert_casts import retyped_arguments
from amp_fx.precision.plans.label import Label, Takes, label_of
from amp_fx.precision.policy import OpClass


@dataclass(frozen=True)
class FuseCasts(Pass):
    """Fuses casts. Only pass-inserted casts are removed; a user's narrowing cast is a rounding and stays.

    Cases:

    1. round trip: an inserted narrowing of a widened value of the same dtype is the value itself.
    2. an inserted cast to the dtype its input already has is its input.
    3. siblings: an inserted cast equal to an earlier cast of the same value reuses it.
    4. an inserted cast nobody reads goes.

    No case applies to a storage that anything in the graph writes to, to a value that the graph takes gradients by,
    nor between code with gradients and code without.

    Before, and after::

        x: bf16[4, 4]; w: bf16[4, 4]
        # the program's .float()
        wide = torch.ops.aten.to.dtype(x, torch.float32)
        low = torch.ops.aten.to.dtype(wide, torch.bfloat16)         # bf16[4, 4]; inserted
        mm = torch.ops.aten.matmul.default(low, w)
        return [wide, mm]
        # after
        wide = torch.ops.aten.to.dtype(x, torch.float32)
        mm = torch.ops.aten.matmul.default(x, w)
        return [wide, mm]
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        fusible = _fusible_casts(gm.graph)
        modes = grad_modes(gm.graph)
        seen: dict[tuple[fx.Node, torch.dtype, bool], fx.Node] = {}
        removed = 0
        for node in list(gm.graph.nodes):
            if node not in fusible:
                continue
            source, dtype = node.all_input_nodes[0], node.meta["val"].dtype
            key = (source, dtype, modes[node])
            replacement = None
            if CAST_META in node.meta:
                here = {cast for cast in fusible if modes[cast] is modes[node]}
                replacement = _round_trip(source, dtype, here) or seen.get(key)  # cases 1 to 3
            if replacement is None:
                seen.setdefault(key, node)
                continue
            node.replace_all_uses_with(replacement)
            gm.graph.erase_node(node)
            removed += 1
        for node in reversed(list(gm.graph.nodes)):  # case 4
            if CAST_META in node.meta and not node.users:
                gm.graph.erase_node(node)
                removed += 1
        return PassResult(f"{removed} casts removed", removed)


def _fusible_casts(graph: fx.Graph) -> set[fx.Node]:
    """Casts between placed dtypes, of storages that nobody writes to.

    The cast that a gradient is taken by stays, and so does what leads from it to the loss.
    """
    written, fixed = storages_written_in(graph), differentiated(graph)
    casts = [(node, node.all_input_nodes[0]) for node in graph.nodes if is_cast(node) and node not in fixed]
    return {
        cast
        for cast, source in casts
        if all(is_eligible(n.meta.get("val")) for n in (cast, source))
        and not {storage_of(cast), storage_of(source)} & written
    }


def _round_trip(source: fx.Node, dtype: torch.dtype, casts: set[fx.Node]) -> fx.Node | None:
    """The value that ``to(source, dtype)`` equals bit for bit, looking through ``casts``; or None."""
    value = source
    while value.meta["val"].dtype is not dtype:
        if value not in casts:
            return None
        inner = value.all_input_nodes[0]
        before, after = inner.meta["val"].dtype, value.meta["val"].dtype
        if before is not after and before.itemsize >= after.itemsize:
            return None  # narrowed: information is gone
        value = inner
    return value


@dataclass(frozen=True)
class Verify(Pass):
    """Re-propagates fake tensors and raises on the first broken contract.

    Checked:

    1. every call that was re-typed, or reads what a pass has added, runs and gives the dtypes its ``meta["val"]``
       claims. Those that ran on the very same values when casts were inserted have shown it.
    2. every result of a call has the size of the program as traced, and its dtype, but for what amp_fx places: an
       op that reads bits has other sizes for another dtype. Of ``keep``, the very dtypes.
    3. ``low`` and ``fp32`` ops take and produce the planned dtype; fake tensors let a matmul have two.
    4. the graph's outputs have the dtypes and sizes of the program as traced.

    A graph that no casts were inserted into::

        x: f32[4, 4]; w: f32[4, 4]
        mm = torch.ops.aten.matmul.default(x, w)                    # f32[4, 4]; low in bf16
        # raises VerifyError: mm (matmul) is planned as torch.bfloat16 but gives torch.float32
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        checked = 0
        for node in gm.graph.nodes:
            label, ran = label_of(node), node.meta.pop(RAN_META, None)
            if label is None or not isinstance(node.target, OpOverload):
                continue
            traced = node.meta.pop(TRACED_META, None)
            now = fake_values(node)
            has_run = ran is not None and len(ran) == len(now) and all(map(operator.is_, ran, now))
            if not has_run and any(map(_is_retyped, node.all_input_nodes)):  # case 1
                got = [value.dtype for value in tensors(run_fake(node))]
                claimed = [value.dtype for value in tensors(node.meta.get("val"))]
                if got != claimed:
                    raise VerifyError(f"{node.name} gives {got}, its metadata says {claimed} [{where(node)}]")
            if traced is not None and not _is_as_traced(node, label, traced):  # case 2
                raise VerifyError(
                    f"{node.name} gives {dtypes_and_sizes(node)}, traced {traced} [{where(node)}]"
                )
            # without gradients, what multiplies below 16 bits takes what its level says
            is_below = label.computed is not label.dtype and not context.training
            if label.op_class in (OpClass.LOW, OpClass.FP32) and not is_below:  # case 3
                _check_planned(node, label)
            checked += 1
        results = gm.graph.output_node().meta[TRACED_META]
        for node, traced in zip(output_nodes(gm), results, strict=True):  # case 4
            if (got := dtypes_and_sizes(node)) != traced:
                what = f"output {node.name} has dtypes and sizes {got}, Dynamo traced {traced}"
                raise VerifyError(f"{what} [{where(node)}]")
        return PassResult(f"{checked} calls checked", 0)


def _is_retyped(source: fx.Node) -> bool:
    """True where the value may have another dtype than in the program as traced."""
    label, value = label_of(source), source.meta.get("val")
    if label is None:
        return CAST_META in source.meta or STEP_META in source.meta
    return is_eligible(value) and value.dtype is not label.traced


def _is_as_traced(node: fx.Node, label: Label, traced: list[tuple[torch.dtype, list[int]]]) -> bool:
    """True where each result has the traced size, and the traced dtype or, if the call is placed, another of ours."""
    got, places = dtypes_and_sizes(node), () if label.op_class is OpClass.KEEP else PLACED_DTYPES
    return len(got) == len(traced) and all(
        size == before and (dtype is was or (dtype in places and was in places))
        for (dtype, size), (was, before) in zip(got, traced, strict=True)
    )


def _check_planned(node: fx.Node, label: Label) -> None:
    planned = f"{node.name} ({label.op}) is planned as {label.dtype}"
    first = next((value.dtype for value in tensors(node.meta["val"]) if is_eligible(value)), None)
    if first is not None and first is not label.dtype:
        raise VerifyError(f"{planned} but gives {first} [{where(node)}]")
    for _, source in retyped_arguments(node, label) if label.takes == Takes.DTYPE else ():
        dtype = source.meta["val"].dtype
        if dtype is not label.dtype:
            raise VerifyError(f"{planned} but takes {source.name} in {dtype} [{where(node)}]")
