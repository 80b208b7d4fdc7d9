"""Two sides for many values, exactly: one s-t minimum cut.

Every value is stored in fp32 (``HIGH``) or in the low dtype (``LOW``). A :class:`Problem` says what each choice costs:
per value, and per *conversion shared by several readers*, which is what makes the problem more than a sum of edges.
All terms are submodular, so the optimum is a minimum cut (source side = HIGH, sink side = LOW):

* a cost of one value is an arc to the source or the sink;
* "x is HIGH and at least one of r1..rk is LOW" costs c once: arcs ``x -> d`` (c) and ``d -> ri`` (infinite)
  through a gadget node d;
* "x is LOW and at least one of r1..rk is HIGH": arcs ``e -> x`` (c) and ``ri -> e`` (infinite);
* "a is HIGH implies b is HIGH": the infinite arc ``a -> b``; values with equal sides imply each other.

The arcs are directed. The undirected single-gadget network that is sometimes used for shared conversions
charges some of them twice and is not exact.

What infinite arcs tie to the source or the sink is decided, and is one node with it. Ties go to what a value prefers,
and then to HIGH. The result does not depend on the order in which terms were added: of all minimum cuts the one with
the largest source side is returned, which is unique.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amp_fx.errors import AmpFxError

# imported in functions: `import amp_fx` imports nothing that only compiling takes
if TYPE_CHECKING:
    import networkx as nx

HIGH = True
LOW = False

Var = Hashable
_SOURCE: Var = ("source",)
_SINK: Var = ("sink",)


class ContradictionError(AmpFxError):
    """Two constraints exclude each other: a value is pinned, directly or by implication, to both sides."""


@dataclass(frozen=True)
class Shared:
    """``cost`` is paid once if a reader has ``side`` and ``value`` (where given) has the other one.

    With a ``value`` this is a conversion shared by its readers; without one, a copy that must exist.
    """

    cost: int
    side: bool
    readers: tuple[Var, ...]
    value: Var | None = None

    def is_paid(self, sides: Mapping[Var, bool]) -> bool:
        """True where an assignment costs it; what has no side is HIGH."""
        wanted = any(sides.get(reader, HIGH) is self.side for reader in self.readers)
        return wanted and (self.value is None or sides.get(self.value, HIGH) is not self.side)


@dataclass
class Problem:
    """The function to minimise. Costs are non-negative integers in one unit."""

    #: value -> (cost of HIGH, cost of LOW)
    unary: dict[Var, tuple[int, int]] = field(default_factory=dict)
    #: values whose side is given
    pins: dict[Var, bool] = field(default_factory=dict)
    #: conversions and copies
    shared: list[Shared] = field(default_factory=list)
    #: pairs (a, b): a HIGH implies b HIGH
    implies: list[tuple[Var, Var]] = field(default_factory=list)
    #: value -> its side in a tie; HIGH where nothing is said
    preferred: dict[Var, bool] = field(default_factory=dict)

    def add_unary(self, var: Var, high: int, low: int) -> None:
        """Adds to the cost of one value's two sides."""
        before = self.unary.get(var, (0, 0))
        self.unary[var] = (before[0] + high, before[1] + low)

    def variables(self) -> set[Var]:
        """Every value that any term mentions."""
        found: set[Var] = {*self.unary, *self.pins, *self.preferred}
        for term in self.shared:
            found.update(term.readers)
            if term.value is not None:
                found.add(term.value)
        found.update(*self.implies)
        return found

    def cost(self, sides: Mapping[Var, bool]) -> int:
        """The cost of an assignment, whether or not the constraints allow it; a variable without a side is HIGH."""
        unary = self.unary.items()
        total = sum(high if sides.get(var, HIGH) is HIGH else low for var, (high, low) in unary)
        return total + sum(term.cost for term in self.shared if term.is_paid(sides))

    def allows(self, sides: Mapping[Var, bool]) -> bool:
        """True where an assignment breaks no pin and no implication."""
        found = {var: sides.get(var, HIGH) for var in self.variables()}
        implied = all(found[b] is HIGH for a, b in self.implies if found[a] is HIGH)
        return implied and all(found[var] is side for var, side in self.pins.items())


