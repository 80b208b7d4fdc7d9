"""Two labels for many values, exactly: one s-t minimum cut.

Every value is stored in fp32 (``HIGH``) or in the low dtype (``LOW``). A :class:`Problem` says what each choice costs:
per value, and per *conversion shared by several readers*, which is what makes the problem more than a sum of edges.
All terms are submodular, so the optimum is a minimum cut (source side = HIGH, sink side = LOW):

* a cost of one value is an arc to the source or the sink;
* "x is HIGH and at least one of r1..rk is LOW" costs c once: arcs ``x -> d`` (c) and ``d -> ri`` (infinite)
  through a gadget node d;
* "x is LOW and at least one of r1..rk is HIGH": arcs ``e -> x`` (c) and ``ri -> e`` (infinite);
* "a is HIGH implies b is HIGH": the infinite arc ``a -> b``.

The arcs are directed. The undirected single-gadget network that is sometimes used for shared conversions
charges some of them twice and is not exact.

Ties go to what a value prefers, and then to HIGH. The result does not depend on the order in which terms were added: of
all minimum cuts the one with the largest source side is returned, which is unique.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

import networkx as nx

from amp_fx.errors import AmpFxError

__all__ = ["HIGH", "LOW", "ContradictionError", "Problem", "Shared", "Var", "evaluate", "solve"]

HIGH = True
LOW = False

Var = Hashable
_SOURCE = ("source",)
_SINK = ("sink",)


class ContradictionError(AmpFxError):
    """Two constraints exclude each other: a value is pinned, directly or by implication, to both labels."""


@dataclass(frozen=True)
class Shared:
    """``cost`` is paid once if a reader has ``label`` and ``value`` (where given) has the other one.

    With a ``value`` this is a conversion shared by its readers; without one, a copy that must exist.
    """

    cost: int
    label: bool
    readers: tuple[Var, ...]
    value: Var | None = None


@dataclass
class Problem:
    """What to minimise. Costs are non-negative integers in one unit."""

    #: value -> (cost of HIGH, cost of LOW)
    unary: dict[Var, tuple[int, int]] = field(default_factory=dict)
    #: values whose label is given
    pins: dict[Var, bool] = field(default_factory=dict)
    #: conversions and copies
    shared: list[Shared] = field(default_factory=list)
    #: pairs (a, b): a HIGH implies b HIGH
    implies: list[tuple[Var, Var]] = field(default_factory=list)
    #: pairs with equal labels
    equal: list[tuple[Var, Var]] = field(default_factory=list)
    #: value -> its label in a tie; HIGH where nothing is said
    preferred: dict[Var, bool] = field(default_factory=dict)

    def add_unary(self, var: Var, high: int, low: int) -> None:
        """Adds to the cost of one value's two labels."""
        before = self.unary.get(var, (0, 0))
        self.unary[var] = (before[0] + high, before[1] + low)

    def variables(self) -> set[Var]:
        """Every value that any term mentions."""
        found: set[Var] = {*self.unary, *self.pins, *self.preferred}
        for term in self.shared:
            found.update(term.readers)
            if term.value is not None:
                found.add(term.value)
        for a, b in (*self.implies, *self.equal):
            found.update((a, b))
        return found


def evaluate(problem: Problem, labels: Mapping[Var, bool]) -> int | None:
    """Total cost of a labelling; None where it breaks a pin, an implication or an equality."""
    if any(labels[var] != label for var, label in problem.pins.items()):
        return None
    if any(labels[a] and not labels[b] for a, b in problem.implies):
        return None
    if any(labels[a] != labels[b] for a, b in problem.equal):
        return None
    total = sum(high if labels[var] else low for var, (high, low) in problem.unary.items())
    for term in problem.shared:
        wanted = any(labels[reader] == term.label for reader in term.readers)
        if wanted and (term.value is None or labels[term.value] != term.label):
            total += term.cost
    return total


def solve(problem: Problem) -> dict[Var, bool]:
    """A labelling of least cost; among those, the one with the most values as preferred.

    ContradictionError where no labelling satisfies pins, implications and equalities together.
    """
    root = _union(problem.variables(), problem.equal)
    pins = _propagate(problem, root)
    network = _Network(pins, scale=len(root) + 1)
    for var, (high, low) in problem.unary.items():
        network.add_unary(root[var], high, low)
    for a, b in problem.implies:
        network.add_implication(root[a], root[b])
    for term in problem.shared:
        network.add_shared(term, root)
    wishes = Counter[tuple[Var, bool]]()
    for var, r in root.items():
        if r not in pins:
            wishes[r, problem.preferred.get(var, HIGH)] += 1
    labels = {**pins, **network.minimum(wishes)}
    return {var: labels[r] for var, r in root.items()}


def _union(variables: Iterable[Var], equal: Iterable[tuple[Var, Var]]) -> dict[Var, Var]:
    parent = {var: var for var in variables}

    def find(var: Var) -> Var:
        while parent[var] != var:
            parent[var] = parent[parent[var]]
            var = parent[var]
        return var

    for a, b in equal:
        parent[find(a)] = find(b)
    return {var: find(var) for var in parent}


