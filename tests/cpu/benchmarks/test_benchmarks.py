"""`python -m benchmarks` from end to end, on its smallest case."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.results import read_timings


def test_a_run_measures_two_arms_in_processes_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.jsonl"
    # neither is compiled, so that the test takes seconds
    arms = ["eager_autocast", "floor32"]
    wanted = ["--only", "policy", "--arms", *arms, "--rounds", "3", "--processes", "2"]
    wanted += ["--measures", "memory", "reads"]
    assert main([*wanted, "--json", str(path), "--plots", str(tmp_path)]) == 0
    header, rows = read_timings(path)
    assert (header["rounds"], header["processes"]) == (3, 2)
    assert [row.arm for row in rows] == arms
    for row in rows:
        assert len(row.times) == 3
        assert min(row.times) > 0
        assert row.notes == ()
        assert row.host_reads == 0
    assert "policy, training: batch 64" in capsys.readouterr().out

