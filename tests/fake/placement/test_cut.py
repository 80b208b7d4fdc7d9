"""The minimum cut, with sensitivity and without, against brute force; and how large its networks are."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Hashable, Mapping

import networkx as nx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amp_fx.instruments.targets import find_target
from amp_fx.precision.placement import tradeoff
from amp_fx.precision.placement.cut import HIGH, LOW, ContradictionError, Problem, Shared, Var, solve
from amp_fx.precision.placement.level_cost import LevelCost, copy_traffic
from amp_fx.precision.placement.priced import Choice, Priced, SensitivityTerm
from amp_fx.precision.placement.tradeoff import bracket, hull, within
from amp_fx.precision.policy.levels import LEVELS

VALUES = 7
values = st.integers(0, VALUES - 1)
sides = st.sampled_from([HIGH, LOW])
costs = st.integers(0, 6)
readers = st.lists(values, min_size=1, max_size=4, unique=True).map(tuple)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Random placements: unary costs, pins, shared conversions and copies, slots, groups, implications."""
    problem = Problem(
        pins=draw(st.dictionaries(values, sides, max_size=3)),
        shared=draw(st.lists(st.builds(Shared, costs, sides, readers, st.none() | values), max_size=12)),
        implies=draw(st.lists(st.tuples(values, values), max_size=3)),
        preferred=draw(st.dictionaries(values, sides)),
    )
    # equal sides
    for a, b in draw(st.lists(st.tuples(values, values), max_size=2)):
        problem.implies += [(a, b), (b, a)]
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
    """How many values have the side that they prefer."""
    return sum(side == problem.preferred.get(value, HIGH) for value, side in found.items())


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
        problem.shared += [Shared(rng.randrange(100), side, readers, value) for side in (HIGH, LOW)]
    with monkeypatch.context() as patch:
        patch.setattr(nx, "minimum_cut", lambda graph, *ends: arcs.append(graph.size()) or cut(graph, *ends))
        solve(problem)
    return sum(arcs)


def test_networks_grow_with_the_graph_and_not_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 500 < arcs_of_a_graph(500, monkeypatch) < arcs_of_a_graph(1000, monkeypatch) < 8 * 1000


# --- cuts with sensitivity, and the cheapest within a limit of it ---

Draw = Callable[[random.Random], Problem]


def anything(draw: random.Random) -> Problem:
    """Any times, any readers."""
    count = draw.randint(1, 7)
    problem = Problem({m: (draw.randint(0, 40), draw.randint(0, 40)) for m in range(count)})
    for _ in range(draw.randint(1, 5)):
        readers = tuple(draw.sample(range(count), draw.randint(1, min(count, 4))))
        problem.shared.append(Shared(draw.randint(0, 30), HIGH, readers))
        for _ in range(draw.randint(1, 3)):
            some = tuple(draw.sample(readers, draw.randint(1, len(readers))))
            problem.shared.append(Shared(draw.randint(0, 30), LOW, some))
    return problem


def linears(draw: random.Random) -> Problem:
    """Forward, gradient of the input and gradient of the weight of linears that may share their input, by an H100."""
    cost = LevelCost.of(find_target("cuda:h100").profile, torch.bfloat16, LEVELS["rowwise"])
    assert cost is not None
    problem = Problem()
    by_row, tokens = draw.random() < 0.5, draw.choice((512, 4096, 16384))
    inner = draw.choice((512, 1024, 4096))
    inputs = list[int]()

    def value(elements: int, stored: bool, itemsize: int, *readings: tuple[int, bool]) -> None:
        readers = tuple(reader for reader, _ in readings)
        problem.shared.append(Shared(0 if stored else cost.moving(2 * elements), HIGH, readers))
        if not by_row:
            whole = cost.moving(*copy_traffic(elements, itemsize, in_rows=False))
            problem.shared.append(Shared(whole, LOW, readers))
        for reader, rows in readings:
            if by_row or not rows:
                traffic = (elements * (1 + itemsize), 1)
                if by_row:
                    traffic = copy_traffic(elements, itemsize, in_rows=rows)
                problem.shared.append(Shared(cost.moving(*traffic), LOW, (reader,)))

    for number in range(draw.randint(1, 2)):
        outer = draw.choice((256, 1024, 4096, 14336))
        forward, grad_input, grad_weight = range(3 * number, 3 * number + 3)
        for matmul, elements in (
            (forward, tokens * inner + inner * outer),
            (grad_input, tokens * outer + inner * outer),
            (grad_weight, tokens * outer + tokens * inner),
        ):
            problem.add_unary(matmul, *cost.matmul(2 * tokens * inner * outer, elements, 2))
        value(inner * outer, False, 4, (forward, True), (grad_input, False))
        value(tokens * outer, draw.random() < 0.5, 2, (grad_input, True), (grad_weight, False))
        inputs += [forward, grad_weight]
    value(tokens * inner, False, 2, *((m, m % 3 == 0) for m in inputs))
    return problem


