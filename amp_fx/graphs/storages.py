"""Storages: which values share one, and which calls write to one."""

from __future__ import annotations

import torch
import torch.fx as fx

from amp_fx._torch import FakeTensor, OpOverload
from amp_fx.graphs.calls import argument_value, arguments, is_gradient_call, tensor_nodes
from amp_fx.graphs.traits import op_row
from amp_fx.graphs.values import tensors

__all__ = ["in_place_target", "is_view", "storage_of", "written_arguments", "written_storages"]


def storage_of(node: fx.Node) -> int | None:
    """An identity for the one storage behind the node's value; equal for views of each other.

    ``chunk`` and its kin return several views of one storage, and have it too. None for values without a
    storage, or with several.
    """
    values = tensors(node.meta.get("val"))
    if not all(isinstance(value, FakeTensor) and value.layout is torch.strided for value in values):
        return None
    keys = {value.untyped_storage()._cdata for value in values}
    return keys.pop() if len(keys) == 1 else None


def is_view(node: fx.Node) -> bool:
    """True where the value looks into the storage of the node's first argument, or is one of its results."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    key = storage_of(node)
    return key is not None and key == storage_of(node.all_input_nodes[0])


def written_arguments(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """Arguments that the node writes to or, as ``batch_norm`` for evaluation, would write to; by name."""
    if not isinstance(node.target, OpOverload):
        return []
    names = {a.name for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write}
    names.update(op_row(node).writes)
    if not names:
        return []
    return [
        (name, source) for name, value in arguments(node) if name in names for source in tensor_nodes(value)
    ]


def in_place_target(node: fx.Node) -> fx.Node | None:
    """What an in-place op (``add_``) writes to and returns; None for other ops.

    ``batch_norm`` is none, though its schema is mutable for the running statistics' sake.
    """
    op = node.target
    if not isinstance(op, OpOverload) or not op._schema.is_mutable or not op._schema.name.endswith("_"):
        return None
    return written_arguments(node)[0][1]


def written_storages(node: fx.Node) -> set[int]:
    """Storages the node writes to. A call whose effects are unknown counts as writing to all it is given."""
    if node.op not in ("call_function", "call_method"):
        return set()
    if isinstance(node.target, OpOverload):
        switch = op_row(node).writes_if
        only_reads = switch and not argument_value(node, switch)
        sources = [] if only_reads else [source for _, source in written_arguments(node)]
    elif getattr(node.target, "__module__", "") in ("_operator", "operator", "math") or is_gradient_call(
        node
    ):
        sources = []
    else:
        sources = node.all_input_nodes
    return {key for source in sources if (key := storage_of(source)) is not None}
