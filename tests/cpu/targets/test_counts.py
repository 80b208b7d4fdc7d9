"""``python -m benchmarks.counts --target``: arms beside each other for a GPU that is not there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.counts import ASSUMED, main
from benchmarks.results import read
from benchmarks.workloads import WORKLOADS
from targets import needs_a_target, process

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


#: what docs/benchmarks.md shows
[RESULTS] = (Path(__file__).parents[3] / "benchmarks" / "results").glob("counts_cuda_h100_*.jsonl")
ARMS = ("autocast", "off", "fast")
GRAPHS = ("forward", "backward")


@dataclass(frozen=True)
class Counted:
    """What the command says of a workload: text, messages, its header and its rows by arm."""

    workload: str
    text: str
    messages: str
    header: dict[str, Any]
    rows: dict[str, dict[str, Any]]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name == "naive_attention" else pytest.mark.slow) for name in WORKLOADS
    ],
)
def counted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Counted:
    path = tmp_path_factory.mktemp("counts") / "counts.jsonl"
    of = ["--only", request.param, "--modes", "training", "--arms", *ARMS, "freezing"]
    text, messages = process().call("targets:count", ["--target", "cuda:h100", *of, "--json", str(path)])
    header, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return Counted(request.param, text, messages, header["header"], {row["arm"]: row for row in rows})


def test_arms_are_counted_for_a_target_and_the_assumptions_are_printed(counted: Counted) -> None:
    assert "cuda:h100 (H100, sm_90), not in the machine" in counted.text
    assert all(line in counted.text for line in ASSUMED)
    assert counted.header["assumed"] == list(ASSUMED)
    assert tuple(counted.rows) == ARMS
    assert "skipped: arm 'freezing' needs a device" in counted.messages
    moved = {arm: sum(row[graph]["bytes_moved"] for graph in GRAPHS) for arm, row in counted.rows.items()}
    assert moved["fast"] <= moved["off"] < moved["autocast"]


def test_no_program_gets_a_cast_kernel_back(counted: Counted) -> None:
    shown = [
        row
        for row in read(RESULTS)[1]
        if row["workload"] == counted.workload and row["mode"] == "training" and row["arm"] in ("off", "fast")
    ]
    assert len(shown) == 2
    for before in shown:
        now = counted.rows[before["arm"]]
        for graph in GRAPHS:
            for fact in ("casts", "cast_bytes", "bytes_moved"):
                assert now[graph][fact] <= before[graph][fact]


def test_an_unknown_target_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--target", "cuda:h10"])
    assert ended.value.code == 2
    assert "'cuda:h100'" in capsys.readouterr().err
