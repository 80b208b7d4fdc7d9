"""What loss scaling costs on a GPU beside the compiled graphs: counted op by op, launches by hand-made lists."""

from __future__ import annotations

import pytest

from benchmarks.scaler import beside, launches

CHUNK = 65536
SMALL = [64 * 64, 64] * 3
LARGE = [4096 * 4096] * 30


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([], 0),
        ([1], 1),
        ([8] * 110, 1),
        ([8] * 111, 2),
        # 320 blocks of 65536 elements fill a launch
        ([320 * CHUNK], 1),
        ([320 * CHUNK + 1], 2),
        ([319 * CHUNK, CHUNK, CHUNK], 2),
        # a tensor that goes on in the next launch is one of its tensors, too
        ([321 * CHUNK] + [8] * 109, 2),
        ([321 * CHUNK] + [8] * 110, 3),
    ],
)
def test_a_launch_takes_so_many_tensors_and_blocks(sizes: list[int], count: int) -> None:
    assert launches(sizes) == count


@pytest.mark.parametrize("sizes", [SMALL, LARGE], ids=["small", "large"])
def test_a_step_takes_no_more_kernels_than_torchs_scaler_and_half_the_bytes(sizes: list[int]) -> None:
    (our_kernels, our_bytes), (kernels, moved) = beside(True, sizes), beside(False, sizes)
    assert our_kernels <= kernels
    # every gradient is read once, and one number for each; torch writes them, too
    assert our_bytes == 4 * sum(sizes) + 8 * len(sizes)
    assert moved == 8 * sum(sizes)
