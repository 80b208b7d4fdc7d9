"""Mark the low matmuls whose descendants in the joint graph may run below 16 bits."""

from __future__ import annotations

from dataclasses import dataclass

import torch.fx as fx

from amp_fx.errors import PlanError
from amp_fx.graphs.keys import MARK
from amp_fx.graphs.traits import LINEAR_OPS
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.passes.base import Pass, PassContext, PassResult, mark
from amp_fx.passes.levels.matmuls import Matmul, captured_matmul, divides, may_run_below
from amp_fx.precision.plans.label import label_of
from amp_fx.precision.policy.levels import WEIGHT, Level


@dataclass(frozen=True)
class MarkMatmuls(Pass):
    """Names every matmul that may run below 16 bits, in a key of ``meta`` that AOTAutograd copies to all it becomes.

    Gradients, sharing and layouts exist in the joint graph only, so :class:`PlaceLevels` chooses there. What policy and
    plan say is known here:

    1. a matmul that runs in the low dtype, because a list says so or the program itself wrote it so.
    2. none that a user's rule names: ``low`` is then the last word, as ``fp32`` is.
    3. none in a region where the program switched autocast off.
    4. where a plan that is followed says of matmuls in which level they run, the calls that it names. What no batch
       could run so is a :class:`amp_fx.PlanError`; how many tokens there are is another matter: they may change.

    No cache knows ``meta``: :class:`PlaceLevels` has the names of all that is marked, and sees no other mark. The graph
    Before, and after::

        x: bf16[16, 32]; w: bf16[64, 32]
        linear = torch.ops.aten.linear.default(x, w)        # keep in bf16: low-already
        # after
        linear = torch.ops.aten.linear.default(x, w)        # keep in bf16: low-already; may run below linear

    Attributes:
        planned: a plan that is followed says what runs below 16 bits.
    """

    planned: bool = False

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        marked = 0
        for node in gm.graph.nodes:
            if self._is_planned(node, context) if self.planned else may_run_below(node, context):
                mark(node, MARK, f"{context.path}{node.name}")
                marked += 1
        return PassResult(f"{marked} matmuls may run below 16 bits", marked)

    def _is_planned(self, node: fx.Node, context: PassContext) -> bool:
        label = label_of(node)
        if label is None or not label.levels:
            return False
        for role, level in label.levels_below.items():
            if why := _refusal(captured_matmul(node, context), role, level):
                raise PlanError(
                    f"the plan runs {label.name} ({label.op}) in {level.name}, {role}: {why}. Make a new plan, or drop "
                    "the option."
                )
        return True


def _refusal(matmul: Matmul | None, role: str, level: Level) -> str:
    """Why no batch could run so, or an empty string."""
    if matmul is None or matmul.node.meta["val"].dtype not in LOW_DTYPES:
        return f"only {', '.join(LINEAR_OPS)} with a matrix, in the low dtype, run so"
    if role == WEIGHT and not level.weight_gradients:
        return f"{level.name} leaves gradients of weights in the low dtype"
    grain = min(kernel.grain for kernel in level.kernels)
    if not divides(grain, matmul.sizes[1:]):
        return f"{grain} does not divide its sizes {' x '.join(map(str, matmul.sizes[1:]))}"
    return ""
