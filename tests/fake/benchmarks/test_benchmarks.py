"""What `python -m benchmarks` makes of its timings: statistics, tables, files, the page."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import campaign, page, running
from benchmarks.__main__ import case_table, main
from benchmarks.arms import ARMS, MODES, arms_for
from benchmarks.campaign import Step, steps
from benchmarks.cases import CASES
from benchmarks.results import Spread, TimingRow, describe, read_timings, relative, spread, write
from benchmarks.workloads import WORKLOADS

QUIET = (1.0, 1.01, 0.99, 1.0, 1.02)
WHERE = {"hardware": "toy", "processor": "abacus", "torch": "9", "threads": 3, "clock": "wall"}


def row(arm: str, times: tuple[float, ...], workload: str = "mlp", **others: object) -> TimingRow:
    return TimingRow(workload, "mlp", "training", arm, {"batch": 8}, times, **others)  # type: ignore[arg-type]


def scaled(factor: float) -> tuple[float, ...]:
    return tuple(factor * time for time in QUIET)


def test_ratios_are_quartiles_over_the_rounds_that_both_arms_have() -> None:
    assert spread([5, 1, 4, 2, 3]) == Spread(2, 3, 4)
    assert spread([7]).low == spread([7]).high == 7
    # a drift that all arms share leaves the ratio alone
    drifting = (1.0, 2.0, 4.0, 8.0)
    rows = [row("autocast", drifting), row("amp_fx", tuple(0.5 * time for time in drifting))]
    assert relative(rows, "amp_fx") == Spread(0.5, 0.5, 0.5)
    # one has stopped early, and one at once
    rows = [row("autocast", (1.0, 1.0, 100.0)), row("amp_fx", (2.0, 2.0)), row("fp32", ())]
    assert relative(rows, "amp_fx").high == 2
    assert math.isnan(relative(rows, "fp32").median)


def test_a_table_has_a_line_per_arm_and_the_reasons_of_those_that_are_missing() -> None:
    failed = row("freezing", (), notes=("failed: ValueError",))
    rows = [row("autocast", QUIET), row("amp_fx", scaled(0.5), peak_bytes=1_500_000), failed]
    lines = case_table(rows).splitlines()
    assert lines[0] == "mlp, training: batch 8"
    [ours] = [line.split() for line in lines if line.startswith("amp_fx")]
    assert ours == ["amp_fx", "500.00", "(500.00-505.00)", "0.50", "(0.50-0.50)", "-", "1.5"]
    assert lines[-1] == "note: freezing: failed: ValueError"


def test_where_openvino_ran_errors_and_ratios_to_it_are_shown() -> None:
    rows = [row("openvino", QUIET, error=4e-3), row("amp_fx", scaled(1.25), error=None)]
    _, *lines = [" ".join(line.split()[-3:]) for line in case_table(rows).splitlines()]
    assert lines == ["error x openvino", "4.0e-03 1.00 (1.00-1.00)", "- 1.25 (1.25-1.25)"]
    assert "| 1250.00, nan | - |" in page.beside(WHERE, rows)


def test_results_survive_the_way_through_a_file(tmp_path: Path) -> None:
    rows = [row("amp_fx", QUIET, notes=("a", "b")), row("fp32", ())]
    write(tmp_path / "r.jsonl", describe("cpu"), rows)
    header, found = read_timings(tmp_path / "r.jsonl")
    assert found == rows
    assert {"hardware", "processor", "torch", "python", "commit", "date", "threads", "load"} <= header.keys()


def test_the_page_says_what_the_results_say() -> None:
    text = page._PAGE.read_text(encoding="utf-8")
    assert page.written(text, page.sections(page._RESULTS)) == text


def test_a_page_without_a_place_for_a_section_is_refused() -> None:
    with pytest.raises(ValueError, match="<!-- speed:begin -->"):
        page.written("<!-- errors:begin --><!-- errors:end -->", {"errors": "", "speed": ""})


def test_sections_have_ratios_how_compiling_grows_and_no_case_that_was_cut_short() -> None:
    text = page.speed(WHERE, [row("autocast", QUIET), row("amp_fx", scaled(0.5)), row("fp32", scaled(2))])
    assert "toy" in text
    assert "| mlp | 1000.0 | 2.00 | 0.50 |" in text
    autocast = TimingRow("depth_layers6", "depth", "training", "autocast", {"layers": 6}, QUIET, 10.0)
    text = page.speed(WHERE, [autocast, replace(autocast, arm="off", compile_cold=12.0)])
    assert re.search(r"\b6 layers\b.*\b10 s\b.*\b1\.20 times", text)
    assert "Training:" not in text
    rows = [row("autocast", QUIET, notes=("time was up before round 6",)), row("amp_fx", QUIET)]
    assert "| mlp" not in page.speed(WHERE, rows)


def test_files_are_joined_by_clock_and_not_across_machines(tmp_path: Path) -> None:
    for name, arms in (("a", {"autocast"}), ("b", {"amp_fx"})):
        write(tmp_path / f"timings_{name}.jsonl", WHERE, [row(arm, QUIET) for arm in arms])
    write(tmp_path / "timings_c.jsonl", {**WHERE, "clock": "cpu"}, [row("autocast", QUIET, "gpt2")])
    arms = [[some.arm for some in rows] for _, rows in page._joined(sorted(tmp_path.iterdir()))]
    assert arms == [["autocast", "amp_fx"], ["autocast"]]
    for where, rows, named in (
        (WHERE, [row("amp_fx", QUIET)], "amp_fx"),
        ({**WHERE, "torch": "10"}, [], "10"),
    ):
        write(tmp_path / "timings_d.jsonl", where, rows)
        with pytest.raises(ValueError, match=rf"timings_d\.jsonl .*'{named}'"):
            page._joined(sorted(tmp_path.iterdir()))


def test_every_case_can_be_built_at_some_size_and_has_arms() -> None:
    for case in CASES.values():
        assert case.mode in MODES
        assert case.sizes
        assert set(case.sizes) <= {"cpu", "cuda"}
        assert set(case.arms) <= set(ARMS)
        relatives = [each for each in CASES.values() if each.family == case.family]
        assert case.family == case.name or len(relatives) > 1
        assert {"autocast", "amp_fx"} <= set(arms_for(case.mode, "cpu"))


def test_arms_take_turns_and_none_always_follows_the_same() -> None:
    asked: list[str] = []

    def worker(name: str) -> Any:
        def ask(do: str, **arguments: object) -> dict[str, list[float]]:
            asked.append(name)
            return {"seconds": [1.0]}

        return SimpleNamespace(ask=ask, steps=1, times=[], notes=[])

    running._rounds([worker("a"), worker("b")], range(2), running.Settings())
    assert asked == ["a", "b", "b", "a"]


def test_an_unknown_case_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "mlpp"])
    assert "unknown case 'mlpp'; valid: gpt2, mlp" in capsys.readouterr().err


WRITES = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"


STEPS = [
    Step("first.txt", ("-c", WRITES, "{out}", "one")),
    Step("second.txt", ("-c", WRITES, "{out}", "two")),
    Step("third.txt", ("-c", WRITES, "{out}", "three"), needs=("no_such_package",)),
    Step("fourth.txt", ("-c", "raise SystemExit(3)")),
]


def test_steps_leave_files_in_time_and_a_second_call_does_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(campaign, "steps", lambda device, minutes: STEPS)
    call = ["--device", "cpu", "--out", str(tmp_path)]
    assert campaign.main([*call, "--minutes", "0"]) == 0
    assert not list(tmp_path.glob("*.txt"))
    assert "3 steps are left: run it again" in capsys.readouterr().out
    (tmp_path / "first.txt").write_text("from an earlier call")
    assert campaign.main(call) == 0
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
    needs = {name: step.needs for name, step in found.items()}
    assert needs["timings_bert_inference.jsonl"] == needs["errors_llama.jsonl"] == ("transformers",)
    assert needs["timings_mlp.jsonl"] == needs["counts_gpt_512.jsonl"] == ()
