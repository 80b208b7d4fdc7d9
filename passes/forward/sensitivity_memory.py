"""What a compiled training step writes to memory between its kernels, as far as rounding is about it.

Inductor computes fused kernels in fp32. So of the values and gradients that a plan has low, only those are rounded that
are written. Values: see :class:`amp_fx.placement.cost.CostModel`; and those that are only kept for the backward.
Gradients: the backward is the forward's mirror, so both are read off the forward graph.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.fx as fx

from amp_fx.graphs.calls import argument_value
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import numel
from amp_fx.placement.cost import CostModel
from amp_fx.plans.label import label_of
from amp_fx.plans.sensitivity import CallSensitivity, slots
from amp_fx.policy import OpClass

__all__ = ["Memory"]


class Memory:
    """What is written of one graph's values and gradients."""

    def __init__(self, graph: fx.Graph, cost: CostModel, rows: Mapping[str, CallSensitivity]) -> None:
        """Looks at the graph once.

        Args:
            graph: classified.
            cost: of the graph.
            rows: what was measured, by the call's name: it says where gradients flow.
        """
        self._cost = cost
        self._rows = rows
        self._level: dict[fx.Node, int] = {}
        self._sources: dict[fx.Node, frozenset[fx.Node]] = {}
        self._written: set[fx.Node] = set()
        for node in reversed(graph.nodes):
            # kernels of the backward that run before the gradient of the node is complete
            levels = [self._level[user] + cost.is_external(user) for user in node.users]
            self._level[node] = max(levels, default=0)
        for node in graph.nodes:
            self._sources[node] = self._read_from(node)
            if self._is_read(node) or self._is_kept(node):
                self._written.add(node)

    def writes_value(self, value: fx.Node) -> bool:
        """True for fused values that a forward kernel, or the backward, finds in memory."""
        return value in self._written

    def writes_gradient(self, value: fx.Node) -> bool:
        """True where the gradient of a value is in memory, in the dtype that the value has.

        1. Library kernels read the gradient of their result, and so do sums over repeated elements.
        2. A gradient that is part of another one, which a later kernel completes, waits for it: that of a residual add.
        """
        plan = label_of(value)
        if plan is None:
            return False
        if self._cost.is_view(value):
            return self.writes_gradient(value.all_input_nodes[0])
        if plan.op_class is OpClass.LOW or self._cost.accumulates_backward(value):
            return True
        return any(
            self._level[source] > self._level[value]
            for slot, _, source in slots(value)
            if self._flows(value, slot)
        )

    def passes_on(self, reader: fx.Node, value: fx.Node) -> bool:
        """True where the reader hands the gradient of its result to the value as it is."""
        if self._cost.is_view(reader):
            return True
        plan = label_of(reader)
        if plan is None or not _same_shape(reader, value):
            return False
        if plan.op == "dropout":
            return not argument_value(reader, "p") or not argument_value(reader, "train")
        return has_trait(plan.op, Trait.PASSES_GRADIENT)

    def _flows(self, reader: fx.Node, slot: str) -> bool:
        """True where a gradient goes from a call to an operand; where that was not measured, it may."""
        plan = label_of(reader)
        row = None if plan is None else self._rows.get(plan.name)
        return row is None or slot not in row.reads or row.reads[slot].gradient != 0

    def _is_read(self, value: fx.Node) -> bool:
        cost = self._cost
        return not cost.is_stored(value) and any(cost.reads_memory(user, value) for user in value.users)

    def _is_kept(self, value: fx.Node) -> bool:
        """True where the backward needs a fused value and has no cheaper way to it.

        What follows from a single value in memory is computed again from that. What joins two of them, as a residual
        add does, is kept in their place.
        """
        if self._cost.is_stored(value) or len(self._sources[value]) < 2:
            return False
        return any(
            self._cost.saves_input(user) and any(self._flows(user, slot) for slot, _, _ in slots(user))
            for user in value.users
        )

    def _read_from(self, value: fx.Node) -> frozenset[fx.Node]:
        """The values that a fused one is computed from: large ones, in memory only because they are kept."""
        if label_of(value) is None:
            return frozenset()
        found: set[fx.Node] = set()
        for _, _, source in slots(value):
            base = source
            while self._cost.is_view(base):
                base = base.all_input_nodes[0]
            in_memory = base in self._written or self._cost.is_stored(base)
            if not in_memory and not self._cost.accumulates_backward(base):
                found |= self._sources[base]
            elif not self._cost.is_input(base):
                found.add(base)
        return frozenset(source for source in found if 2 * _size(source) >= _size(value))


def _size(node: fx.Node) -> int:
    value = node.meta.get("val")
    return numel(value) if isinstance(value, torch.Tensor) else 0


def _same_shape(reader: fx.Node, value: fx.Node) -> bool:
    given, result = value.meta.get("val"), reader.meta.get("val")
    return (
        isinstance(given, torch.Tensor) and isinstance(result, torch.Tensor) and given.shape == result.shape
    )
