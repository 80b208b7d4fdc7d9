"""Time and harm of any placement of one graph, and the placements of least time and weighted harm."""

from __future__ import annotations

import functools
import math
from collections import ChainMap
from collections.abc import Mapping

import networkx as nx
import torch
import torch.fx as fx

from amp_fx.passes.forward.harm_terms import HarmNetwork, HarmTerm
from amp_fx.passes.forward.place import ALWAYS, rounded
from amp_fx.placement.cut import HIGH, LOW, Problem, Shared, Var, evaluate, solve
from amp_fx.plans.plan import NodePlan, node_plan

__all__ = ["Priced", "labels_of"]


class Priced:
    """One graph with time and harm: placements of least ``time + weight * harm``, exactly, for any weight.

    Attributes:
        terms: what roundings cost, and when they happen.

    Time is in picoseconds with a device profile, in bytes moved without; then ``by_operations`` counts arithmetic, too.
    """

    def __init__(self, network: HarmNetwork, *, by_operations: bool = False) -> None:
        self._base = network.build()
        self._scale = network.scale
        if by_operations:
            for var, (high, low) in network.operations().items():
                self._base.add_unary(var, high * self._scale, low * self._scale)
        self.terms = network.terms
        dearest = sum(max(costs) for costs in self._base.unary.values())
        self._all = dearest + sum(term.cost for term in self._base.shared) + 1
        finite = [term.harm for term in self.terms if math.isfinite(term.harm)]
        self._smallest = max(finite, default=1.0) * 1e-12

    def solve(self, weight: float) -> dict[Var, bool]:
        """Labels of least cost.

        Args:
            weight: units of time that a squared relative error of 1 is worth; infinite: the least harm.
        """
        return solve(self.problem(weight))

    def problem(self, weight: float) -> Problem:
        """What :meth:`solve` minimises."""
        base = self._base
        problem = Problem(dict(base.unary), base.pins, list(base.shared), base.implies, base.equal)
        prices = [self._price(term.harm, weight) for term in self.terms]
        # an overflow is dearer than everything else together
        beyond = self._all + sum(price for price in prices if price is not None)
        for term, known in zip(self.terms, prices, strict=True):
            price = beyond if known is None else known
            if term.against is not None:
                problem.shared.append(Shared(price, term.label, (term.var,), term.against))
            elif term.label is LOW:
                problem.add_unary(term.var, 0, price)
            else:
                problem.add_unary(term.var, price, 0)
        return problem

    def _price(self, harm: float, weight: float) -> int | None:
        """None for an overflow."""
        if math.isinf(harm):
            return None
        if math.isinf(weight):
            # the smallest difference of harms that counts beats any time
            return round(harm / self._smallest) * self._all
        return round(harm * weight * self._scale)

    def time(self, labels: Mapping[Var, bool]) -> int:
        """Time of a placement in units, whether or not the constraints allow it; casts that tie are left out."""
        total = sum(
            high if labels.get(var, HIGH) is HIGH else low for var, (high, low) in self._base.unary.items()
        )
        total += sum(term.cost for term in self._base.shared if _is_paid(term, labels))
        return total // self._scale

    def harm(self, labels: Mapping[Var, bool]) -> float:
        """Squared relative error of the gradient that a placement adds."""
        return sum(term.harm for term in self.terms if term.is_done(labels))

    def blame(self, labels: Mapping[Var, bool]) -> list[HarmTerm]:
        """The roundings of a placement, worst first."""
        return sorted((term for term in self.terms if term.is_done(labels)), key=lambda term: -term.harm)

    def allows(self, labels: Mapping[Var, bool]) -> bool:
        """True where a placement breaks no pin, no implication and no equality."""
        return evaluate(self._base, labels) is not None

    def groups(self, first: Mapping[Var, bool], second: Mapping[Var, bool]) -> list[set[Var]]:
        """The variables in which two placements differ, those together that constraints tie."""
        differ = {var for var in self._base.variables() if first.get(var, HIGH) is not second.get(var, HIGH)}
        ties = nx.Graph()
        ties.add_nodes_from(sorted(differ, key=str))
        pairs = (*self._base.equal, *self._base.implies)
        ties.add_edges_from((a, b) for a, b in pairs if a in differ and b in differ)
        return list(nx.connected_components(ties))

    def flipped(self, labels: Mapping[Var, bool], group: set[Var]) -> tuple[float, float]:
        """How time and harm change when the variables of a group take their other labels."""
        after = ChainMap({var: not labels.get(var, HIGH) for var in group}, labels)  # type: ignore[arg-type]  # only read
        time = 0
        for var in group:
            high, low = self._base.unary.get(var, (0, 0))
            time += (high - low) if after[var] is HIGH else (low - high)
        copies = {id(term): term for var in group for term in self._shared_of.get(var, ())}
        time += sum(term.cost * (_is_paid(term, after) - _is_paid(term, labels)) for term in copies.values())
        terms = {id(term): term for var in group for term in self._terms_of.get(var, ())}
        harm = sum(term.harm * (term.is_done(after) - term.is_done(labels)) for term in terms.values())
        return time / self._scale, harm

    @functools.cached_property
    def _shared_of(self) -> dict[Var, list[Shared]]:
        found: dict[Var, list[Shared]] = {}
        for term in self._base.shared:
            for var in {*term.readers, *(() if term.value is None else (term.value,))}:
                found.setdefault(var, []).append(term)
        return found

    @functools.cached_property
    def _terms_of(self) -> dict[Var, list[HarmTerm]]:
        found: dict[Var, list[HarmTerm]] = {}
        for term in self.terms:
            for var in {term.var, *(() if term.against is None else (term.against,))}:
                found.setdefault(var, []).append(term)
        return found


def _is_paid(term: Shared, labels: Mapping[Var, bool]) -> bool:
    wanted = any(labels.get(reader, HIGH) is term.label for reader in term.readers)
    return wanted and (term.value is None or labels.get(term.value, HIGH) is not term.label)


def labels_of(graph: fx.Graph, plans: Mapping[str, NodePlan], low: torch.dtype) -> dict[Var, bool]:
    """The labels that a plan gives to the calls of a graph.

    Args:
        graph: classified.
        plans: call of the graph -> what the plan has for it.
        low: the low dtype.
    """
    labels: dict[Var, bool] = {var: label for label, var in ALWAYS.items()}
    for node in graph.nodes:
        plan = node_plan(node)
        if plan is not None:
            # literal numbers are in no plan
            placed = plans.get(plan.name, plan)
            labels[node] = placed.dtype is not low
            labels[rounded(node)] = (placed.pinned or placed.dtype) is not low
    return labels
