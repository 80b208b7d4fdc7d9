"""What loss scaling adds to a step on an H100 that is not there: kernels and bytes, in the graphs and beside them."""

from __future__ import annotations

import pytest

from targets import needs_a_target, process

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]

SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("name", "of_plain"),
    [
        ("naive_attention", 1.04),
        pytest.param("gpt2", 1.08, marks=SLOW),
        pytest.param("bert", 1.09, marks=SLOW),
        pytest.param("resnet", 1.11, marks=SLOW),
    ],
)
def test_a_step_takes_fewer_kernels_and_bytes_than_with_torchs_scaler(name: str, of_plain: float) -> None:
    theirs, plain, ours = (
        process().call("targets:counted", name, arm)
        for arm in ("autocast_scaler", "amp_fx_fp16", "amp_fx_scaler")
    )
    autocast, scaled = theirs.forward + theirs.backward, ours.forward + ours.backward
    assert scaled.kernels <= autocast.kernels
    # a kernel that divides reads the scale
    assert scaled.bytes_moved <= autocast.bytes_moved + 4 * scaled.kernels
    assert ours.total.kernels < theirs.total.kernels
    assert ours.total.bytes_moved < 0.99 * theirs.total.bytes_moved
    assert ours.total.bytes_moved < of_plain * plain.total.bytes_moved
