"""Choose which low matmuls run in a level below 16 bits, with a second exact cut."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch.fx as fx

from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.levels.captured_matmuls import captured_matmul, may_run_below
from amp_fx.passes.levels.joint_matmuls import gradients_in, joint_matmuls
from amp_fx.passes.levels.level_problem import level_problem
from amp_fx.passes.levels.matmuls import LEVEL_META, Matmul, indivisible, last_calls
from amp_fx.placement.cut import LOW, Var
from amp_fx.placement.level_cost import OPERATIONS, LevelCost
from amp_fx.placement.priced import HarmTerm, Priced, within
from amp_fx.plans.plan import NodePlan, dtype_name, node_plan
from amp_fx.policy.levels import LEVELS, WEIGHT, Level

__all__ = ["BUDGET_META", "Budget", "PlaceLevels", "write_choice"]

logger = logging.getLogger(__name__)

#: gm.meta key of a graph that is placed by harm under a policy below 16 bits: the :class:`Budget` of its matmuls
BUDGET_META = "amp_fx_level_budget"


@dataclass(frozen=True)
class Budget:
    """What the matmuls of a graph may add to the error.

    Attributes:
        harms: variable of the cut -> what it adds to the squared relative error of the gradient in the level below;
            what is missing was not measured, and stays low.
        limit: of their sum.
    """

    harms: tuple[tuple[Var, float], ...]
    limit: float


@dataclass(frozen=True)
class PlaceLevels(Pass):
    """Says of every 16-bit matmul whether it runs in the level below, which :class:`QuantiseMatmuls` then does.

    Runs on captured graphs without gradients, and on Inductor's joint graph, forward and backward together, after loss
    scaling. A matmul stays in the low dtype where

    1. it does not come from a call of the forward that policy and plan leave in the low dtype without a user's rule;
       gradients belong to the call that they are gradients of.
    2. no library kernel takes its sizes: the level's grain (16 in fp8) does not divide them, or they are not known: the
       contracted one and the columns, and for the gradient of a weight its rows, too. So tokens count only where they
       are contracted. Where blocks have scales, a block divides what is contracted, and the rows are known. In int8 the
       second is a weight, and on CUDA there are at least 17 rows.
    3. it, or what it gives a gradient of, is the last of the forward: what that returns is multiplied no more, nor
       added to a residual stream.
    4. it gives the gradient of a weight, and the level leaves these.
    5. both operands are gradients.
    6. the cut of :mod:`amp_fx.placement.level_cost` finds no gain in it. Without costs, everything that may does.
       Copies of weights that live across calls cost nothing in a call, with scales as in the low dtype.
    7. with measured harm, the budget does not allow it (:mod:`amp_fx.placement.priced`).

    A plan takes the place of 3 to 7.

    The graph is not changed, only ``meta``::

        mm = torch.ops.aten.mm.default(view, permute)          # meta["amp_fx_level"] is LEVELS["rowwise"]

    Attributes:
        level: the level below; None: a plan says it of each.
        device: type of the device that has it.
        cost: of the device, or None.
        budget: measured harm and how much is allowed, or None.
        planned: what a plan has below 16 bits: (name in the plan, role, name of the level).
        joint: False on a captured graph.
        marks: names in the plan of the calls that policy and plan let run below 16 bits; of a joint graph.
        hints: what the sizes that are not known are taken for.
        choices: (name in the plan, role) -> the level, or None, and why; filled in when the pass runs.
        sizes: matmuls in each graph that the pass has run on; empty where a cache had what was compiled.
    """

    name: ClassVar[str] = "place-levels"
    ensures: ClassVar[frozenset[str]] = frozenset({"levels-placed"})

    level: Level | None
    device: str
    cost: LevelCost | None = None
    budget: Budget | None = None
    planned: tuple[tuple[str, str, str], ...] = ()
    joint: bool = True
    marks: tuple[str, ...] = ()
    hints: tuple[int, ...] = ()
    choices: dict[tuple[str, str], tuple[Level | None, str]] = field(
        default_factory=dict, repr=False, compare=False
    )
    sizes: list[int] = field(default_factory=list, repr=False, compare=False)

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        matmuls, refused = self._looked_at(gm, context)
        self.sizes.append(len(matmuls))
        chosen = self._chosen([matmul for matmul in matmuls if not refused[matmul]])
        for matmul in matmuls:
            level = self._wanted(matmul) if matmul in chosen else None
            if level is not None:
                matmul.node.meta[LEVEL_META] = level
            why = self._why(matmul, level, refused[matmul])
            self.choices[matmul.variable] = level, why
            if (row := node_plan(matmul.node)) is not None:
                write_choice(row, matmul.role, level, why, is_alone=True)
        return PassResult(gm, len(chosen), f"{len(chosen)} of {len(matmuls)} matmuls below 16 bits")

    def allowed(self, gm: fx.GraphModule) -> list[Matmul]:
        """The matmuls of a joint graph that may run in the level."""
        matmuls, refused = self._looked_at(gm, PassContext())
        return [matmul for matmul in matmuls if not refused[matmul]]

    def _looked_at(self, gm: fx.GraphModule, context: PassContext) -> tuple[list[Matmul], dict[Matmul, str]]:
        """The matmuls, and why each may not run below 16 bits."""
        if self.joint:
            matmuls = joint_matmuls(gm)
        else:
            calls = [node for node in gm.graph.nodes if may_run_below(node, context)]
            matmuls = [found for node in calls if (found := captured_matmul(node, context)) is not None]
        last = set() if self.level is None else last_calls(gm, gradients_in(gm))
        return matmuls, {matmul: self._refusal(matmul, last) for matmul in matmuls}

    def _wanted(self, matmul: Matmul) -> Level | None:
        """The level that a matmul is to run in; None where a plan has it low."""
        return self.level or self._planned.get(matmul.variable)

    @functools.cached_property
    def _planned(self) -> dict[tuple[str, str], Level]:
        return {(name, role): LEVELS[level] for name, role, level in self.planned}

    def _refusal(self, matmul: Matmul, last: Collection[str | None]) -> str:
        """Why a matmul may not run below 16 bits, or an empty string."""
        level, (rows, contracted, columns) = self._wanted(matmul), matmul.sizes
        if level is None:
            return "low, as the plan has it"
        if matmul.node.meta["val"].device.type != self.device:
            return f"it does not run on {self.device}"
        if level.block is not None and not isinstance(rows, int):
            return f"{level.name} has no scales for a number of rows that is not known"
        weight = matmul.operands[1]
        if level.keeps_weights and not weight.is_folded:
            return f"{level.name} multiplies by weights of which copies are kept"
        if not level.trains and weight.source.op != "placeholder":
            return f"{level.policy} multiplies by weights"
        if rows == 0:
            return "it has no rows"
        if self.device == "cuda" and not (isinstance(rows, int) and rows >= level.fewest):
            return f"{level.name} multiplies {level.fewest} rows or more"
        if why := indivisible(matmul.sizes if matmul.role == WEIGHT else (contracted, columns), level.grain):
            return why
        if level.block is not None and contracted % level.block:
            return f"{level.block} does not divide the {contracted} that it contracts"
        if matmul.name in last:
            return "the last linear stays in the low dtype"
        if matmul.role == WEIGHT and not level.weight_gradients:
            return f"{level.name} leaves gradients of weights in the low dtype"
        return ""

    def _chosen(self, allowed: Sequence[Matmul]) -> set[Matmul]:
        if self.level is None or (self.cost is None and self.budget is None):
            return {*allowed}
        problem = level_problem(allowed, self.level, self.cost or OPERATIONS)
        if self.budget is None:
            labels = Priced(problem).choose(0.0).placement
        else:
            harms = dict(self.budget.harms)
            terms = [HarmTerm(harms.get(variable, math.inf), LOW, variable) for variable in problem.unary]
            (labels,) = within([Priced(problem, terms)], self.budget.limit).placement
        return {matmul for matmul in allowed if labels[matmul.variable] is LOW}

    def _why(self, matmul: Matmul, level: Level | None, refused: str) -> str:
        wanted = self._wanted(matmul)
        if wanted is None:
            return refused
        if level is not None:
            return f"{level.policy}, {level.name}{'' if self.level else ', as the plan has it'}"
        if self.level is None:
            what = f"{wanted.policy} for {matmul.role} of {matmul.name}"
            logger.warning("the plan has %s, which stays low: %s", what, refused)
            return f"{refused}, though the plan has {wanted.policy}"
        if self.budget is not None:
            return refused or f"{wanted.policy} would cost more time or error than the budget allows"
        return refused or f"converting would cost more than {wanted.policy} saves on this device"


def write_choice(row: NodePlan, role: str, level: Level | None, why: str, *, is_alone: bool = False) -> None:
    """Writes into the plan of a call what was decided for one of its matmuls.

    Args:
        row: of the call.
        role: of the matmul.
        level: None where it stays in the low dtype.
        why: in words.
        is_alone: the call has no other matmuls, so its reason does not say which one it is about.
    """
    if row.low is None:
        raise AssertionError(f"{row.name} multiplies, and has no low dtype")
    row.levels[role] = dtype_name(row.low) if level is None else level.name
    # a plan that was followed has said so before
    before, again, after = row.reason.partition(f"; {role}: ")
    reason = before + "".join(after.partition("; ")[1:]) if again else row.reason
    row.reason = f"{reason}; {'' if is_alone else f'{role}: '}{why}"