def choices(problem: Problem, free: list[Var]) -> list[dict[Var, bool]]:
    """All that could be chosen."""
    rest, every = dict.fromkeys(problem.unary, HIGH), itertools.product((HIGH, LOW), repeat=len(free))
    return [{**rest, **dict(zip(free, some, strict=True))} for some in every]


def with_sensitivity(problem: Problem, draw: random.Random) -> tuple[Priced, dict[Var, float]]:
    """Sensitivity for each variable; some are infinite."""
    some = (0.0, 1e-6, 3e-5, 1e-3, math.inf)
    sensitivities = {m: draw.choice((draw.random(), draw.choice(some))) for m in problem.unary}
    terms = [SensitivityTerm(sensitivity, LOW, m) for m, sensitivity in sensitivities.items()]
    return Priced(problem, terms), sensitivities


@pytest.mark.parametrize("draw_one", [anything, linears])
def test_with_sensitivity_the_cut_is_as_good_as_the_best_of_all_choices(draw_one: Draw) -> None:
    draw, partly = random.Random(0), 0
    for _ in range(400 if draw_one is anything else 200):
        problem = draw_one(draw)
        priced, sensitivities = with_sensitivity(problem, draw)
        weight = draw.choice((0.0, 10.0, 1e3, 1e7, 1e9, math.inf))
        found = priced.choose(weight)
        # an infinite sensitivity is never done, and with an infinite weight none is
        free = [m for m, each in sensitivities.items() if not each or max(each, weight) < math.inf]
        price = 0.0 if math.isinf(weight) else weight
        costs = (
            problem.cost(each) + sum(round(sensitivities[m] * price) for m in free if each[m] is LOW)
            for each in choices(problem, free)
        )
        chosen = [m for m in problem.unary if found.placement[m] is LOW]
        assert {*chosen} <= {*free}
        assert found.time == problem.cost(found.placement)
        assert found.time + sum(round(sensitivities[m] * price) for m in chosen) == min(costs)
        assert found.sensitivity == sum(sensitivities[m] for m in chosen)
        partly += 0 < len(chosen) < len(problem.unary)
    assert partly > 30


@pytest.mark.parametrize("draw_one", [anything, linears])
def test_within_a_limit_of_sensitivity_the_cheapest_of_all_choices_is_found(draw_one: Draw) -> None:
    draw, partly = random.Random(1), 0
    for _ in range(200):
        problem = draw_one(draw)
        priced, sensitivities = with_sensitivity(problem, draw)
        free = [m for m, sensitivity in sensitivities.items() if math.isfinite(sensitivity)]
        limit = draw.random() * sum(sensitivities[m] for m in free)
        found = within([priced], limit)
        (sides,) = found.placement
        assert found.sensitivity <= limit * (1 + 1e-9)
        assert (found.time, found.sensitivity) == (priced.time(sides), priced.sensitivity(sides))
        best = min(priced.time(each) for each in choices(problem, free) if priced.sensitivity(each) <= limit)
        assert found.time == best
        partly += best < priced.time({})
    assert partly > 30


def test_several_graphs_share_one_limit() -> None:
    parts = [
        Priced(Problem({"mm": (gain, 0)}), [SensitivityTerm(sensitivity, LOW, "mm")])
        for gain, sensitivity in ((10, 3.0), (9, 1.0), (1, 1.0))
    ]
    for limit, expected in ((0.5, 0), (1.0, 0b010), (2.0, 0b110), (4.0, 0b011), (5.0, 0b111)):
        chosen = within(parts, limit).placement
        assert sum((each["mm"] is LOW) << at for at, each in enumerate(chosen)) == expected


