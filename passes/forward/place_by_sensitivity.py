"""Choose the precision of every value by what its rounding costs in accuracy, beside time and bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx.graphs.keys import SENSITIVITY
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.forward.place import ALWAYS, Network, Place, assign_as_autocast, rounded
from amp_fx.passes.forward.sensitivity_terms import SensitivityNetwork, free_nodes
from amp_fx.placement.cost import CostModel
from amp_fx.placement.cut import HIGH, LOW, Var, solve
from amp_fx.placement.priced import Labels, Priced, SensitivityTerm
from amp_fx.placement.profile import DeviceProfile
from amp_fx.placement.within import within
from amp_fx.plans.label import Label, label_of
from amp_fx.plans.plan import NodePlan
from amp_fx.plans.reasons import HAZARDS, Kind, Reason
from amp_fx.plans.sensitivity import CallSensitivity
from amp_fx.policy import OpClass

__all__ = ["PlaceBySensitivity", "Placement", "PricedGraph", "price"]

#: call -> whether it computes in fp32, and whether its result is stored so
Placement = Mapping[str, tuple[bool, bool]]


@dataclass(frozen=True)
class PricedGraph:
    """A graph with its prices.

    Attributes:
        graph: classified, hazards pinned; its plans hold autocast's placement.
        low: the low dtype.
        priced: time and sensitivity of any placement: in picoseconds with a device profile; without, in bytes moved
            and what
            could be moved during the arithmetic.
        autocast: the labels of torch.autocast: every listed op low, values where a cut over bytes puts them.
        network: makes the cut's problem for a device profile, or for None.
    """

    graph: fx.Graph
    low: torch.dtype
    priced: Priced
    autocast: Labels
    network: Callable[[DeviceProfile | None], SensitivityNetwork]

    def placement(self, labels: Labels) -> Placement:
        """Labels in a form that holds for the same graph captured again."""
        return {
            plan.name: (labels[node], labels.get(rounded(node), labels[node]))
            for node in self.graph.nodes
            if (plan := label_of(node)) is not None and node in labels
        }

    def labels(self, placement: Placement) -> dict[Var, bool]:
        """The labels of a placement."""
        found: dict[Var, bool] = {}
        for node in self.graph.nodes:
            plan = label_of(node)
            if plan is not None and plan.name in placement:
                found[node], found[rounded(node)] = placement[plan.name]
        return found

    def labels_in(self, rows: Mapping[str, NodePlan]) -> dict[Var, bool]:
        """The labels that a plan gives to the calls.

        Args:
            rows: call -> what the plan has for it.
        """
        labels: dict[Var, bool] = {var: label for label, var in ALWAYS.items()}
        for node in self.graph.nodes:
            plan = label_of(node)
            if plan is not None:
                # literal numbers are in no plan
                placed = rows.get(plan.name, plan)
                labels[node] = placed.dtype is not self.low
                labels[rounded(node)] = (placed.pinned or placed.dtype) is not self.low
        return labels

    @functools.cached_property
    def by_bytes(self) -> Priced:
        """Bytes that a placement reads and writes, by the cost model."""
        network = self.network(None)
        return Priced(network.build(), network.terms, network.scale)

    @property
    def autocast_sensitivity(self) -> float:
        """What torch.autocast's roundings add; those that overflow are left out."""
        return sum(
            term.sensitivity for term in self.priced.blame(self.autocast) if math.isfinite(term.sensitivity)
        )


def price(
    gm: fx.GraphModule, context: PassContext, rows: Mapping[str, CallSensitivity]
) -> PricedGraph | None:
    """Prices a graph; None where it has no single low dtype to choose.

    Args:
        gm: classified, hazards pinned. Its plans are given autocast's placement.
        context: of the passes.
        rows: what was measured, by the call's name.
    """
    placed = [(node, plan) for node in gm.graph.nodes if (plan := label_of(node)) is not None]
    for node, plan in placed:
        assign_as_autocast(node, plan)
    lows = {plan.low for _, plan in placed if plan.low is not None and plan.op_class is not OpClass.KEEP}
    if len(lows) != 1:
        return None
    low = lows.pop()
    cost = CostModel(gm.graph, None, context.training, context.folded)
    autocast = solve(Network(gm.graph, cost, low).build())
    autocast |= {rounded(node): autocast[node] for node in gm.graph.nodes if autocast.get(node) is LOW}
    fixed = frozenset(
        node
        for node, plan in placed
        if (plan.op_class is OpClass.FP32 and plan.is_because(*HAZARDS))
        or context.policy.rule_for(plan.op, plan.module_path) is not None
    )
    free = free_nodes(gm.graph, rows, fixed)

    def network(profile: DeviceProfile | None) -> SensitivityNetwork:
        rates = CostModel(gm.graph, profile, context.training, context.folded)
        return SensitivityNetwork(gm.graph, rates, low, rows, free)

    timed = network(context.profile)
    problem = timed.build()
    if context.profile is None:
        for var, (high, narrow) in timed.operations().items():
            problem.add_unary(var, high * timed.scale, narrow * timed.scale)
    return PricedGraph(gm.graph, low, Priced(problem, timed.terms, timed.scale), autocast, network)


