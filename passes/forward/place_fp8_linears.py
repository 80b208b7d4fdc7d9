"""Choose which matmuls of a graph without gradients run in fp8, with a second exact cut."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx.graphs.facts import is_matmul, matmul_flops, numel
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.forward.fp8_linears import Linear, linear_of
from amp_fx.passes.forward.mark_fp8 import may_run_in_fp8
from amp_fx.passes.joint.fp8_matmuls import FP8_META, is_residual, last_matmuls
from amp_fx.placement.cut import Var
from amp_fx.placement.fp8 import Copy, Fp8Cost, Times, Value, choose
from amp_fx.placement.fp8_device import Fp8Device
from amp_fx.plans.plan import PLAN_META
from amp_fx.policy.fp8 import GRAIN

__all__ = ["PlaceFp8Linears"]


@dataclass(frozen=True)
class PlaceFp8Linears(Pass):
    """Says of every 16-bit matmul with a matrix whether it runs in fp8, which :class:`QuantiseLinears` then does.

    What :class:`PlaceFp8` says of forward and backward together, for a graph without a backward. A matmul stays in the
    low dtype where

    1. policy and plan do not leave it there without a user's rule.
    2. 16 does not divide what is contracted and the columns, or they are not known. Rows do not count.
    3. it is the last of the graph: what that returns is multiplied no more, nor added to a residual stream.
    4. the cut of :mod:`amp_fx.placement.fp8` finds no gain in it. Without costs, everything that may run in fp8 does.
       Copies of weights that live across calls cost nothing in a call, in fp8 as in the low dtype.

    The graph is not changed, only ``meta``::

        linear = torch.ops.aten.linear.default(x_16, w_16)     # meta["amp_fx_fp8"] is Recipe("rowwise", ...)

    Attributes:
        here: the device.
    """

    name: ClassVar[str] = "place-fp8-linears"
    needs: ClassVar[frozenset[str]] = frozenset({"casts"})
    ensures: ClassVar[frozenset[str]] = frozenset({"fp8-linears-placed"})

    here: Fp8Device

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        last = {node for node in last_matmuls(gm) if not is_residual(node)}
        linears = [
            linear
            for node in gm.graph.nodes
            if may_run_in_fp8(node, context) and (linear := linear_of(node)) is not None
        ]
        refused = {linear.node: self._refusal(linear, last) for linear in linears}
        allowed = [linear for linear in linears if not refused[linear.node]]
        chosen = frozenset[Var](linear.node for linear in allowed)
        if self.here.cost is not None:
            chosen = self._cut(allowed, context.folded, self.here.cost)
        for linear in linears:
            plan = linear.node.meta[PLAN_META]
            why = refused[linear.node] or "converting would cost more than fp8 saves on this device"
            if linear.node in chosen:
                linear.node.meta[FP8_META] = self.here.recipe
                plan.multiplied, why = torch.float8_e4m3fn, f"fp8, {self.here.recipe.name}"
            plan.reason = f"{plan.reason}; {why}"
        return PassResult(gm, len(chosen), f"{len(chosen)} of {len(linears)} matmuls in fp8")

    def _refusal(self, linear: Linear, last: set[fx.Node]) -> str:
        """Why a matmul may not run in fp8, or an empty string."""
        if linear.node.meta["val"].device.type != self.here.device:
            return f"it does not run on {self.here.device}"
        if not all(isinstance(size, int) and size and size % GRAIN == 0 for size in linear.sizes):
            return f"{GRAIN} does not divide its sizes {' x '.join(map(str, linear.sizes))}"
        if linear.node in last:
            return "the last linear stays in the low dtype"
        return ""

    def _cut(self, allowed: list[Linear], folded: frozenset[str], cost: Fp8Cost) -> frozenset[Var]:
        times: dict[Var, Times] = {}
        for linear in allowed:
            elements = numel(linear.value.meta["val"]) + numel(linear.matrix.meta["val"])
            result = linear.node.meta["val"]
            one = cost.matmul(matmul_flops(linear.node), elements, result.dtype.itemsize)
            # factors of columns are multiplied afterwards
            extra = 0 if self.here.recipe.by_row else cost.cast(numel(result), 2 * result.dtype.itemsize)
            times[linear.node] = Times(one.low, one.fp8 + extra)
        readers: dict[fx.Node, list[Linear]] = {}
        for linear in allowed:
            readers.setdefault(linear.value, []).append(linear)
            if linear.source.name not in folded:
                readers.setdefault(linear.source, []).append(linear)
        values = [self._value(value, by, times, cost) for value, by in readers.items()]
        return choose(times, values)

    def _value(self, value: fx.Node, by: list[Linear], times: dict[Var, Times], cost: Fp8Cost) -> Value:
        """What the low copy and the fp8 copy of one value take."""
        is_matrix = by[0].source is value
        low = by[0].matrix if is_matrix else value
        elements, itemsize = numel(low.meta["val"]), value.meta["val"].dtype.itemsize
        in_rows = by[0].in_rows if is_matrix else self.here.recipe.by_row
        copy = cost.fp8_copy(elements, itemsize, in_rows=in_rows)
        takes = 0
        if itemsize > low.meta["val"].dtype.itemsize:
            takes = cost.cast(elements, itemsize + low.meta["val"].dtype.itemsize)
        elif not _is_stored(value):
            takes = cost.low_copy(elements, itemsize)
        if any(user not in times for user in low.users):
            takes = 0
        nodes: tuple[Var, ...] = tuple(linear.node for linear in by)
        return Value(takes, nodes, (Copy(copy, nodes),))


def _is_stored(value: fx.Node) -> bool:
    """True for what is in memory whoever reads it: inputs, and results of library calls."""
    return value.op == "placeholder" or value.target is operator.getitem or is_matmul(value)