def solve(problem: Problem) -> dict[Var, bool]:
    """An assignment of least cost; among those, the one with the most values as preferred.

    ContradictionError where no assignment satisfies pins and implications together.
    """
    import networkx as nx

    costs, ties = _arcs(problem)
    high, low = nx.descendants(ties, _SOURCE), nx.ancestors(ties, _SINK)
    if high & low:
        var = min(high & low, key=str)
        raise ContradictionError(f"{var!r} is pinned to both sides; drop one of the constraints.")
    ends = dict.fromkeys(high, _SOURCE) | dict.fromkeys(low, _SINK)
    capacities = Counter[tuple[Var, Var]]()
    for (a, b), cost in costs.items():
        capacities[ends.get(a, a), ends.get(b, b)] += cost
    ties.remove_nodes_from([*ends, _SOURCE, _SINK])
    for var in ties:
        # one of the two is paid in any case
        least = min(capacities[_SOURCE, var], capacities[var, _SINK])
        capacities.subtract({(_SOURCE, var): least, (var, _SINK): least})
    arcs = {
        (a, b): cost for (a, b), cost in capacities.items() if cost and a not in (b, _SINK) and b != _SOURCE
    }
    arcs.pop((_SOURCE, _SINK), None)
    # infinite to networkx
    arcs |= dict.fromkeys(ties.edges, math.inf)
    ties.add_edges_from((a, b) for a, b in arcs if a != _SOURCE and b != _SINK)
    components = [*nx.weakly_connected_components(ties)]
    number = {var: at for at, names in enumerate(components) for var in names}
    networks = defaultdict[int, list[tuple[Var, Var, float]]](list)
    for (a, b), capacity in arcs.items():
        networks[number[b if a == _SOURCE else a]].append((a, b, capacity))
    for network in networks.values():
        low |= _low_side(network)
    return {var: LOW if var in low else HIGH for var in problem.variables()}


def _arcs(problem: Problem) -> tuple[Counter[tuple[Var, Var]], nx.DiGraph]:
    """Arcs with their costs, and the infinite ones."""
    import networkx as nx

    ties: nx.DiGraph = nx.DiGraph()
    ties.add_nodes_from((*problem.variables(), _SOURCE, _SINK))
    ties.add_edges_from(problem.implies)
    ties.add_edges_from(
        (_SOURCE, var) if side is HIGH else (var, _SINK) for var, side in problem.pins.items()
    )
    wishes = ((var, problem.preferred.get(var, HIGH)) for var in problem.variables())
    costs = Counter[tuple[Var, Var]]((_SOURCE, var) if side is HIGH else (var, _SINK) for var, side in wishes)
    # one unit for each wish breaks ties
    scale = len(costs) + 1
    for var, (for_high, for_low) in problem.unary.items():
        costs[var, _SINK] += for_high * scale
        costs[_SOURCE, var] += for_low * scale
    for number, term in enumerate(problem.shared):
        if not term.readers:
            continue
        gadget: Var
        value, (gadget, *others) = term.value, term.readers
        if value is None:
            value = _SOURCE if term.side is LOW else _SINK
        if others:
            gadget = ("gadget", number)
            ties.add_edges_from(_towards(term.side, gadget, reader) for reader in term.readers)
        costs[_towards(term.side, value, gadget)] += term.cost * scale
    return costs, ties


def _towards(side: bool, a: Var, b: Var) -> tuple[Var, Var]:
    """The arc from a to b where readers are LOW, and back where they are HIGH."""
    return (a, b) if side is LOW else (b, a)


def _low_side(arcs: list[tuple[Var, Var, float]]) -> set[Var]:
    """The smallest sink side of a minimum cut, without the sink."""
    import networkx as nx

    network: nx.DiGraph = nx.DiGraph()
    network.add_weighted_edges_from(arcs, weight="capacity")
    if _SOURCE in network and _SINK in network:
        # of all minimum cuts networkx returns the one whose sink side is smallest
        _, (_, low) = nx.minimum_cut(network, _SOURCE, _SINK)
        return low - {_SINK}
    return nx.ancestors(network, _SINK) if _SINK in network else set()
