"""Inputs and outputs in the low dtype, for programs whose user asks for it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind
from torch.utils._pytree import tree_flatten, tree_unflatten

from amp_fx.graphs.calls import output_nodes
from amp_fx.graphs.keys import CAST_META, OUTPUT_META, REGION_META
from amp_fx.graphs.values import is_eligible, storage_of, tensors, written_storages

__all__ = ["check_dtypes", "low_examples", "narrow_ends"]


def narrow_ends(
    gm: fx.GraphModule, signature: ExportGraphSignature, low: torch.dtype
) -> dict[str, torch.dtype]:
    """Puts the user's fp32 inputs and outputs into the low dtype; the casts inside are fused by the passes.

    Inputs that the program writes to keep theirs.

    Returns:
        Names of the inputs whose dtype has changed -> the low dtype.
    """
    users = {spec.arg.name for spec in signature.input_specs if spec.kind is InputKind.USER_INPUT}
    # a program that was not decomposed writes in its graph, and its signature does not say so
    storages = {key for node in gm.graph.nodes for key in written_storages(node)}
    written = {node.name for node in gm.graph.find_nodes(op="placeholder") if storage_of(node) in storages}
    written.update(signature.user_inputs_to_mutate.values())
    narrowed: dict[str, torch.dtype] = {}
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        if node.name in users - written and is_eligible(value) and value.dtype is torch.float32:
            narrowed[node.name] = low
            node.meta["val"] = value.to(low)
            node.meta.pop("tensor_meta", None)
            wide = _cast(node, value.dtype, before=_first_call(gm.graph))
            node.replace_all_uses_with(wide, delete_user_cb=lambda user, wide=wide: user is not wide)
    output = gm.graph.output_node()
    ends = list(output.args[0])  # type: ignore[arg-type]  # a tuple
    for index, spec in enumerate(signature.output_specs):
        value = ends[index].meta.get("val") if isinstance(ends[index], fx.Node) else None
        if spec.kind is OutputKind.USER_OUTPUT and is_eligible(value) and value.dtype is torch.float32:
            ends[index] = _cast(ends[index], low, before=output)
    output.args = (tuple(ends),)
    output.meta[OUTPUT_META] = [[v.dtype for v in tensors(n.meta.get("val"))] for n in output_nodes(gm)]
    return narrowed


def _first_call(graph: fx.Graph) -> fx.Node:
    return next(node for node in graph.nodes if node.op != "placeholder")


def _cast(node: fx.Node, dtype: torch.dtype, before: fx.Node) -> fx.Node:
    with node.graph.inserting_before(before):
        cast = node.graph.call_function(torch.ops.aten.to.dtype, (node, dtype))
    neighbour = next((user for user in node.users if REGION_META in user.meta), node)
    cast.meta = {
        key: neighbour.meta[key] for key in ("nn_module_stack", "stack_trace") if key in neighbour.meta
    }
    cast.meta.update(
        {CAST_META: True, REGION_META: neighbour.meta.get(REGION_META, {}), "val": node.meta["val"].to(dtype)}
    )
    return cast


def check_dtypes(gm: fx.GraphModule, names: Collection[str]) -> None:
    """Puts a check of its dtype behind each of these inputs.

    A runtime that knows nothing of amp_fx then says which dtype it wants, instead of failing in some matmul.
    """
    for node in gm.graph.find_nodes(op="placeholder"):
        if node.name in names:
            with gm.graph.inserting_before(_first_call(gm.graph)):
                gm.graph.call_function(
                    torch.ops.aten._assert_tensor_metadata.default, (node,), {"dtype": node.meta["val"].dtype}
                )


def low_examples(ep: torch.export.ExportedProgram, dtypes: Mapping[str, torch.dtype]) -> Any:
    """The example inputs of a program, in the dtypes that its inputs of these names have now."""
    leaves, spec = tree_flatten(ep.example_inputs)
    names = ep.graph_signature.user_inputs
    if len(leaves) != len(names):
        # None, where the program was read from a file without them
        return ep.example_inputs
    lows = [
        value.to(dtypes[str(name)]) if isinstance(value, torch.Tensor) and str(name) in dtypes else value
        for name, value in zip(names, leaves, strict=True)
    ]
    return tree_unflatten(lows, spec)
