"""Choose the precision of every value by what its rounding costs in accuracy, beside time and bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.forward.constrain import HAZARD_META
from amp_fx.passes.forward.harm_prices import Priced
from amp_fx.passes.forward.harm_terms import HarmNetwork, free_nodes
from amp_fx.passes.forward.place import Network, Place, assign_as_autocast, rounded
from amp_fx.placement.cost import CostModel
from amp_fx.placement.cut import HIGH, LOW, Var, solve
from amp_fx.placement.profile import DeviceProfile
from amp_fx.placement.tradeoff import Choice, bracket
from amp_fx.plans.harm import CallHarm
from amp_fx.plans.plan import NodePlan, node_plan
from amp_fx.policy import OpClass

__all__ = ["HARM_META", "Labels", "PlaceByHarm", "Placement", "PricedGraph", "choose", "price", "within"]

#: gm.meta key: harm of the placement that was chosen, and of torch.autocast's
HARM_META = "amp_fx_harm"

#: call -> whether it computes in fp32, and whether its result is stored so
Placement = Mapping[str, tuple[bool, bool]]

Labels = list[Mapping[Var, bool]]


@dataclass(frozen=True)
class PricedGraph:
    """A graph with its prices.

    Attributes:
        graph: classified, hazards pinned; its plans hold autocast's placement.
        low: the low dtype.
        priced: time and harm of any placement.
        autocast: the labels of torch.autocast: every listed op low, values where a cut over bytes puts them.
        network: makes the cut's problem for a device profile, or for None.
    """

    graph: fx.Graph
    low: torch.dtype
    priced: Priced
    autocast: Mapping[Var, bool]
    network: Callable[[DeviceProfile | None], HarmNetwork]

    def choose(self, weight: float) -> Choice[Mapping[Var, bool]]:
        """The placement of least time and weighted harm."""
        labels = self.priced.solve(weight)
        return Choice(self.priced.time(labels), self.priced.harm(labels), weight, labels)

    def placement(self, labels: Mapping[Var, bool]) -> Placement:
        """Labels in a form that holds for the same graph captured again."""
        return {
            plan.name: (labels[node], labels.get(rounded(node), HIGH))
            for node in self.graph.nodes
            if (plan := node_plan(node)) is not None and node in labels
        }

    def labels(self, placement: Placement) -> dict[Var, bool]:
        """The labels of a placement."""
        found: dict[Var, bool] = {}
        for node in self.graph.nodes:
            plan = node_plan(node)
            if plan is not None and plan.name in placement:
                found[node], found[rounded(node)] = placement[plan.name]
        return found

    def moved(self, labels: Mapping[Var, bool]) -> int:
        """Bytes that a placement reads and writes, by the cost model."""
        return self._by_bytes.time(labels)

    @functools.cached_property
    def _by_bytes(self) -> Priced:
        return Priced(self.network(None))

    @property
    def autocast_harm(self) -> float:
        """What torch.autocast's roundings add; those that overflow are left out."""
        return sum(term.harm for term in self.priced.blame(self.autocast) if math.isfinite(term.harm))


def price(gm: fx.GraphModule, context: PassContext, rows: Mapping[str, CallHarm]) -> PricedGraph | None:
    """Prices a graph; None where it has no single low dtype to choose.

    Args:
        gm: classified, hazards pinned. Its plans are given autocast's placement.
        context: of the passes.
        rows: what was measured, by the call's name.
    """
    placed = [(node, plan) for node in gm.graph.nodes if (plan := node_plan(node)) is not None]
    for node, plan in placed:
        assign_as_autocast(node, plan)
    lows = {plan.low for _, plan in placed if plan.low is not None and plan.op_class is not OpClass.KEEP}
    if len(lows) != 1:
        return None
    low = lows.pop()
    cost = CostModel(gm.graph, None, context.training, context.folded)
    autocast = solve(Network(gm.graph, cost, low).build())
    fixed = frozenset(
        node
        for node, plan in placed
        if HAZARD_META in node.meta or context.policy.rule_for(plan.op, plan.module_path) is not None
    )
    free = free_nodes(gm.graph, rows, fixed)

    def network(profile: DeviceProfile | None) -> HarmNetwork:
        rates = CostModel(gm.graph, profile, context.training, context.folded)
        return HarmNetwork(gm.graph, rates, low, rows, free)

    priced = Priced(network(context.profile), by_operations=context.profile is None)
    return PricedGraph(gm.graph, low, priced, autocast, network)


def choose(parts: Sequence[PricedGraph], weight: float) -> Choice[Labels]:
    """The placement of several graphs of least time and weighted harm."""
    found = [part.choose(weight) for part in parts]
    time, harm = sum(each.time for each in found), sum(each.harm for each in found)
    return Choice(time, harm, weight, [each.placement for each in found])


def within(parts: Sequence[PricedGraph], limit: float) -> Choice[Labels]:
    """The cheapest placement found of several graphs whose harm is at most ``limit``; if none is, that of least harm.

    Corners of the hull are exact, but may lie far apart. Between the last that is beyond the limit and the first that
    is within it, or autocast's own placement, as few calls as possible are moved.
    """
    # autocast's own placement is within its own error
    limit *= 1 + 1e-9

    def solve_all(weight: float) -> Choice[Labels]:
        return choose(parts, weight)

    beyond, exact = bracket(solve_all, limit)
    if beyond is None or exact.harm > limit:
        return exact
    found = [exact, _moved_towards(parts, beyond.placement, exact.placement, limit)]
    theirs: Labels = [
        {var: part.autocast.get(var, HIGH) for var in placed}
        for part, placed in zip(parts, exact.placement, strict=True)
    ]
    pairs = list(zip(parts, theirs, strict=True))
    if all(part.priced.allows(labels) for part, labels in pairs):
        found.append(_moved_towards(parts, beyond.placement, theirs, limit))
    return min((each for each in found if each.harm <= limit), key=lambda each: (each.time, each.harm))


