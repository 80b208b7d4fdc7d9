"""What loss scaling costs on a GPU beside the compiled graphs, counted op by op on fake tensors."""

from __future__ import annotations

import pytest

from benchmarks.scaler import Cost
from targets import needs_a_target, process

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]

SMALL = [64 * 64, 64] * 3
LARGE = [4096 * 4096] * 30


def beside(kind: str, sizes: list[int]) -> Cost:
    return process().call("benchmarks.scaler:beside", kind, sizes)


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_a_step_takes_no_more_kernels_than_torchs_scaler_and_half_the_bytes(sizes: list[int]) -> None:
    ours, theirs = beside("amp_fx", sizes), beside("torch", sizes)
    assert ours.kernels <= theirs.kernels
    # every gradient is read once; torch writes it, too
    assert ours.moved == 4 * sum(sizes)
    assert theirs.moved == 8 * sum(sizes)


def test_without_a_scaler_there_is_nothing() -> None:
    assert beside("", SMALL) == Cost()