@dataclass(frozen=True)
class PlaceBySensitivity(Pass):
    """Stands where ``place`` does when the user gives measured sensitivity.

    The op lists no longer say what may be low: a listed op stays in fp32 where its rounding adds much error, and an op
    of no
    list goes low where it does not. What hazards and the user's rules pin stays pinned, and what was not measured is
    as autocast has it.

    Before (dtypes as autocast would have them)::

        square = torch.ops.aten.mul.Tensor(x, x)                    # bf16: x comes out of a matmul
        mean = torch.ops.aten.mean.dim(square, [-1])                # bf16

    After, where rounding x adds more error than an fp32 matmul costs time::

        square = torch.ops.aten.mul.Tensor(x, x)                    # f32, and so is the matmul
        mean = torch.ops.aten.mean.dim(square, [-1])                # f32

    Attributes:
        rows: call of this graph, with the path of its body -> what was measured.
        budget: how much error the graph may have, relative to torch.autocast's; the cheapest such placement is taken.
        weight: instead of a budget, what a squared relative error of 1 is worth, in picoseconds (bytes without a
            device profile).
        placement: instead of both, where each call is, as :meth:`PricedGraph.placement` gave it.
    """

    name: ClassVar[str] = "place-by-sensitivity"
    needs: ClassVar[frozenset[str]] = frozenset({"classes", "hazards-pinned"})
    ensures: ClassVar[frozenset[str]] = frozenset({"dtypes"})

    rows: Mapping[str, CallSensitivity] = field(hash=False)
    budget: float = 1.0
    weight: float | None = None
    placement: Placement | None = field(default=None, hash=False)

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        found = price(gm, context, self.rows)
        if found is None:
            return Place().call(gm, context)
        if self.placement is not None:
            labels = found.labels(self.placement)
        elif self.weight is not None:
            labels = found.priced.choose(self.weight).placement
        else:
            limit = self.budget**2 * found.autocast_sensitivity
            (labels,) = within([found.priced], limit, [found.autocast]).placement
        SENSITIVITY.set(gm, (found.priced.sensitivity(labels), found.autocast_sensitivity))
        low_nodes = _apply(labels, found)
        error, theirs = math.sqrt(found.priced.sensitivity(labels)), math.sqrt(found.autocast_sensitivity)
        return PassResult(
            gm, low_nodes, f"{low_nodes} nodes in the low dtype, error {error:.2e}, of autocast {theirs:.2e}"
        )


def _apply(labels: Labels, found: PricedGraph) -> int:
    """Writes the labels into the plans, with what each rounding costs; returns how many calls are low."""
    terms: dict[str, list[SensitivityTerm]] = {}
    for term in found.priced.terms:
        terms.setdefault(term.call, []).append(term)
    low_nodes = 0
    for node in found.graph.nodes:
        plan = label_of(node)
        if plan is None or node not in labels or plan.dtype is None:
            continue
        if plan.op_class is not OpClass.KEEP:
            _write(plan, labels[node], labels.get(rounded(node), labels[node]), found.low)
            if plan.name in terms:
                is_low = labels[node] is LOW
                sensitivities = [
                    term.sensitivity for term in terms[plan.name] if not is_low or term.is_done(labels)
                ]
                plan.reasons += (_cost(math.sqrt(sum(sensitivities)), is_low=is_low),)
        low_nodes += plan.dtype is found.low
    return low_nodes


def _cost(error: float, *, is_low: bool) -> Reason:
    """What rounding a call costs."""
    if math.isinf(error):
        return Reason(Kind.ROUNDING_OVERFLOWS)
    return Reason.of(Kind.ROUNDING_ADDS if is_low else Kind.ROUNDING_WOULD_ADD, error=error)


def _write(plan: Label, label: bool, stored: bool, low: torch.dtype) -> None:
    if label is HIGH:
        plan.dtype = torch.float32
        if stored is LOW:
            plan.pinned = low
        return
    plan.dtype = low
    if stored is HIGH:
        plan.pinned = torch.float32
        plan.reasons += (Reason.of(Kind.WIDE_RESULT, low=low),)
    if plan.op_class is OpClass.FP32:
        # its kernel computes in fp32 whatever it reads and writes
        plan.op_class = OpClass.PROMOTE
