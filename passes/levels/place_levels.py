"""Choose which low matmuls run in a level below 16 bits, with a second exact cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch.fx as fx

from amp_fx.graphs.keys import LEVEL
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.levels.captured_matmuls import captured_matmul, may_run_below
from amp_fx.passes.levels.joint_matmuls import gradients_in, joint_matmuls
from amp_fx.passes.levels.level_problem import level_problem
from amp_fx.passes.levels.matmuls import Matmul, divides, last_calls
from amp_fx.placement.cut import LOW, Var
from amp_fx.placement.level_cost import OPERATIONS, LevelCost
from amp_fx.placement.priced import Priced, SensitivityTerm
from amp_fx.placement.tradeoff import within
from amp_fx.plans.label import Kind, Label, Reason, label_of
from amp_fx.plans.plan import NodePlan, dtype_name
from amp_fx.policy.levels import LEVELS, WEIGHT, Level
from amp_fx.policy.rules import BELOW

__all__ = ["Budget", "PlaceLevels", "with_choice"]


@dataclass(frozen=True)
class Budget:
    """What the matmuls of a graph may add to the error.

    Attributes:
        sensitivities: variable of the cut -> what it adds to the squared relative error of the gradient in the level
            below;
            what is missing was not measured, and stays low.
        limit: of their sum.
    """

    sensitivities: tuple[tuple[Var, float], ...]
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
    7. with measured sensitivity, the budget does not allow it (:mod:`amp_fx.placement.priced`).

    A plan takes the place of 3 to 7; a rule that names the level, of 3, 6 and 7.

    The graph is not changed, only ``meta``::

        mm = torch.ops.aten.mm.default(view, permute)          # meta["amp_fx_level"] is LEVELS["rowwise"]

    Attributes:
        level: the level below; None: a plan says it of each.
        device: type of the device that has it.
        cost: of the device, or None.
        budget: measured sensitivity and how much is allowed, or None.
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
    choices: dict[tuple[str, str], tuple[Level | None, Reason]] = field(
        default_factory=dict, repr=False, compare=False
    )
    sizes: list[int] = field(default_factory=list, repr=False, compare=False)

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        matmuls, refused = self._looked_at(gm, context)
        self.sizes.append(len(matmuls))
        allowed = [matmul for matmul in matmuls if not refused[matmul]]
        chosen = self._chosen(allowed) | {matmul for matmul in allowed if self._is_asked_for(matmul, context)}
        for matmul in matmuls:
            level = _for_rows(self._wanted(matmul), matmul) if matmul in chosen else None
            if level is not None:
                LEVEL.set(matmul.node, level)
            why = self._why(matmul, level, refused[matmul])
            self.choices[matmul.variable] = level, why
            if (row := label_of(matmul.node)) is not None:
                row.levels, row.reasons = with_choice(row, matmul.role, level, why)
        return PassResult(len(chosen), f"{len(chosen)} of {len(matmuls)} matmuls below 16 bits")

    def allowed(self, gm: fx.GraphModule, context: PassContext) -> list[Matmul]:
        """The matmuls of a graph that may run in the level."""
        matmuls, refused = self._looked_at(gm, context)
        return [matmul for matmul in matmuls if not refused[matmul]]

    def _looked_at(
        self, gm: fx.GraphModule, context: PassContext
    ) -> tuple[list[Matmul], dict[Matmul, Reason | None]]:
        """The matmuls, and why each may not run below 16 bits."""
        if self.joint:
            matmuls = joint_matmuls(gm)
        else:
            calls = [node for node in gm.graph.nodes if may_run_below(node, context)]
            matmuls = [found for node in calls if (found := captured_matmul(node, context)) is not None]
        last = set() if self.level is None else last_calls(gm, gradients_in(gm))
        last -= {matmul.name for matmul in matmuls if self._is_asked_for(matmul, context)}
        return matmuls, {matmul: self._refusal(matmul, last) for matmul in matmuls}

    def _is_asked_for(self, matmul: Matmul, context: PassContext) -> bool:
        """True where a rule names the level."""
        row = None if self.joint else label_of(matmul.node)
        rule = None if row is None else context.policy.rule_for(row.op, row.module_path)
        return rule is not None and rule.precision in BELOW

    def _wanted(self, matmul: Matmul) -> Level | None:
        """The level that a matmul is to run in; None where a plan has it low."""
        return self.level or self._planned.get(matmul.variable)

    @functools.cached_property
    def _planned(self) -> dict[tuple[str, str], Level]:
        return {(name, role): LEVELS[level] for name, role, level in self.planned}

    def _refusal(self, matmul: Matmul, last: Collection[str | None]) -> Reason | None:
        """Why a matmul may not run below 16 bits, if so."""
        level, (rows, contracted, columns) = self._wanted(matmul), matmul.sizes
        if level is None:
            return Reason(Kind.PLANNED_LOW)
        if matmul.node.meta["val"].device.type != self.device:
            return Reason.of(Kind.OTHER_DEVICE, device=self.device)
        if level.block is not None and not isinstance(rows, int):
            return Reason.of(Kind.UNKNOWN_ROWS, level=level.name)
        weight = matmul.operands[1]
        if level.keeps_weights and not weight.is_folded:
            return Reason.of(Kind.NO_COPY, level=level.name)
        if not level.trains and weight.source.op != "placeholder" and not weight.is_folded:
            return Reason.of(Kind.NOT_A_WEIGHT, policy=level.policy)
        if rows == 0:
            return Reason(Kind.NO_ROWS)
        if self.device == "cuda" and not (isinstance(rows, int) and rows >= level.fewest):
            return Reason.of(Kind.FEW_ROWS, level=level.name, fewest=level.fewest)
        sizes = matmul.sizes if matmul.role == WEIGHT else (contracted, columns)
        if not divides(level.grain, sizes):
            return Reason.of(Kind.INDIVISIBLE, grain=level.grain, sizes=" x ".join(map(str, sizes)))
        if level.block is not None and contracted % level.block:
            return Reason.of(Kind.UNEVEN_BLOCKS, block=level.block, contracted=contracted)
        if matmul.name in last:
            return Reason(Kind.LAST_LINEAR)
        if matmul.role == WEIGHT and not level.weight_gradients:
            return Reason.of(Kind.WEIGHT_GRADIENT, level=level.name)
        return None

    def _chosen(self, allowed: Sequence[Matmul]) -> set[Matmul]:
        if self.level is None or (self.cost is None and self.budget is None):
            return {*allowed}
        problem = level_problem(allowed, self.level, self.cost or OPERATIONS)
        if self.budget is None:
            labels = Priced(problem).choose(0.0).placement
        else:
            sensitivities = dict(self.budget.sensitivities)
            terms = [
                SensitivityTerm(sensitivities.get(variable, math.inf), LOW, variable)
                for variable in problem.unary
            ]
            (labels,) = within([Priced(problem, terms)], self.budget.limit).placement
        return {matmul for matmul in allowed if labels[matmul.variable] is LOW}

    def _why(self, matmul: Matmul, level: Level | None, refused: Reason | None) -> Reason:
        wanted = self._wanted(matmul)
        if level is not None:
            kind = Kind.LEVEL if self.level else Kind.LEVEL_PLANNED
            return Reason.of(kind, policy=level.policy, level=level.name)
        if refused is None:
            kind = Kind.LEVEL_DEARER if self.budget is None else Kind.LEVEL_OVER_BUDGET
            return Reason.of(kind, policy=None if wanted is None else wanted.policy)
        if self.level is None and wanted is not None:
            return replace(refused, values={**refused.values, "planned": wanted.policy})
        return refused


def _for_rows(level: Level | None, matmul: Matmul) -> Level | None:
    """The level, or the one that multiplies a single row in its place."""
    rows, *sizes = matmul.sizes
    if level is None or not level.one_row or not isinstance(rows, int) or rows != 1:
        return level
    other = LEVELS[level.one_row]
    return other if divides(other.grain, sizes) else level


def with_choice(
    row: Label | NodePlan, role: str, level: Level | None, why: Reason
) -> tuple[dict[str, str], tuple[Reason, ...]]:
    """Levels and reasons of a call, with what was decided for one of its matmuls.

    Args:
        row: of the call.
        role: of the matmul.
        level: None where it stays in the low dtype.
        why: takes the place of what a plan that was followed has said before.
    """
    if row.low is None:
        raise AssertionError(f"{row.name} multiplies, and has no low dtype")
    name = dtype_name(row.low) if level is None else level.name
    others = tuple(reason for reason in row.reasons if reason.values.get("role") != role)
    return {**row.levels, role: name}, (*others, replace(why, values={"role": role, **why.values}))
