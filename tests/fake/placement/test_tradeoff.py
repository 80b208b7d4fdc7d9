"""Corners of the hull against all placements of small problems."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from amp_fx.placement.priced import Choice
from amp_fx.placement.tradeoff import bracket, hull

points = st.lists(
    st.tuples(st.integers(0, 50).map(float), st.integers(0, 50).map(float)), min_size=1, max_size=12
)


def solver(given_points: list[tuple[float, float]]):  # a closure
    def solve(weight: float) -> Choice[int]:
        def price(at: int) -> tuple[float, float]:
            time, sensitivity = given_points[at]
            return (
                (sensitivity, time) if weight == float("inf") else (time + weight * sensitivity, sensitivity)
            )

        best = min(range(len(given_points)), key=price)
        return Choice(*given_points[best], best)

    return solve


def corners(given_points: list[tuple[float, float]]) -> set[tuple[float, float]]:
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
def test_the_hull_is_every_point_that_some_weight_prefers(given_points: list[tuple[float, float]]) -> None:
    found = {(choice.time, choice.sensitivity) for choice in hull(solver(given_points), 100)}
    assert found == corners(given_points)


@settings(max_examples=200, deadline=None)
@given(points, st.integers(0, 50))
def test_the_cheapest_corner_within_a_limit_is_found(
    given_points: list[tuple[float, float]], limit: int
) -> None:
    beyond, found = bracket(solver(given_points), limit)
    assert beyond is None or beyond.sensitivity > limit
    fitting = [corner for corner in corners(given_points) if corner[1] <= limit]
    if fitting:
        assert (found.time, found.sensitivity) == min(fitting)
    else:
        assert found.sensitivity == min(sensitivity for _, sensitivity in given_points)


def test_a_hull_of_many_corners_is_cut_short() -> None:
    given_points = [(float(x), (20 - x) ** 2.0) for x in range(20)]
    found = hull(solver(given_points), 5)
    assert len(found) == 5
    assert {found[0].time, found[-1].time} == {0.0, 19.0}
