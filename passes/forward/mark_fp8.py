"""Mark the low matmuls whose descendants in the joint graph may run in fp8."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from amp_fx.graphs.capture import REGION_META
from amp_fx.graphs.facts import LOW_DTYPES, is_matmul
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.keyed import CUSTOM, MARK
from amp_fx.plans.plan import node_plan
from amp_fx.policy import OpClass

__all__ = ["MarkFp8", "may_run_in_fp8"]


@dataclass(frozen=True)
class MarkFp8(Pass):
    """Names every matmul that may run in fp8, in a key of ``meta`` that AOTAutograd copies to all that it becomes.

    Gradients, sharing and layouts exist in the joint graph only, so :class:`PlaceFp8` chooses there. What policy and
    plan say is known here:

    1. a matmul that runs in the low dtype, because a list says so or the program itself wrote it so.
    2. none that a user's rule names: ``low`` is then the last word, as ``fp32`` is.
    3. none in a region where the program switched autocast off.
    4. where a plan that is followed says what runs in fp8, the calls that it names.

    No cache knows ``meta``: :class:`PlaceFp8` has the names of all that is marked, and sees no other mark. The graph is
    not changed, only ``meta``::

        linear = torch.ops.aten.linear.default(x_16, w_16)     # meta["custom"] = {"amp_fx_fp8": "linear"}

    Attributes:
        planned: a plan that is followed says what runs in fp8.
    """

    name: ClassVar[str] = "mark-fp8"
    needs: ClassVar[frozenset[str]] = frozenset({"dtypes"})

    planned: bool = False

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        marked = 0
        for node in gm.graph.nodes:
            if self._is_planned(node) if self.planned else may_run_in_fp8(node, context):
                node.meta[CUSTOM] = {**node.meta.get(CUSTOM, {}), MARK: f"{context.path}{node.name}"}
                marked += 1
        return PassResult(gm, marked, f"{marked} matmuls may run in fp8")

    def _is_planned(self, node: fx.Node) -> bool:
        row = node_plan(node)
        return row is not None and bool(row.roles)


def may_run_in_fp8(node: fx.Node, context: PassContext) -> bool:
    """True for a matmul that policy and plan let run in fp8."""
    row = node_plan(node)
    if row is None or row.dtype not in LOW_DTYPES or not is_matmul(node):
        return False
    if context.policy.rule_for(row.op, row.module_path) is not None:
        return False
    region = node.meta.get(REGION_META, {}).get(node.meta["val"].device.type)
    return row.op_class is OpClass.LOW or (region is not None and region.enabled)
