"""Choose which low matmuls run in a level below 16 bits, and how, with a second exact cut."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from amp_fx.graphs.calls import convolution_settings, readers
from amp_fx.graphs.fake_runs import is_matmul, matmul_flops
from amp_fx.graphs.keys import LEVEL
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import cast_bytes, numel
from amp_fx.passes.base import Note, Pass, PassContext, PassResult, gradients_in
from amp_fx.passes.levels.matmuls import Matmul, Operand, divides, last_calls, may_run_below, read_matmuls
from amp_fx.precision.placement.cut import HIGH, LOW, Problem, Shared, Var
from amp_fx.precision.placement.level_cost import NARROW, OPERATIONS, LevelCost
from amp_fx.precision.placement.priced import Priced, SensitivityTerm
from amp_fx.precision.placement.tradeoff import within
from amp_fx.precision.plans.label import Reason, ReasonKind, label_of
from amp_fx.precision.plans.plan import with_choice
from amp_fx.precision.policy.levels import AUTO, LEVELS, WEIGHT, Kernel, Level
from amp_fx.precision.policy.rules import BELOW

aten = torch.ops.aten


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
                matmul.node.meta[LEVEL] = (level, kernel, scale)
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


# ---- the problem of the cut


def level_of(operand: Operand, level: Level) -> Level:
    """The level of an operand: a weight has another one where the level names it."""
    return LEVELS[level.of_weights] if operand.is_weight and level.of_weights else level


def level_problem(matmuls: Mapping[Matmul, Kernel], level: Level, cost: LevelCost) -> Problem:
    """The function to minimise over matmuls that may run in a level; LOW of a variable (name, role) is that level."""
    problem, nodes = Problem(), {matmul.node for matmul in matmuls}
    variables = {matmul.node: matmul.variable for matmul in matmuls}
    readings: dict[fx.Node, list[tuple[Var, Operand, bool]]] = {}
    for matmul, kernel in matmuls.items():
        problem.add_unary(matmul.variable, *_times(matmul, kernel, level, cost))
        for operand in matmul.operands:
            if not operand.is_folded:
                readings.setdefault(operand.source, []).append((matmul.variable, operand, kernel.measured))
    for read in readings.values():
        low = _low_copy(read[0][1], nodes, cost)
        problem.shared.append(Shared(low, HIGH, tuple(reader for reader, *_ in read)))
        copies: dict[str, tuple[int, list[Var]]] = {}
        for reader, operand, measured in read:
            for key, time in _copies(operand, level, cost, measured=measured).items():
                copies.setdefault(key, (time, []))[1].append(reader)
        problem.shared += [Shared(time, LOW, tuple(by)) for time, by in copies.values()]
        by = tuple(reader for reader, _, measured in read if measured)
        if by and (product := product_before(read[0][1].source)) is not None:
            # it writes bytes, or the low dtype if it runs in that: who reads the other waits for a kernel
            value, written = read[0][1].source.meta["val"], ("written", read[0][1].source.name)
            extra = cost.moving(numel(value) * value.dtype.itemsize, 1) + cost.rounding(numel(value))
            problem.shared.append(Shared(extra, LOW, by, written))
            problem.shared.append(Shared(extra, HIGH, tuple(reader for reader, *_ in read), written))
            if product in variables:
                problem.implies.append((variables[product], written))
            else:
                problem.pins[written] = HIGH
    return problem


def product_before(node: fx.Node, *, through_adds: bool = True) -> fx.Node | None:
    """The product that writes a value, with activations and a residual applied; None of what other kernels compute."""
    while not is_matmul(node):
        given = node.all_input_nodes
        if through_adds and node.target in (aten.add.Tensor, aten.add_.Tensor) and len(given) == 2:
            found = (product_before(each, through_adds=False) for each in given)
            return next((product for product in found if product is not None), None)
        passes = has_trait(node, Trait.RESHAPES, Trait.UNCHANGED, Trait.CAST, Trait.BATCH_NORM)
        single = len(given) == 1 and torch.Tag.pointwise in getattr(node.target, "tags", ())
        if node.op != "call_function" or not (passes or single):
            return None
        node = given[0]
    return node


def _times(matmul: Matmul, kernel: Kernel, level: Level, cost: LevelCost) -> tuple[int, int]:
    result = matmul.node.meta["val"]
    sizes = [(numel(operand.base.meta["val"]), operand.is_weight) for operand in matmul.operands]
    elements = sum(
        size for size, is_weight in sizes if is_weight or size * result.dtype.itemsize > cost.cache
    )
    grouped = matmul.is_convolution and convolution_settings(matmul.node)["groups"] > 1
    low, below = cost.matmul(matmul_flops(matmul.node), elements, result.dtype.itemsize, grouped=grouped)
    below += cost.calling(kernel, matmul.sizes, convolves=matmul.is_convolution)
    if matmul.is_convolution:
        behind = readers(matmul.node, lambda node: has_trait(node, Trait.CAST, Trait.BATCH_NORM))
        # oneDNN applies a gelu in 16 bits only
        epilogue = cost.moving(numel(result) * (2 * result.dtype.itemsize + cost.arithmetic))
        below += any(node.target is aten.gelu.default for node in behind) * epilogue
    if len({level_of(operand, level).by_row for operand in matmul.operands}) > 1:
        # factors of columns are multiplied afterwards
        below += cost.moving(2 * numel(result) * result.dtype.itemsize, 1)
    if not level.dtype.is_floating_point and not kernel.measured:
        # the product is in 32 bits, which the kernel behind it reads
        below += cost.moving(2 * numel(result) * (4 - result.dtype.itemsize))
    return low, below


def _low_copy(operand: Operand, nodes: set[fx.Node], cost: LevelCost) -> int:
    """The cost of the low copy; nothing where it is there anyway."""
    value, base = operand.base.meta["val"], operand.base
    # inputs, and results of library calls, are in memory whoever reads them
    is_stored = base.op == "placeholder" or base.target is operator.getitem or is_matmul(base)
    if is_stored or not operand.readers <= nodes:
        return 0
    if operand.source is base:
        # by the kernel that computes it
        return cost.moving(numel(value) * value.dtype.itemsize)
    return cost.moving(cast_bytes(operand.source.meta["val"], value.dtype), 1)


def _copies(operand: Operand, level: Level, cost: LevelCost, *, measured: bool) -> Mapping[str, int]:
    """The costs of the copies that a matmul reads of an operand, by the key under which two readers share one."""
    level = level_of(operand, level)
    value = operand.source.meta["val"]
    elements, itemsize = numel(value), value.dtype.itemsize
    if measured:
        # written by the kernel that computes the value
        return {"measured": cost.rounding(elements)}
    if level.by_row:
        copy = cost.copying(elements, itemsize, in_rows=operand.lies_in_rows, block=level.block)
        return {operand.layout: copy}
    whole = {"": cost.copying(elements, itemsize)}
    if operand.lies_in_rows:
        return whole
    if operand.is_gradient:
        # is read both ways in one graph: one kernel writes both
        return {**whole, operand.layout: cost.moving(elements * NARROW)}
    return {**whole, operand.layout: cost.moving(elements * (NARROW + itemsize), 1)}