def _moved_towards(
    parts: Sequence[PricedGraph], start: Sequence[Mapping[Var, bool]], goal: Labels, limit: float
) -> Choice[Labels]:
    """From one placement towards another, until it is within the limit: first what lowers harm most for its time."""
    state = [dict(labels) for labels in start]
    moves: list[tuple[float, int, set[Var]]] = []
    for at, part in enumerate(parts):
        for group in part.priced.groups(state[at], goal[at]):
            time, harm = part.priced.flipped(state[at], group)
            moves.append((-harm / max(time, 1e-3), at, group))
    moves.sort(key=lambda move: -move[0])
    total = sum(part.priced.harm(labels) for part, labels in zip(parts, state, strict=True))
    done: list[tuple[int, set[Var]]] = []
    for _, at, group in moves:
        if total <= limit:
            break
        total += parts[at].priced.flipped(state[at], group)[1]
        _flip(state[at], group)
        done.append((at, group))
    for at, group in done:
        time, harm = parts[at].priced.flipped(state[at], group)
        if time < 0 and total + harm <= limit:
            total += harm
            _flip(state[at], group)
    pairs = list(zip(parts, state, strict=True))
    return Choice(
        sum(part.priced.time(labels) for part, labels in pairs),
        sum(part.priced.harm(labels) for part, labels in pairs),
        math.nan,
        list(state),
    )


def _flip(labels: dict[Var, bool], group: set[Var]) -> None:
    for var in group:
        labels[var] = not labels.get(var, HIGH)


@dataclass(frozen=True)
class PlaceByHarm(Pass):
    """Stands where ``place`` does when the user gives measured harm.

    The op lists no longer say what may be low: a listed op stays in fp32 where its rounding harms, and an op of no
    list goes low where it does not. What hazards and the user's rules pin stays pinned, and what was not measured is
    as autocast has it.

    Before (dtypes as autocast would have them)::

        square = torch.ops.aten.mul.Tensor(x, x)                    # bf16: x comes out of a matmul
        mean = torch.ops.aten.mean.dim(square, [-1])                # bf16

    After, where rounding x harms more than an fp32 matmul costs::

        square = torch.ops.aten.mul.Tensor(x, x)                    # f32, and so is the matmul
        mean = torch.ops.aten.mean.dim(square, [-1])                # f32

    Attributes:
        rows: call of this graph, with the path of its body -> what was measured.
        budget: how much error the graph may have, relative to torch.autocast's; the cheapest such placement is taken.
        weight: instead of a budget, what a squared relative error of 1 is worth, in picoseconds (bytes without a
            device profile).
        placement: instead of both, where each call is, as :meth:`PricedGraph.placement` gave it.
    """

    name: ClassVar[str] = "place-by-harm"
    needs: ClassVar[frozenset[str]] = frozenset({"classes", "hazards-pinned"})
    ensures: ClassVar[frozenset[str]] = frozenset({"dtypes"})

    rows: Mapping[str, CallHarm] = field(hash=False)
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
            labels = found.choose(self.weight).placement
        else:
            (labels,) = within([found], self.budget**2 * found.autocast_harm).placement
        gm.meta[HARM_META] = found.priced.harm(labels), found.autocast_harm
        low_nodes = _apply(labels, found)
        error, theirs = math.sqrt(found.priced.harm(labels)), math.sqrt(found.autocast_harm)
        return PassResult(
            gm, low_nodes, f"{low_nodes} nodes in the low dtype, error {error:.2e}, of autocast {theirs:.2e}"
        )


def _apply(labels: Mapping[Var, bool], found: PricedGraph) -> int:
    """Writes the labels into the plans, with what each rounding costs; returns how many calls are low."""
    costs: dict[str, float] = {}
    for term in found.priced.terms:
        costs[term.call] = costs.get(term.call, 0.0) + term.harm
    low_nodes = 0
    for node in found.graph.nodes:
        plan = node_plan(node)
        if plan is None or node not in labels or plan.dtype is None:
            continue
        if plan.op_class is not OpClass.KEEP:
            _write(plan, labels[node], labels.get(rounded(node), HIGH), found.low)
            if plan.name in costs:
                would = "adds" if labels[node] is LOW else "would add"
                plan.reason += (
                    f"; harm: rounding {would} {math.sqrt(costs[plan.name]):.1e} to the gradient's error"
                )
        low_nodes += plan.dtype is found.low
    return low_nodes


def _write(plan: NodePlan, label: bool, stored: bool, low: torch.dtype) -> None:
    if label is HIGH:
        plan.dtype = torch.float32
        if stored is LOW:
            plan.pinned = low
        return
    plan.dtype = low
    if plan.op_class is OpClass.FP32:
        # its kernel computes in fp32 whatever it reads and writes
        plan.op_class = OpClass.PROMOTE
