"""Take calls out of the low dtype where their surroundings make it wrong, and tie what shares a storage."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx.graphs.calls import differentiated
from amp_fx.graphs.keys import LABEL, MAY_ROUND, TIED
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import is_eligible, storage_of, written_arguments, written_storages
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.forward.hazards import HAZARDS, constants
from amp_fx.precision.plans.label import Reason, ReasonKind, Takes, label_of
from amp_fx.precision.policy import OpClass


@dataclass(frozen=True)
class Constrain(Pass):
    """Takes nodes out of the low dtype where their surroundings make it wrong or unsafe.

    Patterns (``HAZARDS`` in ``hazards.py``, each a function with its failing example) move single nodes to ``fp32``.
    Then tensors that share a storage with something written, or with another output, are tied together: none of them
    can be re-typed alone, and where an input or two outputs share it, or a call that is not ours writes to it, it keeps
    its traced dtype.

    Before, low dtype fp16, and after::

        q: f32[4, 8]; k: f32[8, 4]; mask: bool[4, 4]
        scores = torch.ops.aten.matmul.default(q, k)                        # low
        masked = torch.ops.aten.masked_fill.Scalar(scores, mask, -3.4e38)   # promote
        # after
        scores = torch.ops.aten.matmul.default(q, k)                        # low
        masked = torch.ops.aten.masked_fill.Scalar(scores, mask, -3.4e38)   # fp32: scalar-range
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        pinned = 0
        for hazard, rounds_like_eager in HAZARDS:
            if context.numerics == "eager" and not rounds_like_eager:
                continue
            for node, why in list(hazard(gm.graph)):
                pinned += _to_fp32(node, why)
        _forbid_rounding(gm.graph)
        _pin_differentiated(gm.graph)
        tied = _tie_storages(gm)
        return PassResult(f"{pinned} nodes to fp32, {tied} tied to a shared storage", pinned + tied)


def _to_fp32(node: fx.Node, why: Reason) -> int:
    label = node.meta[LABEL]
    if label.op_class is OpClass.FP32:
        return 0
    if node.meta.get(TIED):
        # a write runs in the dtype of what it writes to: the storage has to be fp32
        for _, target in written_arguments(node):
            key = storage_of(target)
            root = label_of(next(owner for owner in node.graph.nodes if storage_of(owner) == key))
            if root is not None:
                root.pinned, root.reasons = torch.float32, (why,)
    else:
        label.op_class, label.takes, label.hazard = OpClass.FP32, Takes.DTYPE, True
    label.reasons = (why,)
    return 1


def _forbid_rounding(graph: fx.Graph) -> None:
    """Policy ``fast`` rounds nothing that holds a constant beyond the low range, or that feeds no matmul.

    ``scores + mask`` with a mask of ``finfo(float32).min`` would hold -inf, and fully masked rows give NaN.
    """
    huge: set[fx.Node] = set()
    feeds_low: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        label = label_of(node)
        if (label is not None and label.op_class is OpClass.LOW) or node in feeds_low:
            feeds_low.update(node.all_input_nodes)
    for node in graph.nodes:
        label = label_of(node)
        if label is None:
            continue
        beyond = any(
            math.isfinite(c) and abs(c) > torch.finfo(label.low or torch.float16).max for c in constants(node)
        )
        if beyond or (
            label.op_class is not OpClass.LOW and any(source in huge for source in node.all_input_nodes)
        ):
            huge.add(node)
        if node in huge or node not in feeds_low:
            node.meta[MAY_ROUND] = False


def _pin_differentiated(graph: fx.Graph) -> None:
    """A value by which the graph takes gradients has its traced dtype for all, or the loss would not depend on it.

    ``h = x @ w; g = torch.autograd.grad(loss(h), h)``: were the product bf16 for the loss and cast to fp32 for the
    call, the call would raise.
    """
    for node in differentiated(graph):
        if (label := label_of(node)) is not None:
            label.pinned = label.traced


def _tie_storages(gm: fx.GraphModule) -> int:
    """Ties every node whose storage is written to, or visible twice from outside."""
    members: dict[int, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if (key := storage_of(node)) is not None:
            members.setdefault(key, []).append(node)
    calls = [node for node in gm.graph.nodes if node.op == "call_function"]
    written = {storage_of(source) for call in calls for _, source in written_arguments(call)}
    # what is not ours writes to the value itself, in the traced dtype
    others = [node for node in gm.graph.nodes if (label := label_of(node)) and label.op_class is OpClass.KEEP]
    kept = frozenset[int]().union(*map(written_storages, others))
    outputs = set(gm.graph.output_node().all_input_nodes)
    tied = 0
    for key, nodes in members.items():
        shared_outside = sum(node in outputs or node.op == "placeholder" for node in nodes) > 1
        exact = key in kept or any(has_trait(node, Trait.EXACT_LAYOUT) for node in nodes)
        if not (key in written or shared_outside or exact):
            continue
        _tie(nodes, pin=shared_outside or exact)
        tied += sum(label_of(node) is not None for node in nodes)
    return tied


def _tie(nodes: list[fx.Node], pin: bool) -> None:
    root, views = nodes[0], nodes[1:]
    for node in views:
        label = label_of(node)
        if label is None:
            continue
        node.meta[TIED] = True
        writes = bool(written_arguments(node))
        if label.op_class is OpClass.KEEP:
            pin = True
        elif not writes:
            label.op_class, label.takes = OpClass.FOLLOW, Takes.ANY
            label.reasons = (Reason(ReasonKind.SHARED_STORAGE),)
    label = label_of(root)
    if label is None or not is_eligible(root.meta.get("val")):
        return
    root.meta[TIED] = True
    if pin and label.pinned is None:
        label.pinned = label.traced
