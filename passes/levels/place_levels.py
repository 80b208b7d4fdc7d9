"""Choose which low matmuls run in a level below 16 bits, and how, with a second exact cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from amp_fx.graphs.calls import target_name, values_read
from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.keys import LEVEL
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.passes.base import Note, Pass, PassContext, PassResult, gradients_in, marked
from amp_fx.passes.levels.level_problem import level_problem
from amp_fx.passes.levels.matmuls import Matmul, divides, may_run_below, read_matmuls
from amp_fx.precision.placement.cut import LOW, Var
from amp_fx.precision.placement.level_cost import OPERATIONS, LevelCost
from amp_fx.precision.placement.priced import Priced, SensitivityTerm
from amp_fx.precision.placement.tradeoff import within
from amp_fx.precision.plans.label import Reason, ReasonKind, label_of
from amp_fx.precision.plans.plan import with_choice
from amp_fx.precision.policy.levels import AUTO, LEVELS, WEIGHT, Kernel, Level
from amp_fx.precision.policy.rules import BELOW

aten = torch.ops.aten

#: besides dropout, what a result goes through on its way to a residual stream
_ON_THE_WAY = Trait.RESHAPES, Trait.UNCHANGED, Trait.CAST


@dataclass(frozen=True)
class Budget:
    """The error that the matmuls of a graph may add.

    Attributes:
        sensitivities: variable of the cut -> what it adds to the squared relative error of the gradient in the level
            below; what is missing was not measured, and stays low.
        limit: of their sum.
    """

    sensitivities: tuple[tuple[Var, float], ...]
    limit: float


@dataclass(frozen=True)
class PlaceLevels(Pass):
    """Says of every 16-bit matmul whether it runs in the level below, and how; :class:`QuantiseMatmuls` then does it.

    Runs on captured graphs without gradients, and on Inductor's joint graph, forward and backward together, after loss
    scaling. A matmul stays in the low dtype where

    1. it does not come from a call of the forward that policy and plan leave in the low dtype without a user's rule,
       or in fp32 where 16 bits are slower; gradients belong to the call that they are gradients of.
    2. no kernel takes its sizes: their grain (16 in fp8) does not divide them, or they are not known: the
       contracted one and the columns, and for the gradient of a weight its rows, too. So tokens count only where they
       are contracted. Where blocks have scales, a block divides what is contracted, and the rows are known. In int8 the
       second is a weight, sums fit into 32 bits, and on CUDA there are at least 17 rows. A convolution needs a scale
       that was measured.
    3. it, or what it gives a gradient of, is the last of the forward: what that returns is multiplied no more, nor
       added to a residual stream.
    4. it gives the gradient of a weight, and the level leaves these.
    5. both operands are gradients.
    6. the cut of :mod:`amp_fx.precision.placement.level_cost` finds no gain in it. Without costs, everything that may
       does. Copies of weights that live across calls cost nothing in a call, with scales as in the low dtype.
    7. with measured sensitivity, the budget does not allow it (:mod:`amp_fx.precision.placement.priced`).

    A plan takes the place of 3 to 7; a rule that names the level, of 3, 6 and 7. Of the kernels that take a
    matmul, the one that costs the least multiplies.

    Before, and after::

        x: bf16[32, 64]; w: bf16[64, 64]; head: bf16[64, 16]
        mm = torch.ops.aten.mm.default(x, w)                # bf16[32, 64]
        logits = torch.ops.aten.mm.default(mm, head)        # bf16[32, 16]
        # after; the last linear stays low
        mm = torch.ops.aten.mm.default(x, w)                # bf16[32, 64]; level rowwise
        logits = torch.ops.aten.mm.default(mm, head)

    Attributes:
        level: the level below; None: a plan says it of each.
        device: type of the device that has it.
        cost: of the device, or None.
        budget: measured sensitivity and how much is allowed, or None.
        planned: what a plan has below 16 bits: (name in the plan, role, name of the level).
        scales: of values that calls of the plan read: (name in the plan, (scale, zero point)).
        results: of convolutions of the plan whose results are rounded before they are added: the same.
        equalisations: of calls of the plan: (name in the plan, exponents), see :class:`NodePlan`.
        choice: the name of a kernel where an option has one.
        joint: False on a captured graph.
        keeps_weights: copies of weights live across calls.
        stored: the program is stored with such copies, for any runtime.
        marks: names in the plan of the calls that policy and plan let run below 16 bits; of a joint graph.
        hints: what the sizes that are not known are taken for.
    """

    level: Level | None
    device: str
    cost: LevelCost | None = None
    budget: Budget | None = None
    planned: tuple[tuple[str, str, str], ...] = ()
    scales: tuple[tuple[str, tuple[float, int]], ...] = ()
    results: tuple[tuple[str, tuple[float, int]], ...] = ()
    equalisations: tuple[tuple[str, tuple[int, ...]], ...] = ()
    choice: str = AUTO
    joint: bool = True
    keeps_weights: bool = False
    stored: bool = False
    marks: tuple[str, ...] = ()
    hints: tuple[int, ...] = ()

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        found = self._looked_at(gm, context)
        allowed = _with_kernels(found)
        chosen = self._chosen(allowed) | {matmul for matmul in allowed if self._is_asked_for(matmul, context)}
        choices: dict[tuple[str, str], tuple[Level | None, Reason]] = {}
        for matmul, kernel in found.items():
            level = self._wanted(matmul) if matmul in chosen else None
            if level is not None:
                scale = self._scales[matmul.name] if allowed[matmul].measured else None
                matmul.node.meta[LEVEL] = (level, kernel, scale, matmul.operands[1].equalisation)
            why = self._why(matmul, level, kernel)
            choices[matmul.variable] = level, why
            if (label := label_of(matmul.node)) is not None:
                label.levels, label.reasons = with_choice(label, matmul.role, level, why)
        summary = f"{len(chosen)} of {len(found)} matmuls below 16 bits"
        return PassResult(summary, len(chosen), {Note.CHOICES: choices})

    def allowed(self, gm: fx.GraphModule, context: PassContext) -> dict[Matmul, Kernel]:
        """The matmuls of a graph that may run in the level, and how they would."""
        return _with_kernels(self._looked_at(gm, context))

    def _looked_at(self, gm: fx.GraphModule, context: PassContext) -> dict[Matmul, Kernel | Reason]:
        """The matmuls, and how each would run below 16 bits, or why it may not."""
        matmuls = read_matmuls(gm, context, joint=self.joint)
        if not self.joint:
            matmuls = [matmul for matmul in matmuls if self._is_candidate(matmul, context)]
        last = set() if self.level is None else last_calls(gm, gradients_in(gm))
        last -= {matmul.name for matmul in matmuls if self._is_asked_for(matmul, context)}
        exponents = dict(self.equalisations)
        matmuls = [matmul.equalised(exponents.get(matmul.name, ())) for matmul in matmuls]
        return {matmul: self._kernel_for(matmul, last) for matmul in matmuls}

    def _is_candidate(self, matmul: Matmul, context: PassContext) -> bool:
        level = self._wanted(matmul)
        kernels = () if level is None else level.kernels
        if matmul.is_convolution and not any(kernel.measured for kernel in kernels):
            return False
        by_plan = self.level is None and matmul.node.meta["val"].dtype is torch.float32
        return level is not None if by_plan else may_run_below(matmul.node, context)

    def _is_asked_for(self, matmul: Matmul, context: PassContext) -> bool:
        """True where a rule names the level."""
        row = None if self.joint else label_of(matmul.node)
        rule = None if row is None else context.policy.rule_for(row.op, row.module_path)
        return rule is not None and rule.precision in BELOW

    def _wanted(self, matmul: Matmul) -> Level | None:
        """The level that a matmul is to run in; None where a plan has it low."""
        planned = (LEVELS[level] for *matmul_of, level in self.planned if tuple(matmul_of) == matmul.variable)
        return self.level or next(planned, None)

    @functools.cached_property
    def _scales(self) -> dict[str, tuple[float, int]]:
        return dict(self.scales)

    def _kernel_for(self, matmul: Matmul, last: Collection[str | None]) -> Kernel | Reason:
        """The kernel that would multiply, or why a matmul may not run below 16 bits."""
        level, (rows, contracted, _) = self._wanted(matmul), matmul.sizes
        if level is None:
            return Reason(ReasonKind.PLANNED_LOW)
        if matmul.node.meta["val"].device.type != self.device:
            return Reason.of(ReasonKind.OTHER_DEVICE, device=self.device)
        if level.block is not None and not isinstance(rows, int):
            return Reason.of(ReasonKind.UNKNOWN_ROWS, level=level.name)
        weight = matmul.operands[1]
        if not level.trains and weight.source.op != "placeholder" and not weight.is_folded:
            return Reason.of(ReasonKind.NOT_A_WEIGHT, policy=level.policy)
        if isinstance(rows, int) and rows == 0:
            return Reason(ReasonKind.NO_ROWS)
        refused = {kernel: self._refusal(matmul, level, kernel) for kernel in level.chosen(self.choice)}
        kernels = [kernel for kernel, why in refused.items() if why is None]
        if not kernels:
            # the last kernel takes the most products, and the first convolutions
            found = [why for why in refused.values() if why is not None]
            return found[0] if matmul.is_convolution else found[-1]
        if level.block is not None and contracted % level.block:
            return Reason.of(ReasonKind.UNEVEN_BLOCKS, block=level.block, contracted=contracted)
        if matmul.name in last:
            return Reason(ReasonKind.LAST_LINEAR)
        if matmul.role == WEIGHT and not level.weight_gradients:
            return Reason.of(ReasonKind.WEIGHT_GRADIENT, level=level.name)
        return (self.cost or OPERATIONS).cheapest(kernels, matmul.sizes)

    def _refusal(self, matmul: Matmul, level: Level, kernel: Kernel) -> Reason | None:
        """Why a kernel does not take a matmul, if so."""
        rows, contracted, columns = matmul.sizes
        if kernel.device not in (None, self.device):
            return Reason.of(ReasonKind.OTHER_DEVICE, device=kernel.device)
        keeps = self.keeps_weights or (self.stored and kernel.measured)
        if kernel.keeps_weights and not (keeps and matmul.operands[1].is_folded):
            return Reason.of(ReasonKind.NO_COPY, level=kernel.name)
        if (kernel.measured or matmul.is_convolution) and matmul.name not in self._scales:
            return Reason(ReasonKind.NO_SCALE)
        if matmul.is_convolution and not kernel.measured:
            return Reason.of(ReasonKind.NOT_A_PRODUCT, level=kernel.name)
        if self.device == "cuda" and not (isinstance(rows, int) and rows >= kernel.fewest):
            return Reason.of(ReasonKind.FEW_ROWS, level=level.name, fewest=kernel.fewest)
        sizes = matmul.sizes if matmul.role == WEIGHT else (contracted, columns)
        if not divides(kernel.grain, sizes):
            return Reason.of(ReasonKind.INDIVISIBLE, grain=kernel.grain, sizes=" x ".join(map(str, sizes)))
        if kernel.most is not None and contracted > kernel.most:
            return Reason.of(ReasonKind.LONG_SUM, level=kernel.name, most=kernel.most, contracted=contracted)
        return None

    def _chosen(self, allowed: Mapping[Matmul, Kernel]) -> set[Matmul]:
        if self.level is None or (self.cost is None and self.budget is None):
            return {*allowed}
        problem = level_problem(allowed, self.level, self.cost or OPERATIONS)
        if self.budget is None:
            labels = Priced(problem).choose(0.0).placement
        else:
            added = dict(self.budget.sensitivities)
            terms = [SensitivityTerm(added.get(each, math.inf), LOW, each) for each in problem.unary]
            (labels,) = within([Priced(problem, terms)], self.budget.limit).placement
        return {matmul for matmul in allowed if labels[matmul.variable] is LOW}

    def _why(self, matmul: Matmul, level: Level | None, kernel: Kernel | Reason) -> Reason:
        wanted = self._wanted(matmul)
        if isinstance(kernel, Reason):
            planned = {"planned": wanted.policy} if self.level is None and wanted is not None else {}
            return replace(kernel, values={**kernel.values, **planned})
        if level is None:
            kind = ReasonKind.LEVEL_DEARER if self.budget is None else ReasonKind.LEVEL_OVER_BUDGET
            return Reason.of(kind, policy=None if wanted is None else wanted.policy)
        kind = ReasonKind.LEVEL if self.level else ReasonKind.LEVEL_PLANNED
        name = kernel.name if len(level.kernels) > 1 else level.name
        return Reason.of(kind, policy=level.policy, level=name)


def _with_kernels(found: Mapping[Matmul, Kernel | Reason]) -> dict[Matmul, Kernel]:
    return {matmul: kernel for matmul, kernel in found.items() if isinstance(kernel, Kernel)}


def last_calls(gm: fx.GraphModule, gradients: set[fx.Node]) -> set[str | None]:
    """Names of the calls that multiply, and whose result is multiplied no more, nor added to a residual stream.

    What the backward of a joint graph computes, ``gradients``, does not count.
    """
    feeds: set[fx.Node] = set()
    last: set[str | None] = set()
    for node in reversed(gm.graph.nodes):
        if node in gradients or node.op != "call_function":
            continue
        below = any(user in feeds for user in node.users)
        # products of tensors of other classes stay as the program calls them
        multiplies = is_matmul(node) or has_trait(target_name(node), Trait.MATMUL)
        if multiplies and not below and not _is_residual(node):
            label = label_of(node)
            last.add(marked(node) if label is None else label.name)
        if below or multiplies:
            feeds.add(node)
    return last


def _is_residual(node: fx.Node) -> bool:
    """True where the result is added to another value of its shape, as a block adds to the stream it reads."""
    for user in node.users:
        if has_trait(user, *_ON_THE_WAY) or user.target is aten.dropout.default:
            if _is_residual(user):
                return True
        elif user.target in (aten.add.Tensor, aten.add_.Tensor):
            shapes = [n.meta["val"].shape for n in values_read(user)]
            if len(shapes) == 2 and shapes[0] == shapes[1]:
                return True
    return False
