"""The search for the cheapest placement within a limit of sensitivity, where a problem is large."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from amp_fx.precision.placement import priced, tradeoff
from amp_fx.precision.placement.cut import HIGH, LOW, Problem, Shared, solve
from amp_fx.precision.placement.priced import Priced, SensitivityTerm
from amp_fx.precision.placement.tradeoff import within


def test_a_large_problem_is_solved_to_a_thousandth_of_what_there_is_to_gain_in_fewer_cuts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, cuts, original = random.Random(0), [0], tradeoff.choose_all

    def counted(*given: Any) -> Any:
        cuts[-1] += 1
        return original(*given)

    monkeypatch.setattr(tradeoff, "choose_all", counted)
    names = [f"m{at}" for at in range(80)]
    between = [
        Shared(draw.randint(1, 800), draw.choice((LOW, HIGH)), (reader,), value)
        for value, reader in itertools.pairwise(names)
    ]
    problem = Problem({name: (draw.randint(20, 4000), 0) for name in names}, {}, between, [])
    terms = [SensitivityTerm(10 ** draw.uniform(-6, -2), LOW, name) for name in names]
    part, limit, found = Priced(problem, terms), sum(term.sensitivity for term in terms) / 10, []
    for large in (tradeoff.LARGE, 10**9):
        monkeypatch.setattr(tradeoff, "LARGE", large)
        found.append(within([part], limit).time)
        cuts.append(0)
    gain = part.choose(math.inf).time - part.choose(0.0).time
    assert found[0] - found[1] <= tradeoff.NEAR * gain
    assert cuts[0] < 0.7 * cuts[1]


def test_what_shares_no_term_is_solved_apart_and_once_for_weights_between_two_that_agree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draw, cuts = random.Random(1), [0]
    names = [f"m{at}" for at in range(24)]
    # chains of four, tied by copies or by what is rounded between
    pairs = [(a, b) for at, (a, b) in enumerate(itertools.pairwise(names)) if (at + 1) % 4]
    shared = [Shared(draw.randint(1, 900), LOW, (a,), b) for a, b in draw.sample(pairs, len(pairs) // 2)]
    ties: list[tuple[Any, Any]] = [(a, b) for a, b in pairs if draw.random() < 0.2]
    problem = Problem({name: (draw.randint(20, 4000), 100) for name in names}, {}, shared, ties)
    terms = [SensitivityTerm(10 ** draw.uniform(-6, -2), LOW, name) for name in names]
    terms += [SensitivityTerm(10 ** draw.uniform(-6, -2), LOW, a, b) for a, b in pairs]
    part, whole = Priced(problem, terms), Priced(problem, terms)
    weights = [10 ** draw.uniform(3, 9) for _ in range(40)]
    given = [{}, {"m3": HIGH, "m17": LOW, "m18": LOW}]
    wanted = [[solve(whole.problem(weight, pins)) for weight in weights] for pins in given]

    def counted(small: Problem) -> Any:
        cuts[0] += 1
        assert len(small.variables()) <= 4
        return solve(small)

    monkeypatch.setattr(priced, "solve", counted)
    for pins, sides in zip(given, wanted, strict=True):
        assert [part.choose(weight, pins).placement for weight in weights] == sides
    # two solves of an island a piece of its curve, where 40 weights and 6 islands, twice, are 480
    assert cuts[0] < 200
    before = cuts[0]
    for weight in weights:
        part.choose(weight)
    assert cuts[0] == before
