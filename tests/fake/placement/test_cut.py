"""The minimum cut against brute force, and how large its networks are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Hashable, Mapping

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_fx.placement.cut import HIGH, LOW, ContradictionError, Problem, Shared, solve

VALUES = 7
values = st.integers(0, VALUES - 1)
labels = st.sampled_from([HIGH, LOW])
costs = st.integers(0, 6)
readers = st.lists(values, min_size=1, max_size=4, unique=True).map(tuple)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Random placements: unary costs, pins, shared conversions and copies, slots, groups, implications."""
    problem = Problem(
        pins=draw(st.dictionaries(values, labels, max_size=3)),
        shared=draw(st.lists(st.builds(Shared, costs, labels, readers, st.none() | values), max_size=12)),
        implies=draw(st.lists(st.tuples(values, values), max_size=3)),
        equal=draw(st.lists(st.tuples(values, values), max_size=2)),
        preferred=draw(st.dictionaries(values, labels)),
    )
    for value in range(VALUES):
        problem.add_unary(value, draw(costs), draw(costs))
    return problem


def brute_force(problem: Problem) -> tuple[int, int] | None:
    """(least cost, most values as preferred at that cost), or None where nothing satisfies the constraints."""
    best = None
    for choice in itertools.product([HIGH, LOW], repeat=VALUES):
        found: dict[Hashable, bool] = dict(enumerate(choice))
        if problem.allows(found):
            cost, wishes = problem.cost(found), granted(problem, found)
            best = min(best or (cost, -wishes), (cost, -wishes))
    return None if best is None else (best[0], -best[1])


def granted(problem: Problem, found: Mapping[Hashable, bool]) -> int:
    """How many values have the label that they prefer."""
    return sum(label == problem.preferred.get(value, HIGH) for value, label in found.items())


@settings(max_examples=200, deadline=None)
@given(problems())
def test_the_cut_is_the_brute_force_optimum_and_ties_go_to_what_is_preferred(problem: Problem) -> None:
    best = brute_force(problem)
    if best is None:
        with pytest.raises(ContradictionError):
            solve(problem)
        return
    found = solve(problem)
    assert problem.allows(found)
    assert (problem.cost(found), granted(problem, found)) == best


@settings(max_examples=100, deadline=None)
@given(problems(), st.randoms(use_true_random=False))
def test_the_cut_does_not_depend_on_the_order_of_the_terms(problem: Problem, rng: random.Random) -> None:
    shuffled = Problem(
        unary=dict(rng.sample(list(problem.unary.items()), len(problem.unary))),
        pins=dict(reversed(problem.pins.items())),
        shared=rng.sample(problem.shared, len(problem.shared)),
        implies=rng.sample(problem.implies, len(problem.implies)),
        equal=[(b, a) for a, b in problem.equal],
        preferred=dict(reversed(problem.preferred.items())),
    )
    try:
        expected = solve(problem)
    except ContradictionError:
        with pytest.raises(ContradictionError):
            solve(shuffled)
        return
    assert solve(shuffled) == expected


def test_a_conversion_shared_by_two_readers_is_paid_once() -> None:
    # the undirected single-gadget network charges this one twice and keeps both readers in fp32
    problem = Problem(pins={"x": HIGH}, shared=[Shared(3, LOW, ("a", "b"), "x")])
    problem.add_unary("a", 2, 0)
    problem.add_unary("b", 2, 0)
    assert solve(problem) == {"x": HIGH, "a": LOW, "b": LOW}


def test_a_contradiction_says_which_value_it_is_about() -> None:
    with pytest.raises(ContradictionError):
        solve(Problem(pins={"y": HIGH, "x": LOW}, implies=[("y", "x")]))


def arcs_of_a_graph(size: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Arcs of all networks that are cut for a problem of the density that a graph of ``size`` calls gives."""
    rng, problem, arcs, cut = random.Random(0), Problem(), list[int](), nx.minimum_cut
    for value in range(size):
        problem.add_unary(value, rng.randrange(100), rng.randrange(100))
        if rng.random() < 0.3:
            problem.pins[value] = rng.random() < 0.5
        readers = tuple(min(size - 1, value + rng.randrange(1, 8)) for _ in range(rng.randrange(1, 4)))
        problem.shared += [Shared(rng.randrange(100), label, readers, value) for label in (HIGH, LOW)]
    with monkeypatch.context() as patch:
        patch.setattr(nx, "minimum_cut", lambda graph, *ends: arcs.append(graph.size()) or cut(graph, *ends))
        solve(problem)
    return sum(arcs)


def test_networks_grow_with_the_graph_and_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 500 < arcs_of_a_graph(500, monkeypatch) < arcs_of_a_graph(1000, monkeypatch) < 8 * 1000
