"""Targets by name, and the numbers behind them."""

from __future__ import annotations

import json
import pickle

import pytest

from amp_fx.errors import TargetError
from amp_fx.placement.gpus import GPUS, LIMITS
from amp_fx.placement.profile import DeviceProfile
from amp_fx.targets import TARGETS, find_target


@pytest.mark.parametrize("name", ["a100", "b200", "h100", "h200", "l4", "rtx4090"])
def test_the_common_cards_are_targets(name: str) -> None:
    target = find_target(f"cuda:{name}")
    assert target is TARGETS[f"cuda:{name}"] is find_target(f"CUDA:{name.upper()}")
    assert DeviceProfile.from_dict(json.loads(target.profile.to_json())) == target.profile
    assert pickle.loads(pickle.dumps(target)) == target


def test_every_card_that_triton_compiles_for_is_a_target() -> None:
    assert {target.gpu for target in TARGETS.values()} == {g for g in GPUS if g.capability >= (8, 0)}
    assert all(limits.block_shared < limits.shared for limits in LIMITS.values())


def test_two_cards_of_one_architecture_have_rates_of_their_own() -> None:
    h100, h200 = find_target("cuda:h100"), find_target("cuda:h200")
    assert h100.architecture == h200.architecture == "sm_90"
    assert h100.profile.bandwidth < h200.profile.bandwidth


NEAREST = {"cuda:h10": "h100", "h100": "h100", "L4": "l4", "RTX4090": "rtx4090", "cuda:a10": "a100"}


@pytest.mark.parametrize(("wrong", "right"), NEAREST.items())
def test_an_unknown_target_names_the_nearest_one(wrong: str, right: str) -> None:
    with pytest.raises(TargetError, match=f"'{wrong}'.*'cuda:{right}'"):
        find_target(wrong)
