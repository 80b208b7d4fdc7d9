"""Which values are kept in fewer bits: the best choice, beside all choices there are."""

from __future__ import annotations

import itertools
import random

import pytest

from amp_fx.precision.placement.kept import OPERAND, OTHER, KeptValue, choose, least_bytes


def some_values(seed: int) -> list[KeptValue]:
    draw, values = random.Random(seed), []
    for at in range(draw.randint(2, 9)):
        size = 4 * draw.randint(1, 40)
        eight, four = draw.choice([(size, size), (size // 2, size // 4), (size // 4, size // 4)])
        error = draw.choice([OPERAND, OTHER] if four < eight else [0.0, OPERAND, OTHER])
        values.append(KeptValue(f"v{at}", size, eight, four, error))
    return values


def size_of(values: list[KeptValue], bits: dict[str, int]) -> int:
    return sum({8: value.eight, 4: value.four}.get(bits.get(value.name, 0), value.size) for value in values)


def error_of(values: list[KeptValue], bits: dict[str, int], width: int) -> float:
    return sum(value.error for value in values if bits.get(value.name) == width)


@pytest.mark.parametrize("seed", range(60))
def test_the_values_in_eight_bits_have_the_least_error_of_all_choices(seed: int) -> None:
    values = some_values(seed)
    can = [value for value in values if value.eight < value.size]
    subsets = [
        dict.fromkeys((value.name for value in some), 8)
        for count in range(len(can) + 1)
        for some in itertools.combinations(can, count)
    ]
    for most in {size_of(values, subset) for subset in subsets}:
        bits = choose(values, most)
        assert bits is not None
        assert size_of(values, bits) <= most
        fitting = [error_of(values, subset, 8) for subset in subsets if size_of(values, subset) <= most]
        assert error_of(values, bits, 8) == min(fitting)


@pytest.mark.parametrize("seed", range(60))
def test_the_values_in_four_bits_have_the_least_error_where_eight_bits_are_too_many(seed: int) -> None:
    values = some_values(seed)
    fewest, in_eight = least_bytes(values, 4), least_bytes(values, 8)
    assert choose(values, fewest - 1) is None
    for most in range(fewest, in_eight, 5):
        bits = choose(values, most)
        assert bits is not None
        assert size_of(values, bits) <= most
        narrow = [value for value in values if value.error and value.four < value.eight]
        costs = [
            sum(value.error for value in some)
            for count in range(len(narrow) + 1)
            for some in itertools.combinations(narrow, count)
            if in_eight - sum(value.eight - value.four for value in some) <= most
        ]
        assert error_of(values, bits, 4) == min(costs)


def test_without_a_limit_all_that_can_be_is_in_eight_bits() -> None:
    values = [KeptValue("a", 8, 4, 2), KeptValue("mask", 8, 1, 1, 0.0), KeptValue("index", 8, 8, 8)]
    assert choose(values, None) == {"a": 8, "mask": 8}
