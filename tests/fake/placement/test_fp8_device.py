"""What policy fp8 means on devices that are not there."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from amp_fx.placement.fp8_device import fp8_device
from amp_fx.targets import find_target


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
    assert profile is not None
    with (
        mock.patch.object(torch.cuda, "is_available", return_value=True),
        mock.patch.object(torch.cuda, "get_device_capability", return_value=capability),
    ):
        assert fp8_device("auto", profile, "cuda", torch.bfloat16).meaning == auto
        expected = "mxfp8" if blocks else f"as autocast: cuda {profile.name} does not multiply in mxfp8"
        assert fp8_device("mxfp8", profile, "cuda", torch.bfloat16).meaning == expected
