"""``amp-fx targets``."""

from __future__ import annotations

import json

import pytest

from amp_fx.cli.entry import main
from amp_fx.placement.profile import DeviceProfile
from amp_fx.targets import TARGETS


def test_every_target_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["target", "architecture", "SMs", "memory", "bandwidth", "float32", "bfloat16"]
    assert [line.split()[0] for line in lines] == list(TARGETS)
    assert any("cuda:h100" in line and "sm_90" in line and "3350 GB/s" in line for line in lines)


def test_json_has_profiles_that_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out):
        assert DeviceProfile.from_dict(row["profile"]) == TARGETS[row["name"]].profile
