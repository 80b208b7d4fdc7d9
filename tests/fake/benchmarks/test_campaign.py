"""The campaign: steps that leave files, and a call that goes on where the one before stopped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from amp_fx._torch import lower_with_inductor, replace_inner_compile
from amp_fx.placement.profile import DeviceProfile
from benchmarks import campaign, predicted
from benchmarks.campaign import Step, main, steps, table
from benchmarks.cases import CASES
from benchmarks.results import TimingRow

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


def test_each_step_leaves_its_file_and_what_is_missing_is_said(
    two_steps: list[Step], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--device", "cpu", "--out", str(tmp_path)]) == 0
    assert (tmp_path / "first.txt").read_text() == "one"
    assert (tmp_path / "second.txt").read_text() == "two"
    said = capsys.readouterr().out
    assert "third.txt: skipped, as there is no no_such_package" in said
    assert "fourth.txt: failed with code 3" in said


def test_a_second_call_does_only_what_is_left(
    two_steps: list[Step], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "first.txt").write_text("from an earlier call")
    main(["--device", "cpu", "--out", str(tmp_path)])
    assert (tmp_path / "first.txt").read_text() == "from an earlier call"
    assert "first.txt" not in capsys.readouterr().out


def test_no_step_is_begun_late(
    two_steps: list[Step], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["--device", "cpu", "--out", str(tmp_path), "--minutes", "0"])
    assert not list(tmp_path.glob("*.txt"))
    assert "3 steps are left: run it again" in capsys.readouterr().out


def test_a_step_that_takes_too_long_is_ended_and_leaves_no_file(tmp_path: Path) -> None:
    step = Step("slow.txt", ("-c", "import time; time.sleep(60)"))
    assert "took longer than 1 s" in campaign.run(step, tmp_path, 1.0)
    assert not (tmp_path / "slow.txt").exists()


def test_the_campaign_of_a_gpu_has_its_tests_its_rates_and_every_case() -> None:
    names = [step.name for step in steps("cuda", 9.0)]
    assert names[:2] == ["tests.xml", "profile.json"]
    assert set(names[2:]) == {f"timings_{c.name}.jsonl" for c in CASES.values() if "cuda" in c.sizes}


def test_predicted_times_stand_beside_measured_ones() -> None:
    row = TimingRow("mlp", "mlp", "training", "off", times=(0.003,), predicted=0.002)
    assert "| mlp | off | 2.000 ms | 3.000 ms | 1.50 |" in table(
        [row, TimingRow("x", "x", "training", "off")]
    )


@pytest.mark.parametrize(("launch", "expected"), [(1e-9, None), (1.0, 1.0)])
def test_a_step_takes_its_bytes_and_flops_or_the_start_of_its_kernels(
    launch: float, expected: float | None
) -> None:
    found = []

    def inner_compile(gm: torch.fx.GraphModule, inputs: list[torch.Tensor], **kwargs: object) -> object:
        found.append(lower_with_inductor(gm, inputs, **kwargs))  # type: ignore[arg-type]
        return found[-1].call

    with replace_inner_compile(inner_compile):  # type: ignore[arg-type]
        torch.compile(torch.mm)(torch.randn(64, 32), torch.randn(32, 16))
    profile = DeviceProfile("a name", "cpu", {"float32": 1e9}, 1e9, launch)
    work = (2 * 64 * 32 * 16 + 4 * (64 * 32 + 32 * 16 + 64 * 16)) / 1e9
    assert predicted.seconds(found, profile) == pytest.approx(expected or work)
