"""What levels cost on devices, and what they mean there. None of the devices is here."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from amp_fx.instruments.targets import TARGETS, find_target
from amp_fx.precision.placement.cut import HIGH, LOW, Problem, Shared
from amp_fx.precision.placement.level_cost import OPERATIONS, LevelCost, copy_traffic, meaning, multiplies
from amp_fx.precision.placement.priced import Priced
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.policy.levels import LEVELS, choices_of, level_named, levels_of

BF16, RATES = torch.bfloat16, ("float32", "bfloat16", "float16", "int8")


def cost_of(profile: DeviceProfile, level: str = "rowwise") -> LevelCost:
    found = LevelCost.of(profile, BF16, LEVELS[level])
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["a100", "rtx3090", "rtx4090", "l4", "h100", "h200", "b200"])
def test_devices_have_fp8_by_their_published_rates(name: str) -> None:
    cost = LevelCost.of(TARGETS[f"cuda:{name}"].profile, BF16, LEVELS["rowwise"])
    assert (cost is None) is (name in ("a100", "rtx3090"))
    assert cost is None or 1.9 < cost.below / cost.low < 2.1


def runs_below(size: int, tokens: int = 8192, weight: int = 4) -> bool:
    """Whether an H100 runs a square linear in fp8, whose input is a fused value; bytes of an element of its weight."""
    cost = cost_of(find_target("cuda:h100").profile)
    problem = Problem(
        {"mm": cost.matmul(2 * tokens * size * size, tokens * size + size * size, 2)},
        shared=[
            Shared(cost.moving(*copy_traffic(elements, itemsize, in_rows=True)), LOW, ("mm",))
            for elements, itemsize in ((tokens * size, 2), (size * size, weight))
        ],
    )
    if weight > 2:
        problem.shared.append(Shared(cost.moving(size * size * 6, 1), HIGH, ("mm",)))
    return Priced(problem).choose(0.0).placement["mm"] is LOW


def test_small_linears_stay_low_and_large_ones_go_but_a_low_weight_is_not_converted_for_few_tokens() -> None:
    assert [runs_below(size) for size in (128, 256, 4096, 8192)] == [False, False, True, True]
    assert [runs_below(4096, tokens, weight=2) for tokens in (16, 8192)] == [False, True]


def test_a_copy_on_a_cpu_takes_arithmetic_too() -> None:
    for device, time in (("cpu", 1100), ("cuda", 300)):
        rates = {"float32": 1e12, "bfloat16": 1e12, "int8": 2e12}
        cost = cost_of(DeviceProfile("", device, rates, 1e12, 0.0), "int8")
        assert cost.copying(100, 2, in_rows=True) == time
        # by a scale that is known, less
        assert cost.rounding(100) == (300 if device == "cpu" else 100)


def test_a_call_in_int8_takes_longer_on_a_cpu_and_groups_gain_nothing_by_tiles() -> None:
    for device, wide, times in (
        ("cpu", 1e12, (150, 150)),
        ("cpu", 1e11, (150, 233)),
        ("cuda", 1e11, (150, 150)),
    ):
        rates = {"float32": wide, "bfloat16": 1e12, "int8": 2e12}
        cost = cost_of(DeviceProfile("", device, rates, 1e12, 1e-11), "int8")
        way = LEVELS["int8"].kernels[-1]
        assert [cost.calling(way, (rows, 4, 4)) > 0 for rows in (1, 2)] == [False, device == "cpu"]
        # half of it for a convolution
        call = cost.calling(way, (2, 4, 4)) - way.packs * cost.moving(2 * 4 * 4)
        assert (
            2 * (call - cost.calling(way, (2, 4, 4), convolves=True) + way.packs * cost.moving(2 * 4 * 4))
            == call
        )
        for grouped, time in zip((False, True), times, strict=True):
            assert cost.matmul(100, 100, 1, grouped=grouped) == (200, time)


def test_copies_by_columns_and_of_all_take_three_kernels_and_read_twice() -> None:
    elements = 4096 * 4096
    assert copy_traffic(elements, 2, in_rows=True) == (3 * elements, 1)
    assert copy_traffic(elements, 4, in_rows=False) == (9 * elements, 3)
    assert copy_traffic(elements, 2, in_rows=True, block=32) == (3 * elements + elements // 32, 1)
    blocks = elements // 32
    assert copy_traffic(elements, 2, in_rows=False, block=32) == (5 * elements + blocks * 13, 3)


@pytest.mark.parametrize(
    ("target", "capability", "auto", "blocks"),
    [
        ("cuda:h100", (9, 0), "rowwise", False),
        ("cuda:l4", (8, 9), "tensorwise", False),
        ("cuda:b200", (10, 0), "tensorwise", True),
        ("cuda:b200", (10, 3), "tensorwise", True),
        ("cuda:rtx5090", (12, 0), "tensorwise", False),
    ],
)
def test_scales_of_blocks_are_for_devices_whose_library_takes_them(
    target: str, capability: tuple[int, int], auto: str, blocks: bool
) -> None:
    profile = find_target(target).profile

    def means(level: str, *, training: bool = True) -> str:
        return meaning("fp8", level, profile, "cuda", torch.bfloat16, training=training).text

    here = {"is_available": lambda: True, "get_device_capability": lambda *_: capability}
    with mock.patch.multiple(torch.cuda, **here):
        assert means("auto") == auto
        unable = f"as autocast: cuda {profile.name} does not multiply in mxfp8"
        assert means("mxfp8") == ("mxfp8" if blocks else unable)
        assert means("mxfp8", training=False) == ("rowwise" if blocks else unable)


def test_a_single_row_is_multiplied_without_a_call_of_onednn_and_more_rows_with_packed_weights() -> None:
    measured, packed, unpacked, signed = LEVELS["int8"].kernels
    cost = cost_of(DeviceProfile("cpu", "cpu", dict.fromkeys(RATES, 1e12), 1e10, 0.0), "int8")
    for each in (cost, OPERATIONS):
        assert each.cheapest((packed, unpacked, signed), (1, 512, 512)) is unpacked
        assert each.cheapest((packed, unpacked, signed), (16, 512, 512)) is packed
        assert each.cheapest((signed,), (1, 512, 512)) is signed
        assert each.cheapest((measured, packed, unpacked), (16, 512, 512)) is measured
    # read and written once a call
    assert cost.calling(unpacked, (16, 512, 256)) == cost.moving(2 * 512 * 256)
    assert cost.calling(unpacked, (1, 512, 256)) == cost.calling(packed, (16, 512, 256)) == 0


def test_an_option_names_a_level_or_an_implementation_and_so_do_old_plans() -> None:
    int8 = LEVELS["int8"]
    assert list(choices_of("int8")) == ["int8", "int8_packed", "int8_unpacked", "int8_signed"]
    assert list(choices_of("fp8")) == list(levels_of("fp8"))
    assert {level_named(name) for name in choices_of("int8")} == {int8}
    assert level_named("int4") is None
    assert int8.chosen("auto") == int8.chosen("int8") == int8.kernels
    assert [way.name for way in int8.chosen("int8_signed")] == ["int8_signed"]
    assert multiplies(int8, "cuda")
    assert not multiplies(int8, "cuda", "int8_packed")
