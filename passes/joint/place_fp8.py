"""Choose which matmuls of forward and backward run in fp8, with a second exact cut."""

from __future__ import annotations

import logging
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx.graphs.facts import is_matmul, matmul_flops, numel
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.joint.fp8_matmuls import (
    FP8_META,
    Matmul,
    Operand,
    find_matmuls,
    is_residual,
    last_matmuls,
)
from amp_fx.passes.keyed import marked
from amp_fx.placement.cut import Var
from amp_fx.placement.fp8 import Copy, Fp8Cost, Times, Value, choose
from amp_fx.placement.fp8_choice import OPERATIONS, Fp8Budget, Fp8Problem, PricedFp8, within
from amp_fx.policy.fp8 import GRAIN, WEIGHT, Recipe

__all__ = ["Fp8Choice", "PlaceFp8"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Fp8Choice:
    """What was decided for one matmul of a joint graph.

    Attributes:
        dtype: of what it multiplies; None where it stays in the low dtype.
        reason: why, in words.
    """

    dtype: torch.dtype | None
    reason: str


@dataclass(frozen=True)
class PlaceFp8(Pass):
    """Runs on Inductor's joint graph (forward and backward together), after loss scaling.

    Says of every 16-bit ``mm`` and ``addmm`` whether it runs in fp8, which :class:`QuantiseMatmuls` then does. A matmul
    stays in the low dtype where

    1. it does not come from a call of the forward that policy and plan leave in the low dtype without a user's rule;
       gradients belong to the call that they are gradients of.
    2. 16 does not divide its sizes, or they are not known: the contracted one and the columns, and for the gradient of
       a weight its rows, too. So tokens count only where they are contracted. Where blocks have scales, a block divides
       what is contracted, and the rows are known.
    3. it, or what it gives a gradient of, is the last of the forward: what that returns is multiplied no more, nor
       added to a residual stream.
    4. it gives the gradient of a weight, and the recipe leaves these.
    5. both operands are gradients.
    6. the cut of :mod:`amp_fx.placement.fp8` finds no gain in it. Without costs, everything that may run in fp8 does.
    7. with measured harm, the budget does not allow it (:mod:`amp_fx.placement.fp8_choice`).

    A plan takes the place of 3 to 7.

    The graph is not changed, only ``meta``::

        mm = torch.ops.aten.mm.default(view, permute)          # meta["amp_fx_fp8"] is Recipe("rowwise", ...)

    Attributes:
        recipe: how matmuls run in fp8.
        device: type of the device that has fp8.
        cost: of the device, or None.
        budget: measured harm and how much is allowed, or None.
        planned: what runs in fp8 as a plan has it, (name in the plan, role); None: the pass chooses.
        marks: names in the plan of the calls that policy and plan let run in fp8.
        hints: what the sizes that are not known are taken for.
        choices: (name in the plan, role) -> what was decided; filled in when the pass runs.
        sizes: matmuls in each graph that the pass has run on; empty where a cache had what was compiled.
    """

    name: ClassVar[str] = "place-fp8"
    ensures: ClassVar[frozenset[str]] = frozenset({"fp8-placed"})

    recipe: Recipe
    device: str
    cost: Fp8Cost | None
    budget: Fp8Budget | None = None
    planned: tuple[tuple[str, str], ...] | None = None
    marks: tuple[str, ...] = ()
    hints: tuple[int, ...] = ()
    choices: dict[tuple[str, str], Fp8Choice] = field(default_factory=dict, repr=False, compare=False)
    sizes: list[int] = field(default_factory=list, repr=False, compare=False)

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        matmuls, refused = self._looked_at(gm)
        self.sizes.append(len(matmuls))
        chosen = self._chosen([matmul for matmul in matmuls if not refused[matmul.node]], matmuls)
        count = 0
        for matmul in matmuls:
            in_fp8 = not refused[matmul.node] and _variable(matmul) in chosen
            if in_fp8:
                matmul.node.meta[FP8_META] = self.recipe
                count += 1
            if matmul.name is not None and matmul.role is not None:
                why = f"fp8, {self.recipe.name}" if in_fp8 else refused[matmul.node] or self._why_low
                if self.planned is not None:
                    why = self._as_planned(matmul, why)
                self.choices[matmul.name, matmul.role] = Fp8Choice(
                    torch.float8_e4m3fn if in_fp8 else None, why
                )
        return PassResult(gm, count, f"{count} of {len(matmuls)} matmuls in fp8")

    def problem(self, gm: fx.GraphModule, cost: Fp8Cost) -> Fp8Problem:
        """What the cut minimises on a joint graph; its variables are (name in the plan, role)."""
        matmuls, refused = self._looked_at(gm)
        return self._problem([matmul for matmul in matmuls if not refused[matmul.node]], matmuls, cost)

    def _looked_at(self, gm: fx.GraphModule) -> tuple[list[Matmul], dict[fx.Node, str]]:
        """The matmuls, and why each may not run in fp8."""
        matmuls = find_matmuls(gm)
        last = {marked(node) for node in last_matmuls(gm) if not is_residual(node)}
        if self.planned is not None:
            last = set()
        return matmuls, {matmul.node: self._refusal(matmul, last) for matmul in matmuls}

    def _chosen(self, allowed: list[Matmul], matmuls: list[Matmul]) -> Collection[Var]:
        if self.planned is not None:
            return set(self.planned)
        if self.cost is None and self.budget is None:
            return set(map(_variable, allowed))
        problem = self._problem(allowed, matmuls, self.cost or OPERATIONS)
        if self.budget is None:
            return choose(problem.matmuls, problem.values)
        priced = PricedFp8(problem, dict(self.budget.harms))
        return within([priced], self.budget.limit).placement[0]

    @property
    def _why_low(self) -> str:
        if self.budget is not None:
            return "fp8 would cost more time or error than the budget allows"
        return "converting would cost more than fp8 saves on this device"

    def _as_planned(self, matmul: Matmul, why: str) -> str:
        if _variable(matmul) not in (self.planned or ()):
            return "low, as the plan has it"
        if FP8_META in matmul.node.meta:
            return f"{why}, as the plan has it"
        logger.warning("the plan has fp8 for %s of %s, which stays low: %s", matmul.role, matmul.name, why)
        return f"{why}, though the plan has fp8"

    def _refusal(self, matmul: Matmul, last: set[str | None]) -> str:
        """Why a matmul may not run in fp8, or an empty string."""
        node, (rows, contracted, columns) = matmul.node, matmul.sizes
        if matmul.name is None or matmul.role is None or node.meta["val"].device.type != self.device:
            return "no call that may run in fp8"
        block = self.recipe.block
        if block is not None and not isinstance(rows, int):
            return f"{self.recipe.name} has no scales for a number of rows that is not known"
        sizes = (rows, contracted, columns) if matmul.role == WEIGHT else (contracted, columns)
        if not all(isinstance(size, int) and size and size % GRAIN == 0 for size in sizes):
            return f"{GRAIN} does not divide its sizes {' x '.join(map(str, sizes))}"
        if block is not None and contracted % block:
            return f"{block} does not divide the {contracted} that it contracts"
        if matmul.name in last:
            return "the last linear stays in the low dtype"
        if matmul.role == WEIGHT and not self.recipe.weight_gradients:
            return f"{self.recipe.name} leaves gradients of weights in the low dtype"
        return ""

    def _problem(self, allowed: list[Matmul], matmuls: list[Matmul], cost: Fp8Cost) -> Fp8Problem:
        times: dict[Var, Times] = {}
        for matmul in allowed:
            elements = sum(numel(operand.value) for operand in matmul.operands)
            itemsize = matmul.node.meta["val"].dtype.itemsize
            more = cost.matmul(matmul_flops(matmul.node), elements, itemsize)
            before = times.get(_variable(matmul), Times(0, 0))
            times[_variable(matmul)] = Times(before.low + more.low, before.fp8 + more.fp8)
        nodes = {matmul.node for matmul in allowed}
        low = {operand.base for m in matmuls if m.node not in nodes for operand in m.operands}
        readings: dict[fx.Node, list[tuple[Var, Operand]]] = {}
        for matmul in allowed:
            for operand in matmul.operands:
                readings.setdefault(operand.base, []).append((_variable(matmul), operand))
        values = [self._value(base, read, base in low, cost) for base, read in readings.items()]
        return Fp8Problem(times, tuple(values))

    def _value(
        self, base: fx.Node, readings: list[tuple[Var, Operand]], is_read_low: bool, cost: Fp8Cost
    ) -> Value:
        """What the low copy and the fp8 copies of one value take."""
        found: dict[object, tuple[int, list[Var]]] = {}
        value, source = base.meta["val"], readings[0][1].source
        for reader, operand in readings:
            for key, time in self._copies(operand, cost).items():
                found.setdefault(key, (time, []))[1].append(reader)
        low = 0
        if not (is_read_low or _is_stored(base)):
            low = cost.low_copy(numel(value), value.dtype.itemsize)
            if source is not base:
                low = cost.cast(numel(value), source.meta["val"].dtype.itemsize + value.dtype.itemsize)
        readers = tuple(dict.fromkeys(reader for reader, _ in readings))
        return Value(low, readers, tuple(Copy(time, tuple(by)) for time, by in found.values()))

    def _copies(self, operand: Operand, cost: Fp8Cost) -> Mapping[str, int]:
        """What has to be made of a value before a matmul reads it, by what makes two readers share it."""
        elements, itemsize = numel(operand.value), operand.source.meta["val"].dtype.itemsize
        in_rows, block = operand.lies_in_rows, self.recipe.block
        if self.recipe.by_row:
            return {operand.layout_key: cost.fp8_copy(elements, itemsize, in_rows=in_rows, block=block)}
        whole = {"whole": cost.fp8_copy(elements, itemsize, in_rows=False)}
        if in_rows:
            return whole
        # gradients are read both ways in one graph; of other values, the backward reads the other way
        again = None if operand.is_gradient else itemsize
        return {**whole, operand.layout_key: cost.transposition(elements, again)}


def _variable(matmul: Matmul) -> tuple[str | None, str | None]:
    """What the cut decides about: all matmuls that a call has in one role go together."""
    return matmul.name, matmul.role


def _is_stored(base: fx.Node) -> bool:
    """True for what is in memory whoever reads it: inputs, and results of library calls."""
    return base.op == "placeholder" or base.target is operator.getitem or is_matmul(base)
