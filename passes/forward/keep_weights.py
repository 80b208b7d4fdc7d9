"""Ops whose weights do not fit into the low dtype run in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from amp_fx.graphs.keys import TIED
from amp_fx.graphs.values import is_view
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.plans.label import Kind, Reason, Takes, label_of
from amp_fx.policy import OpClass

__all__ = ["KeepWeights"]


@dataclass(frozen=True)
class KeepWeights(Pass):
    """Moves the readers of named inputs to fp32, also those that see them through views.

    Before::

        linear = torch.ops.aten.linear.default(x, w)        # low; a value of w is infinite in fp16

    After::

        linear = torch.ops.aten.linear.default(x, w)        # fp32

    Attributes:
        weights: names of graph inputs.
    """

    name: ClassVar[str] = "keep-weights"
    needs: ClassVar[frozenset[str]] = frozenset({"classes"})

    weights: tuple[str, ...]

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        moved = 0
        for node in gm.graph.find_nodes(op="placeholder"):
            if context.path or node.name not in self.weights:
                continue
            for reader in _readers(node):
                plan = label_of(reader)
                if plan is None or TIED.of(reader) or plan.op_class in (OpClass.KEEP, OpClass.FP32):
                    continue
                plan.op_class, plan.takes = OpClass.FP32, Takes.DTYPE
                plan.reasons = (Reason.of(Kind.WEIGHT_RANGE, weight=node.name, low=plan.low),)
                moved += 1
        return PassResult(moved, f"{moved} nodes to fp32 for their weights' sake")


def _readers(weight: fx.Node) -> Iterator[fx.Node]:
    """What reads the weight, directly or through views."""
    for user in weight.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user
