"""``python -m benchmarks.counts --target``: arms beside each other for a GPU that is not there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.counts import ASSUMED, main
from benchmarks.results import read
from benchmarks.workloads import WORKLOADS
from targets import needs_a_target, process

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


def test_arms_are_counted_for_a_target_and_the_assumptions_are_printed(tmp_path: Path) -> None:
    path = tmp_path / "counts.jsonl"
    arms = ["autocast", "off", "fast", "freezing"]
    command = ["--target", "cuda:h100", "--only", "naive_attention", "--modes", "training", "--arms", *arms]
    out, messages = process().call("targets:count", [*command, "--json", str(path)])
    header, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert "cuda:h100 (H100, sm_90), not in the machine" in out
    assert all(line in out for line in ASSUMED)
    assert header["header"]["assumed"] == list(ASSUMED)
    assert [row["arm"] for row in rows] == arms[:3]
    assert "skipped: arm 'freezing' needs a device" in messages
    moved = {row["arm"]: row["forward"]["bytes_moved"] + row["backward"]["bytes_moved"] for row in rows}
    assert moved["fast"] < moved["off"] < moved["autocast"]


#: what docs/benchmarks.md shows
[RESULTS] = (Path(__file__).parents[3] / "benchmarks" / "results").glob("counts_cuda_h100_*.jsonl")


@pytest.mark.parametrize(
    "workload",
    [pytest.param(name, marks=() if name == "naive_attention" else pytest.mark.slow) for name in WORKLOADS],
)
def test_no_program_gets_a_cast_kernel_back(workload: str) -> None:
    shown = {
        row["arm"]: row
        for row in read(RESULTS)[1]
        if row["workload"] == workload and row["mode"] == "training"
    }
    for arm in ("off", "fast"):
        row = process().call("targets:counted", workload, arm)
        for now, before in ((row.forward, shown[arm]["forward"]), (row.backward, shown[arm]["backward"])):
            assert now.casts <= before["casts"]
            assert now.cast_bytes <= before["cast_bytes"]
            assert now.bytes_moved <= before["bytes_moved"]


def test_an_unknown_target_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--target", "cuda:h10"])
    assert ended.value.code == 2
    assert "'cuda:h100'" in capsys.readouterr().err
