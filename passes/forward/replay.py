"""Take the precision of every value from a plan, instead of choosing it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch.fx as fx

from amp_fx.errors import PlanError
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.plans.plan import Decision, node_plan
from amp_fx.plans.reasons import Kind

__all__ = ["Replay"]


@dataclass(frozen=True)
class Replay(Pass):
    """Stands where ``place`` does when the user gives a plan.

    Before (dtypes as autocast would have them)::

        e = torch.ops.aten.expand.default(kv, [8, 4, 512, 64])      # f32

    After, where the plan has bf16 for the call::

        e = torch.ops.aten.expand.default(kv, [8, 4, 512, 64])      # bf16

    Attributes:
        rows: node name in this graph, with the path of its body -> what the plan has decided about it.
    """

    name: ClassVar[str] = "replay"
    needs: ClassVar[frozenset[str]] = frozenset({"classes", "hazards-pinned"})
    ensures: ClassVar[frozenset[str]] = frozenset({"dtypes"})

    rows: Mapping[str, Decision] = field(hash=False)

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        followed = 0
        for node in gm.graph.nodes:
            plan = node_plan(node)
            row = self.rows.get(plan.name) if plan is not None else None
            if plan is None or row is None:
                # what is about numbers has no row
                continue
            if row.is_because(Kind.WIDE_RESULT) and node.meta["val"].device.type != "cuda":
                raise PlanError(
                    f"the plan has {plan.name} ({plan.op}) as a low product that returns fp32, for which this "
                    f"{node.meta['val'].device.type} has no kernel; make a plan for it, or drop the option."
                )
            plan.follow(row)
            followed += 1
        return PassResult(gm, followed, f"{followed} nodes as the plan has them")
