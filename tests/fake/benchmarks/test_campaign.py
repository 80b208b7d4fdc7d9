"""The campaign: steps that leave files, and a call that goes on where the one before stopped."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import campaign
from benchmarks.campaign import Step, main, steps
from benchmarks.cases import CASES
from benchmarks.workloads import WORKLOADS

WRITES = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"


@pytest.fixture
def two_steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    found = [
        Step("first.txt", ("-c", WRITES, "{out}", "one")),
        Step("second.txt", ("-c", WRITES, "{out}", "two")),
        Step("third.txt", ("-c", WRITES, "{out}", "three"), needs=("no_such_package",)),
        Step("fourth.txt", ("-c", "raise SystemExit(3)")),
    ]
    monkeypatch.setattr(campaign, "steps", lambda device, minutes: found)
    return found


def test_steps_leave_files_in_time_and_a_second_call_does_what_is_left(
    two_steps: list[Step], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["--device", "cpu", "--out", str(tmp_path)]
    assert main([*call, "--minutes", "0"]) == 0
    assert not list(tmp_path.glob("*.txt"))
    assert "3 steps are left: run it again" in capsys.readouterr().out
    (tmp_path / "first.txt").write_text("from an earlier call")
    assert main(call) == 0
    assert (tmp_path / "first.txt").read_text() == "from an earlier call"
    assert (tmp_path / "second.txt").read_text() == "two"
    said = capsys.readouterr().out
    assert "first.txt" not in said
    assert "third.txt: skipped, as there is no no_such_package" in said
    assert "fourth.txt: failed with code 3" in said


def test_a_step_that_takes_too_long_is_ended_and_leaves_no_file(tmp_path: Path) -> None:
    step = Step("slow.txt", ("-c", "import time; time.sleep(60)"))
    assert "took longer than 1 s" in campaign.run(step, tmp_path, 1.0)
    assert not (tmp_path / "slow.txt").exists()


def test_the_campaign_of_a_gpu_has_its_tests_its_rates_every_case_and_every_model() -> None:
    found = {step.name: step for step in steps("cuda", 9.0)}
    assert list(found)[:2] == ["tests.xml", "profile.json"]
    timings = {f"timings_{c.name}.jsonl" for c in CASES.values() if "cuda" in c.sizes}
    models = {f"{kind}_{name}.jsonl" for kind in ("errors", "counts") for name in WORKLOADS}
    assert set(found) == {"tests.xml", "profile.json"} | timings | models
    assert (
        found["timings_bert_inference.jsonl"].needs == found["errors_llama.jsonl"].needs == ("transformers",)
    )
    assert found["timings_mlp.jsonl"].needs == found["counts_gpt_512.jsonl"].needs == ()
