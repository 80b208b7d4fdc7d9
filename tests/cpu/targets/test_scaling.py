"""What loss scaling adds to a step on an H100 that is not there: kernels and bytes, in the graphs and beside them."""

from __future__ import annotations

import pytest

from benchmarks.scaler import Cost
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
    costs: dict[str, tuple[Cost, Cost]] = process().call("benchmarks.scaler:step_costs", name, "cuda:h100")
    autocast, plain, ours = (costs[arm][0] for arm in ("autocast", "amp_fx", "amp_fx, its scaler"))
    assert ours.kernels <= autocast.kernels
    # a kernel that divides reads the scale
    assert ours.moved <= autocast.moved + 4 * ours.kernels
    torchs, total = (sum(costs[arm], Cost()) for arm in ("autocast, torch's scaler", "amp_fx, its scaler"))
    assert total.kernels < torchs.kernels
    assert total.moved < 0.99 * torchs.moved
    assert total.moved < of_plain * plain.moved
