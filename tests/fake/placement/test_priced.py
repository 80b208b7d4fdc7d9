"""Cuts with sensitivity, and the cheapest within a limit of it, against brute force. The second cut is the example."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
import torch

from amp_fx.placement import tradeoff
from amp_fx.placement.cut import HIGH, LOW, Problem, Shared, Var
from amp_fx.placement.level_cost import LevelCost, copy_traffic
from amp_fx.placement.priced import Priced, SensitivityTerm
from amp_fx.placement.tradeoff import within
from amp_fx.policy.levels import LEVELS
from amp_fx.targets import find_target

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
    rest = dict.fromkeys(problem.unary, HIGH)
    every = itertools.product((HIGH, LOW), repeat=len(free))
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
        (labels,) = found.placement
        assert found.sensitivity <= limit * (1 + 1e-9)
        assert (found.time, found.sensitivity) == (priced.time(labels), priced.sensitivity(labels))
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
    monkeypatch.setattr(tradeoff, "_HALVES", 0)
    # both gain as much for their sensitivity: first both are given up, then the small one comes back
    problem, terms = Problem({"one": (2, 0), "two": (20, 0)}), [SensitivityTerm(1.0, LOW, "one")]
    found = within([Priced(problem, [*terms, SensitivityTerm(10.0, LOW, "two")])], 6.0)
    assert found.placement == [{"one": LOW, "two": HIGH}]


def test_a_known_placement_that_breaks_a_pin_is_not_taken() -> None:
    problem = Problem({"mm": (10, 0), "add": (5, 0), "mul": (5, 0)}, pins={"mm": HIGH})
    priced = Priced(problem, [SensitivityTerm(1.0, LOW, "add"), SensitivityTerm(1.0, LOW, "mul")])
    (labels,) = within([priced], 1.5, [{"mm": LOW, "add": LOW}]).placement
    assert [labels[name] for name in ("mm", "add", "mul")].count(LOW) == 1
    assert labels["mm"] is HIGH


def test_what_takes_as_long_stays_in_the_low_dtype_and_a_copy_is_paid_for_once() -> None:
    def chosen(problem: Problem) -> set[Var]:
        return {m for m, label in Priced(problem).choose(0.0).placement.items() if label is LOW}

    for copy, expected in ((6, set()), (5, {"mm"})):
        assert chosen(Problem({"mm": (10, 4)}, shared=[Shared(copy, LOW, ("mm",))])) == expected
    readers = ("q", "k", "v")
    apart = [Shared(6, LOW, (name,)) for name in readers]
    assert not chosen(Problem(dict.fromkeys(readers, (10, 5)), shared=apart))
    assert chosen(Problem(dict.fromkeys(readers, (10, 5)), shared=[Shared(6, LOW, readers)])) == {*readers}
