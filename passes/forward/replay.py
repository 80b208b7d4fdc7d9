"""Take the precision of every value from a plan, instead of choosing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx.passes.base import Pass, PassContext
from amp_fx.plans.label import Kind, Label, Reason, label_of
from amp_fx.plans.plan import NodePlan
from amp_fx.policy import OpClass
from amp_fx.policy.table import device_row

__all__ = ["Replay"]

#: what a call takes from its row in a plan
_DECIDED = ("op_class", "reasons", "dtype", "takes", "own_dtype_slots", "pinned", "levels")


@dataclass(frozen=True)
class Replay(Pass):
    """Stands where ``place`` does when the user gives a plan.

    Before (dtypes as autocast would have them)::

        e = torch.ops.aten.expand.default(kv, [8, 4, 512, 64])      # f32

    After, where the plan has bf16 for the call::

        e = torch.ops.aten.expand.default(kv, [8, 4, 512, 64])      # bf16

    A product whose result the plan has in fp32 runs in fp32 where no kernel reads low operands and returns that.

    Attributes:
        rows: node name in this graph, with the path of its body -> what the plan has decided about it.
        stored: the program is stored, for any runtime: none has an op that returns such a result.
    """

    name: ClassVar[str] = "replay"
    needs: ClassVar[frozenset[str]] = frozenset({"classes", "hazards-pinned"})
    ensures: ClassVar[frozenset[str]] = frozenset({"dtypes"})

    rows: Mapping[str, NodePlan] = field(hash=False)
    stored: bool = False

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        """See the class."""
        followed = 0
        for node in gm.graph.nodes:
            plan = label_of(node)
            if plan is None:
                continue
            row = self.rows.get(plan.name)
            if row is None:
                # what is about numbers has no row, nor has what only hands on
                if plan.op_class is OpClass.FOLLOW and plan.traced is not None:
                    plan.dtype = _dtype_of(node.all_input_nodes[0])
                continue
            for name in _DECIDED:
                setattr(plan, name, getattr(row, name))
            if row.is_because(Kind.WIDE_RESULT):
                self._check_wide(plan, node.meta["val"].device.type)
            followed += 1
        return f"{followed} nodes as the plan has them"

    def _check_wide(self, plan: Label, device: str) -> None:
        where = "a program" if self.stored else device
        if not device_row(where).wide_results:
            why = Reason.of(Kind.NO_WIDE_RESULT, device=where, op=plan.op, low=plan.low)
            others = [reason for reason in plan.reasons if reason.kind is not Kind.WIDE_RESULT]
            plan.op_class, plan.dtype, plan.reasons = OpClass.FP32, torch.float32, (*others, why)


def _dtype_of(node: fx.Node) -> torch.dtype:
    plan = label_of(node)
    return node.meta["val"].dtype if plan is None or plan.dtype is None else plan.dtype
