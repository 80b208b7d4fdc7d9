"""How many launches a pass over many tensors takes, against hand-made lists."""

from __future__ import annotations

import pytest

from benchmarks.scaler import launches

CHUNK = 65536


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
