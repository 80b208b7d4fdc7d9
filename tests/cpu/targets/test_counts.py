"""``python -m benchmarks.counts --target``: arms beside each other for a GPU that is not there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.counts import main
from benchmarks.on_target import ASSUMED
from targets import needs_a_target

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


def test_arms_are_counted_for_a_target_and_the_assumptions_are_printed(tmp_path: Path) -> None:
    path = tmp_path / "counts.jsonl"
    arms = ["autocast", "off", "fast", "freezing"]
    command = [sys.executable, "-m", "benchmarks.counts", "--target", "cuda:h100", "--only", "rms_norm"]
    done = subprocess.run(
        [*command, "--modes", "training", "--arms", *arms, "--json", str(path)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr
    header, *rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert "cuda:h100 (H100, sm_90), not in the machine" in done.stdout
    assert all(line in done.stdout for line in ASSUMED)
    assert header["header"]["assumed"] == list(ASSUMED)
    assert [row["arm"] for row in rows] == arms[:3]
    assert "skipped: arm 'freezing' needs a device" in done.stderr
    moved = {row["arm"]: row["forward"]["bytes_moved"] + row["backward"]["bytes_moved"] for row in rows}
    assert moved["fast"] < moved["off"] < moved["autocast"]


def test_an_unknown_target_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--target", "cuda:h10"])
    assert ended.value.code == 2
    assert "Did you mean 'cuda:h100'?" in capsys.readouterr().err
