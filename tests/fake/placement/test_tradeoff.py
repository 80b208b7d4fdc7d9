"""The search for the cheapest placement within a limit of sensitivity, where a problem is large."""

from __future__ import annotations

import itertools
import math
import random
from typing import Any

import pytest

from amp_fx.precision.placement import tradeoff
from amp_fx.precision.placement.cut import HIGH, LOW, Problem, Shared
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
