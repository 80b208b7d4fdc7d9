"""The second cut: exact against brute force, and what its terms say of a device."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch

from amp_fx.placement.cut import Var
from amp_fx.placement.fp8 import Copy, Fp8Cost, Times, Traffic, Value, choose, copy_traffic
from amp_fx.placement.fp8_choice import Fp8Problem, PricedFp8, within
from amp_fx.targets import TARGETS, find_target

Instance = tuple[dict[Var, Times], list[Value]]


def total(chosen: frozenset[Var], matmuls: dict[Var, Times], values: Sequence[Value]) -> int:
    """What a choice takes, written down independently of the cut."""
    time = sum(times.fp8 if matmul in chosen else times.low for matmul, times in matmuls.items())
    for value in values:
        if any(reader not in chosen for reader in value.readers):
            time += value.low
        for copy in value.copies:
            if any(reader in chosen for reader in copy.readers):
                time += copy.time
    return time


def anything(draw: random.Random) -> Instance:
    """Any times, any readers."""
    count = draw.randint(1, 7)
    matmuls: dict[Var, Times] = {m: Times(draw.randint(0, 40), draw.randint(0, 40)) for m in range(count)}
    values = []
    for _ in range(draw.randint(1, 5)):
        readers = tuple(draw.sample(range(count), draw.randint(1, min(count, 4))))
        copies = tuple(
            Copy(draw.randint(0, 30), tuple(draw.sample(readers, draw.randint(1, len(readers)))))
            for _ in range(draw.randint(1, 3))
        )
        values.append(Value(draw.randint(0, 30), readers, copies))
    return matmuls, values


def linears(draw: random.Random) -> Instance:
    """Forward, gradient of the input and gradient of the weight of linears that may share their input, by an H100."""
    cost = Fp8Cost.of(find_target("cuda:h100").profile, torch.bfloat16)
    assert cost is not None
    matmuls: dict[Var, Times] = {}
    values: list[Value] = []
    by_row, tokens, inner = (
        draw.random() < 0.5,
        draw.choice((512, 4096, 16384)),
        draw.choice((512, 1024, 4096)),
    )
    inputs = list[int]()

    def value(elements: int, stored: bool, itemsize: int, *readings: tuple[int, bool]) -> Value:
        readers = tuple(reader for reader, _ in readings)
        if by_row:
            copies = [Copy(cost.fp8_copy(elements, itemsize, in_rows=rows), (r,)) for r, rows in readings]
        else:
            copies = [Copy(cost.fp8_copy(elements, itemsize, in_rows=False), readers)]
            copies += [Copy(cost.transposition(elements, itemsize), (r,)) for r, rows in readings if not rows]
        return Value(0 if stored else cost.low_copy(elements, 2), readers, tuple(copies))

    for number in range(draw.randint(1, 2)):
        outer = draw.choice((256, 1024, 4096, 14336))
        forward, grad_input, grad_weight = range(3 * number, 3 * number + 3)
        for matmul, elements in (
            (forward, tokens * inner + inner * outer),
            (grad_input, tokens * outer + inner * outer),
            (grad_weight, tokens * outer + tokens * inner),
        ):
            matmuls[matmul] = cost.matmul(2 * tokens * inner * outer, elements, 2)
        values.append(value(inner * outer, False, 4, (forward, True), (grad_input, False)))
        values.append(value(tokens * outer, draw.random() < 0.5, 2, (grad_input, True), (grad_weight, False)))
        inputs += [forward, grad_weight]
    values.append(value(tokens * inner, False, 2, *((m, m % 3 == 0) for m in inputs)))
    return matmuls, values


@pytest.mark.parametrize("draw_one", [anything, linears])
def test_the_cut_is_as_good_as_the_best_of_all_choices(draw_one: Callable[[random.Random], Instance]) -> None:
    draw, partly = random.Random(0), 0
    for _ in range(3000 if draw_one is anything else 600):
        matmuls, values = draw_one(draw)
        chosen = choose(matmuls, values)
        every = [
            frozenset(some) for n in range(len(matmuls) + 1) for some in itertools.combinations(matmuls, n)
        ]
        assert total(chosen, matmuls, values) == min(total(one, matmuls, values) for one in every)
        partly += 0 < len(chosen) < len(matmuls)
    assert partly > 50


def with_harm(draw_one: Callable[[random.Random], Instance], draw: random.Random) -> PricedFp8:
    """An instance with a harm for most of its matmuls."""
    matmuls, values = draw_one(draw)
    some = (0.0, 1e-6, 3e-5, 1e-3, math.inf)
    harms = {m: draw.choice((draw.random(), draw.choice(some))) for m in matmuls if draw.random() < 0.95}
    return PricedFp8(Fp8Problem(matmuls, tuple(values)), harms)


def choices(priced: PricedFp8) -> list[frozenset[Var]]:
    """All that could be chosen without infinite harm."""
    free = [m for m in priced.problem.matmuls if math.isfinite(priced.harms.get(m, math.inf))]
    return [frozenset(some) for n in range(len(free) + 1) for some in itertools.combinations(free, n)]


@pytest.mark.parametrize("draw_one", [anything, linears])
def test_with_harm_the_cut_is_as_good_as_the_best_of_all_choices(
    draw_one: Callable[[random.Random], Instance],
) -> None:
    draw, partly = random.Random(0), 0
    for _ in range(600 if draw_one is anything else 200):
        priced = with_harm(draw_one, draw)
        problem = priced.problem
        weight = draw.choice((0.0, 10.0, 1e3, 1e7, 1e9, math.inf))
        chosen = priced.choose(weight)
        assert problem.time(chosen) == total(chosen, dict(problem.matmuls), problem.values)
        every = choices(priced)
        assert chosen in every
        if math.isinf(weight):
            assert priced.harm(chosen) == 0
            every, price = [each for each in every if not priced.harm(each)], 0.0
        else:
            price = weight

        def cost(
            each: frozenset[Var],
            problem: Fp8Problem = problem,
            priced: PricedFp8 = priced,
            price: float = price,
        ) -> int:
            return problem.time(each) + sum(round(priced.harms[m] * price) for m in each)

        assert cost(chosen) == min(map(cost, every))
        partly += 0 < len(chosen) < len(problem.matmuls)
    assert partly > 30


@pytest.mark.parametrize("draw_one", [anything, linears])
def test_within_a_limit_of_harm_nearly_all_is_gained_that_could_be(
    draw_one: Callable[[random.Random], Instance],
) -> None:
    draw = random.Random(1)
    shares = []
    for _ in range(200):
        priced = with_harm(draw_one, draw)
        limit = draw.random() * sum(harm for harm in priced.harms.values() if math.isfinite(harm))
        found = within([priced], limit)
        assert found.harm <= limit * (1 + 1e-9)
        assert (found.time, found.harm) == (
            priced.problem.time(found.placement[0]),
            priced.harm(found.placement[0]),
        )
        nothing = priced.problem.time(())
        best = min(priced.problem.time(each) for each in choices(priced) if priced.harm(each) <= limit)
        if best < nothing:
            shares.append((nothing - found.time) / (nothing - best))
    assert len(shares) > 30
    assert sum(shares) / len(shares) > 0.96


def test_several_graphs_share_one_limit() -> None:
    parts = [
        PricedFp8(Fp8Problem({"mm": Times(gain, 0)}, ()), {"mm": harm})
        for gain, harm in ((10, 3.0), (9, 1.0), (1, 1.0))
    ]
    for limit, expected in ((0.5, 0), (1.0, 0b010), (2.0, 0b110), (4.0, 0b011), (5.0, 0b111)):
        chosen = within(parts, limit).placement
        assert sum(bool(each) << at for at, each in enumerate(chosen)) == expected


def test_a_matmul_in_fp32_reads_no_copies() -> None:
    copies = Copy(6, ("a", "b")), Copy(2, ("b",))
    problem = Fp8Problem({"a": Times(10, 5), "b": Times(10, 5)}, (Value(4, ("a", "b"), copies),))
    assert problem.time({"a"}) == 5 + 10 + 4 + 6
    alone = problem.only({"a"})
    assert alone.time(()) == 10 + 4
    assert alone.time({"a"}) == 5 + 6
    assert problem.only(()) == Fp8Problem({}, ())


def test_what_takes_as_long_in_fp8_stays_low() -> None:
    assert choose({"mm": Times(10, 4)}, [Value(0, ("mm",), (Copy(6, ("mm",)),))]) == frozenset()
    assert choose({"mm": Times(10, 4)}, [Value(0, ("mm",), (Copy(5, ("mm",)),))]) == {"mm"}


def test_a_copy_is_paid_for_once_however_many_read_it() -> None:
    readers = ("q", "k", "v")
    matmuls: dict[Var, Times] = {name: Times(10, 5) for name in readers}
    apart = [Value(0, (name,), (Copy(6, (name,)),)) for name in readers]
    assert choose(matmuls, apart) == frozenset()
    assert choose(matmuls, [Value(0, readers, (Copy(6, readers),))]) == set(readers)


def test_a_low_copy_that_nobody_needs_is_not_made() -> None:
    copies = (Copy(6, ("mm",)),)
    assert choose({"mm": Times(10, 5)}, [Value(2, ("mm",), copies)]) == {"mm"}
    assert choose({"mm": Times(10, 5)}, [Value(0, ("mm",), copies)]) == frozenset()


@pytest.mark.parametrize(
    ("name", "has"),
    [
        ("a100", False),
        ("rtx3090", False),
        ("rtx4090", True),
        ("l4", True),
        ("h100", True),
        ("h200", True),
        ("b200", True),
    ],
)
def test_devices_have_fp8_by_their_published_rates(name: str, has: bool) -> None:
    profile = TARGETS[f"cuda:{name}"].profile
    cost = Fp8Cost.of(profile, torch.bfloat16)
    assert (cost is not None) is has
    assert cost is None or 1.9 < cost.fp8 / cost.low < 2.1


def linear(size: int, tokens: int = 8192, weight: int = 4) -> frozenset[Var]:
    """What an H100 runs in fp8 of a square linear whose input is a fused value; bytes of an element of its weight."""
    cost = Fp8Cost.of(find_target("cuda:h100").profile, torch.bfloat16)
    assert cost is not None
    times = cost.matmul(2 * tokens * size * size, tokens * size + size * size, 2)
    low = 0 if weight == 2 else cost.cast(size * size, 6)
    x, w = (
        Value(low, ("mm",), (Copy(cost.fp8_copy(elements, itemsize, in_rows=True), ("mm",)),))
        for low, elements, itemsize in ((0, tokens * size, 2), (low, size * size, weight))
    )
    return choose({"mm": times}, [x, w])


def test_copies_by_columns_and_of_all_take_three_kernels_and_read_twice() -> None:
    elements = 4096 * 4096
    assert copy_traffic(elements, 2, in_rows=True) == Traffic(3 * elements, 1)
    assert copy_traffic(elements, 4, in_rows=False) == Traffic(9 * elements, 3)
    assert copy_traffic(elements, 2, in_rows=True, block=32) == Traffic(3 * elements + elements // 32, 1)
    assert copy_traffic(elements, 2, in_rows=False, block=32) == Traffic(
        5 * elements + elements // 32 * 13, 3
    )


def test_small_linears_stay_low_and_large_ones_go() -> None:
    assert [bool(linear(size)) for size in (128, 256, 4096, 8192)] == [False, False, True, True]


def test_a_weight_that_is_low_in_memory_is_not_converted_for_few_tokens() -> None:
    assert not linear(4096, tokens=16, weight=2)
    assert linear(4096, tokens=8192, weight=2)
