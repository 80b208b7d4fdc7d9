"""`python -m benchmarks` from end to end, on its smallest case."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.results import read_timings


def test_a_run_measures_an_arm_in_processes_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    # it is not compiled, so that the test takes seconds
    wanted = ["--only", "linears_batch1", "--arms", "eager_autocast", "--rounds", "3", "--processes", "1"]
    assert main([*wanted, "--json", str(path)]) == 0
    header, rows = read_timings(path)
    assert (header["rounds"], header["processes"]) == (3, 1)
    [row] = rows
    assert (row.arm, row.compile_cold, row.notes) == ("eager_autocast", None, ())
    assert len(row.times) == 3
    assert min(row.times) > 0
    assert row.peak_bytes is not None
    assert "linears_batch1, inference: batch 1" in capsys.readouterr().out