def _propagate(problem: Problem, root: Mapping[Var, Var]) -> dict[Var, bool]:
    """Pins, and what implications make of them."""
    pins: dict[Var, bool] = {}
    forward: dict[Var, list[Var]] = {}
    backward: dict[Var, list[Var]] = {}
    for a, b in problem.implies:
        forward.setdefault(root[a], []).append(root[b])
        backward.setdefault(root[b], []).append(root[a])
    pending = [(root[var], label) for var, label in problem.pins.items()]
    while pending:
        var, label = pending.pop()
        if pins.setdefault(var, label) != label:
            raise ContradictionError(f"{var!r} is pinned to both labels; drop one of the constraints.")
        reached = forward if label is HIGH else backward
        pending += [(other, label) for other in reached.get(var, ()) if pins.get(other) is not label]
    return pins


class _Network:
    """The flow network over values that are not pinned; what pins decide is folded away while building."""

    def __init__(self, pins: Mapping[Var, bool], scale: int) -> None:
        self._pins = pins
        self._scale = scale
        self._high: dict[Var, int] = {}
        self._low: dict[Var, int] = {}
        #: (from, to, capacity or None for infinite)
        self._arcs: list[tuple[Var, Var, int | None]] = []
        self._gadgets = 0

    def add_unary(self, var: Var, high: int, low: int) -> None:
        if var not in self._pins:
            self._high[var] = self._high.get(var, 0) + high
            self._low[var] = self._low.get(var, 0) + low

    def add_implication(self, a: Var, b: Var) -> None:
        if a not in self._pins and b not in self._pins and a != b:
            self._arcs.append((a, b, None))

    def add_shared(self, term: Shared, root: Mapping[Var, Var]) -> None:
        value = None if term.value is None else root[term.value]
        readers = {root[reader] for reader in term.readers} - {value}
        always = any(self._pins.get(reader) == term.label for reader in readers)
        readers = {reader for reader in readers if reader not in self._pins}
        if value in self._pins:
            if self._pins[value] == term.label:
                return
            value = None
        if always:
            if value is not None:
                # some reader wants it whatever happens: the cost is the value's alone
                self.add_unary(value, *((term.cost, 0) if term.label is LOW else (0, term.cost)))
            return
        if not readers:
            return
        if value is None and len(readers) == 1:
            reader = next(iter(readers))
            self.add_unary(reader, *((term.cost, 0) if term.label is HIGH else (0, term.cost)))
            return
        self._add_gadget(term, value, readers)

    def _add_gadget(self, term: Shared, value: Var | None, readers: set[Var]) -> None:
        gadget: Var = ("gadget", self._gadgets)
        self._gadgets += 1
        capacity = term.cost * self._scale
        if term.label is LOW:
            self._arcs.append((_SOURCE if value is None else value, gadget, capacity))
            self._arcs += [(gadget, reader, None) for reader in readers]
        else:
            self._arcs.append((gadget, _SINK if value is None else value, capacity))
            self._arcs += [(reader, gadget, None) for reader in readers]

    def minimum(self, wishes: Mapping[tuple[Var, bool], int]) -> dict[Var, bool]:
        """Labels of the free values, one minimum cut per component; wishes: how many values prefer which label."""
        free = {var for var, _ in wishes}
        for var in free:
            # a cost of LOW is cut when var is on the sink side; one unit for each wish breaks ties
            high = self._high.get(var, 0) * self._scale + wishes.get((var, LOW), 0)
            low = self._low.get(var, 0) * self._scale + wishes.get((var, HIGH), 0)
            least = min(high, low)
            self._arcs.append((_SOURCE, var, low - least))
            self._arcs.append((var, _SINK, high - least))
        inner = [(a, b) for a, b, _ in self._arcs if a != _SOURCE and b != _SINK]
        component = _union({*free, *(var for arc in inner for var in arc)}, inner)
        capacities: dict[Var, dict[tuple[Var, Var], int | None]] = {}
        for a, b, capacity in self._arcs:
            if capacity != 0:
                arcs = capacities.setdefault(component[b if a == _SOURCE else a], {})
                before = arcs.get((a, b), 0)
                arcs[a, b] = None if capacity is None or before is None else before + capacity
        labels: dict[Var, bool] = {}
        for arcs in capacities.values():
            labels.update(_cut(arcs))
        return {var: labels.get(var, HIGH) for var in free}


def _cut(arcs: Mapping[tuple[Var, Var], int | None]) -> dict[Var, bool]:
    """One minimum cut. An arc without a capacity is infinite, to networkx as well."""
    nodes = {var for arc in arcs for var in arc} - {_SOURCE, _SINK}
    if not any(b == _SINK for _, b in arcs):
        return dict.fromkeys(nodes, HIGH)
    if not any(a == _SOURCE for a, _ in arcs):
        return dict.fromkeys(nodes, LOW)
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_edges_from((a, b, {} if c is None else {"capacity": c}) for (a, b), c in arcs.items())
    # of all minimum cuts networkx returns the one whose sink side is smallest
    _, (source_side, _) = nx.minimum_cut(graph, _SOURCE, _SINK, flow_func=nx.algorithms.flow.preflow_push)
    return {node: node in source_side for node in nodes}
