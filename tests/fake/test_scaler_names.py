"""Which scaler a name finds, and which devices a scaler takes."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import amp_fx
from amp_fx.runtime.scaling.scaler import find_scaler


def test_a_scaler_is_found_again_once_later_ones_of_its_name_are_gone() -> None:
    first = amp_fx.GradScaler("cpu", name="folds")
    for _ in range(3):
        later = amp_fx.GradScaler("cpu", name="folds")
        assert find_scaler("folds") is later
        del later
        gc.collect()
        assert find_scaler("folds") is first


@pytest.mark.parametrize("device", ["gpu", 65536.0, 65536, None, "", "cuda0"])
def test_a_device_that_torch_does_not_have_is_refused(device: Any) -> None:
    with pytest.raises(amp_fx.ScalerError, match=repr(device)):
        amp_fx.GradScaler(device)
