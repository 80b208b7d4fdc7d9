"""Operands with scales: what they stand for, and how scales of blocks lie in memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from amp_fx.precision.policy.scaled import ZERO_POINT, block_scales, run, scale_of, scaled
from support.checks.below_16_bits import widened

FP8 = torch.float8_e4m3fn


def copied(value: Tensor) -> tuple[Tensor, Tensor]:
    """(with a scale for each 32 elements, these scales)."""
    blocks = value.view(value.shape[0], -1, 32)
    is_wide = value.dtype is torch.float32
    scale = scale_of(blocks, FP8, [[-1]], run, powers=True, is_wide=is_wide)
    data, factors = scaled(blocks, scale, FP8, run)
    return data.view(value.shape), block_scales(factors, run)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(128, 128), (16, 32), (144, 160), (400, 96)])
def test_a_copy_stands_for_its_values(shape: tuple[int, int], dtype: torch.dtype) -> None:
    # blocks of very different magnitude
    value = (torch.randn(shape) * torch.exp2(torch.randint(-60, 60, shape)[:, :1])).to(dtype)
    data, scales = copied(value)
    assert scales.dtype is torch.float8_e8m0fnu
    assert scales.shape == (-(-shape[0] // 128) * 128 * (-(-shape[1] // 128) * 4),)
    # e4m3 has 3 bits after the point, and 2**-9 below its smallest normal number
    largest = value.float().view(shape[0], -1, 32).abs().amax(-1, keepdim=True)
    wrong = (widened(data, scales) - value.float()).view(shape[0], -1, 32).abs()
    assert (wrong <= torch.maximum(value.float().abs().view_as(wrong) / 16, largest * 2.0**-17)).all()


def test_the_largest_number_of_a_block_is_not_cut_off_and_uses_the_range() -> None:
    value = torch.full((128, 128), 1.0)
    value[:, ::32] = torch.linspace(1, 1000, 128)[:, None]
    data, _ = copied(value)
    largest = data.float().view(128, 4, 32).amax(-1)
    assert (largest >= 224).all()
    assert (largest <= 448).all()


def test_each_block_has_the_byte_where_the_library_looks_for_it() -> None:
    exponents = torch.arange(256 * 8).view(256, 8) % 200
    factors = torch.exp2((exponents - 100).float())[:, :, None]
    found = block_scales(factors, run).view(torch.uint8)
    for row in (0, 1, 31, 32, 100, 127, 128, 255):
        for column in range(8):
            tile = (row // 128) * 2 + column // 4
            place = 512 * tile + 16 * (row % 32) + 4 * (row % 128 // 32) + column % 4
            assert found[place] == exponents[row, column] - 100 + 127


def test_a_factor_that_a_device_misses_by_a_bit_is_the_same_power_of_two() -> None:
    factors = torch.tensor([1.0, 0.25, 2.0**100]).repeat(32)[:, None, None]
    exact = block_scales(factors, run).view(torch.uint8)
    for towards in (0.0, torch.inf):
        near = torch.nextafter(factors, torch.tensor(towards))
        assert torch.equal(block_scales(near, run).view(torch.uint8), exact)


def test_zeros_stay_zeros_and_what_is_not_finite_is_seen_in_its_block_only() -> None:
    value = torch.randn(16, 128)
    value[1], value[2, 5], value[3, 40], value[4, 70] = 0, torch.inf, -torch.inf, torch.nan
    again = widened(*copied(value))
    assert not again[1].any()
    for row, block in ((2, 0), (3, 1), (4, 2)):
        finite = again[row].isfinite().view(4, 32).all(-1)
        assert finite.tolist() == [place != block for place in range(4)]
        assert not again[row].view(4, 32)[block].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_integers_stand_for_values_by_half_a_step_at_most_and_use_the_range(dtype: torch.dtype) -> None:
    value = torch.randn(16, 64) * torch.exp2(torch.arange(16) - 8)[:, None]
    value[3] = 0
    scale = scale_of(value, dtype, [[-1]], run, powers=False, is_wide=True)
    data, factors = scaled(value, scale, dtype, run)
    assert data.dtype is dtype
    centred = data.int() - (ZERO_POINT if dtype is torch.uint8 else 0)
    assert centred.abs().amax(-1).tolist() == [0 if row == 3 else 127 for row in range(16)]
    assert ((centred * factors - value).abs() <= factors * 0.5001).all()


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_makes_nan_of_the_factor_of_its_row(bad: float) -> None:
    value = torch.ones(2, 8)
    value[1, 3] = bad
    scale = scale_of(value, torch.int8, [[-1]], run, powers=False, is_wide=True)
    _, factors = scaled(value, scale, torch.int8, run)
    assert factors.isnan().flatten().tolist() == [False, True]