def test_without_halves_what_the_limit_leaves_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tradeoff, "HALVES", 0)
    # both gain as much for their sensitivity: first both are given up, then the small one comes back
    terms = [SensitivityTerm(1.0, LOW, "one"), SensitivityTerm(10.0, LOW, "two")]
    found = within([Priced(Problem({"one": (2, 0), "two": (20, 0)}), terms)], 6.0)
    assert found.placement == [{"one": LOW, "two": HIGH}]


def test_a_known_placement_that_breaks_a_pin_is_not_taken() -> None:
    problem = Problem({"mm": (10, 0), "add": (5, 0), "mul": (5, 0)}, pins={"mm": HIGH})
    terms = [SensitivityTerm(1.0, LOW, name) for name in ("add", "mul")]
    (sides,) = within([Priced(problem, terms)], 1.5, [{"mm": LOW, "add": LOW}]).placement
    assert [sides[name] for name in ("mm", "add", "mul")].count(LOW) == 1
    assert sides["mm"] is HIGH


def test_what_takes_as_long_stays_in_the_low_dtype_and_a_copy_is_paid_for_once() -> None:
    def chosen(problem: Problem) -> set[Var]:
        return {m for m, side in Priced(problem).choose(0.0).placement.items() if side is LOW}

    for copy, expected in ((6, set()), (5, {"mm"})):
        assert chosen(Problem({"mm": (10, 4)}, shared=[Shared(copy, LOW, ("mm",))])) == expected
    readers = ("q", "k", "v")
    apart = [Shared(6, LOW, (name,)) for name in readers]
    assert not chosen(Problem(dict.fromkeys(readers, (10, 5)), shared=apart))
    assert chosen(Problem(dict.fromkeys(readers, (10, 5)), shared=[Shared(6, LOW, readers)])) == {*readers}


# --- corners of the hull against all placements of small problems ---

Points = list[tuple[float, float]]
number = st.integers(0, 50).map(float)
points = st.lists(st.tuples(number, number), min_size=1, max_size=12)


def solver(given_points: Points):  # a closure
    def price(point: tuple[float, float], weight: float) -> tuple[float, float]:
        time, sensitivity = point
        return (sensitivity, time) if weight == float("inf") else (time + weight * sensitivity, sensitivity)

    def solve(weight: float) -> Choice[int]:
        best = min(given_points, key=lambda point: price(point, weight))
        return Choice(*best, given_points.index(best))

    return solve


def corners(given_points: Points) -> set[tuple[float, float]]:
    """Points that are the best for some weight."""
    solve = solver(given_points)
    slopes = {
        (b[0] - a[0]) / (a[1] - b[1])
        for a, b in itertools.permutations(given_points, 2)
        if a[1] > b[1] and b[0] > a[0]
    }
    weights = sorted(slopes)
    between = [(a + b) / 2 for a, b in itertools.pairwise(weights)]
    found = [solve(weight) for weight in (0.0, *between, *(2 * w + 1 for w in weights[-1:]), float("inf"))]
    return {(choice.time, choice.sensitivity) for choice in found}


@settings(max_examples=200, deadline=None)
@given(points)
def test_the_hull_is_every_point_that_some_weight_prefers(given_points: Points) -> None:
    found = {(choice.time, choice.sensitivity) for choice in hull(solver(given_points), 100)}
    assert found == corners(given_points)


@settings(max_examples=200, deadline=None)
@given(points, st.integers(0, 50))
def test_the_cheapest_corner_within_a_limit_is_found(given_points: Points, limit: int) -> None:
    beyond, found = bracket(solver(given_points), limit)
    assert beyond is None or beyond.sensitivity > limit
    fitting = [corner for corner in corners(given_points) if corner[1] <= limit]
    assert not fitting or (found.time, found.sensitivity) == min(fitting)
    assert fitting or found.sensitivity == min(sensitivity for _, sensitivity in given_points)


def test_a_hull_of_many_corners_is_cut_short() -> None:
    given_points = [(float(x), (20 - x) ** 2.0) for x in range(20)]
    found = hull(solver(given_points), 5)
    assert len(found) == 5
    assert {found[0].time, found[-1].time} == {0.0, 19.0}
