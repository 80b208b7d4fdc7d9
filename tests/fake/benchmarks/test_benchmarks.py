"""What `python -m benchmarks` makes of its timings: statistics, tables, files, comparisons, plots."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from benchmarks import page, running
from benchmarks.__main__ import main
from benchmarks.arms import ARMS, MODES, arms_for
from benchmarks.cases import CASES, SIZES
from benchmarks.compare import comparison
from benchmarks.floor import only_matmuls
from benchmarks.plots import draw
from benchmarks.results import TimingRow, describe, read_timings, write
from benchmarks.spread import ratios, spread
from benchmarks.tables import case_table

QUIET = (1.0, 1.01, 0.99, 1.0, 1.02)


def row(arm: str, times: tuple[float, ...], workload: str = "mlp", **others: object) -> TimingRow:
    return TimingRow(workload, "mlp", "training", arm, {"batch": 8}, times, **others)  # type: ignore[arg-type]


def scaled(factor: float) -> tuple[float, ...]:
    return tuple(factor * time for time in QUIET)


# --- statistics ---


def test_the_quartiles_of_five_values_are_three_of_them() -> None:
    assert (spread([5, 1, 4, 2, 3]).low, spread([5, 1, 4, 2, 3]).median) == (2, 3)
    assert spread([5, 1, 4, 2, 3]).high == 4
    assert spread([7]).low == spread([7]).high == 7
    assert math.isnan(spread([]).median)


def test_a_drift_that_all_arms_share_leaves_the_ratio_alone() -> None:
    drifting = [1.0, 2.0, 4.0, 8.0]
    found = ratios([0.5 * time for time in drifting], drifting)
    assert (found.low, found.median, found.high) == (0.5, 0.5, 0.5)


def test_an_arm_that_stopped_early_is_compared_over_the_rounds_it_has() -> None:
    assert ratios([2.0, 2.0], [1.0, 1.0, 100.0]).high == 2


# --- tables and comparisons ---


def test_a_table_has_a_line_per_arm_and_the_reasons_of_those_that_are_missing() -> None:
    rows = [
        row("autocast", QUIET, counts={"bytes_moved": 3_000_000}, gradient_error=2e-3),
        row("amp_fx", scaled(0.5), peak_bytes=1_500_000, host_reads=2),
        row("floor", scaled(0.25)),
        row("cache", (), notes=("skipped: unknown option",)),
    ]
    lines = case_table(rows).splitlines()
    assert lines[0] == "mlp, training: batch 8"
    [ours] = [line.split() for line in lines if line.startswith("amp_fx")]
    assert ours[1] == "500.0"
    assert ours[3:7] == ["0.50", "(0.50-0.50)", "2.00", "(2.00-2.00)"]
    assert {"1.5", "2"} <= set(ours)
    assert lines[-1] == "note: cache: skipped: unknown option"


def test_a_machine_that_became_slower_makes_nothing_slower() -> None:
    before = [row("autocast", QUIET), row("amp_fx", scaled(0.8))]
    after = [row("autocast", scaled(3)), row("amp_fx", scaled(3 * 0.8))]
    lines = comparison(before, after).splitlines()
    assert [line.split()[-1] for line in lines if "amp_fx" in line] == ["same"]
    assert "200% slower" in next(line for line in lines if "mlp autocast" in line)


def test_a_change_beyond_the_noise_is_named_and_one_within_it_is_not() -> None:
    before = [row("autocast", QUIET), row("amp_fx", scaled(0.8)), row("fast", (0.8, 0.9, 0.7, 0.75, 0.85))]
    after = [row("autocast", QUIET), row("amp_fx", scaled(0.6)), row("fast", (0.7, 0.8, 0.9, 0.75, 0.81))]
    text = comparison(before, after)
    assert "25% faster" in next(line for line in text.splitlines() if "amp_fx" in line)
    assert next(line for line in text.splitlines() if "fast " in line).endswith("same")


def test_cases_of_other_sizes_are_not_compared() -> None:
    other = replace(row("amp_fx", QUIET), sizes={"batch": 9})
    assert comparison([row("amp_fx", QUIET)], [other]).endswith("not the same sizes")


# --- files ---


def test_results_survive_the_way_through_a_file(tmp_path: Path) -> None:
    rows = [row("amp_fx", QUIET, counts={"casts": 3}, notes=("a", "b")), row("fp32", ())]
    write(tmp_path / "r.jsonl", describe("cpu"), rows)
    header, found = read_timings(tmp_path / "r.jsonl")
    assert found == rows
    assert {"hardware", "processor", "torch", "python", "commit", "date", "threads", "load"} <= header.keys()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "no header"),
        ('{"arm": "fp32"}\n', "no header"),
        ('{"header": {}}\n{"arm": "fp32"}\n', "did not write"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=rf"other\.jsonl.*{complaint}"):
        read_timings(path)


def test_plots_are_drawn_of_whatever_was_measured(tmp_path: Path) -> None:
    rows = [
        replace(
            row(arm, scaled(batch * factor), f"mlp_batch{batch}", gradient_error=1e-3, peak_bytes=batch),
            sizes={"batch": batch, "width": 4},
        )
        for batch in (1, 2)
        for arm, factor in (("autocast", 1), ("amp_fx", 0.1))
    ]
    paths = draw(rows, describe("cpu"), tmp_path)
    assert [path.name for path in paths] == ["ratios_training.png", "accuracy_training.png", "sweep_mlp.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)


def test_the_section_names_ratios_and_where_they_are_from() -> None:
    rows = [row("autocast", QUIET), row("amp_fx", scaled(0.5)), row("fp32", scaled(2))]
    text = page.speed({"hardware": "toy", "processor": "abacus", "torch": "9", "threads": 3}, rows)
    assert "toy" in text
    [line] = [line for line in text.splitlines() if line.startswith("| mlp")]
    assert "1000.0 ms" in line
    assert "0.50" in line
    assert "2.00" in line


def test_the_page_says_how_compiling_grows_with_depth() -> None:
    autocast = TimingRow("depth_layers6", "depth", "training", "autocast", {"layers": 6}, QUIET, 10.0)
    rows = [autocast, replace(autocast, arm="off", compile_cold=12.0, pass_seconds=1.5, nodes=300)]
    text = page.speed({"hardware": "toy", "processor": "abacus", "torch": "9", "threads": 3}, rows)
    assert "| 6 | 300 | 1.50 s | 5.00 ms | 10.0 s | 1.20 |" in text
    assert "Training:" not in text


def test_a_case_that_time_cut_short_is_not_on_the_page() -> None:
    rows = [row("autocast", QUIET, notes=("time was up before round 6",)), row("amp_fx", QUIET)]
    text = page.speed({"hardware": "toy", "processor": "abacus", "torch": "9", "threads": 3}, rows)
    assert "| mlp" not in text


def test_files_of_two_machines_are_not_joined(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    for path, torch_version in zip(paths, ("9", "10"), strict=True):
        write(path, {**describe("cpu"), "torch": torch_version}, [row("autocast", QUIET)])
    with pytest.raises(ValueError, match=r"b\.jsonl has torch '10'"):
        page._joined([str(path) for path in paths])


def test_of_several_files_the_last_one_counts(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a.jsonl", "b.jsonl")]
    write(paths[0], describe("cpu"), [row("autocast", QUIET), row("amp_fx", QUIET, workload="gpt2")])
    write(paths[1], describe("cpu"), [row("autocast", scaled(2))])
    [(_, joined)] = page._joined([str(path) for path in paths])
    assert [(some.workload, some.times) for some in joined] == [("gpt2", QUIET), ("mlp", scaled(2))]


# --- what is run ---


def test_every_case_can_be_built_at_some_size_and_has_arms() -> None:
    for case in CASES.values():
        assert case.mode in MODES
        assert set(case.sizes) <= set(SIZES)
        assert case.sizes
        assert set(case.arms) <= set(ARMS)
        assert (
            case.family == case.name or len({c.name for c in CASES.values() if c.family == case.family}) > 1
        )
        assert {"autocast", "amp_fx"} <= set(arms_for(case.mode, "cpu"))


def test_the_layout_of_parameters_is_an_arm_only_where_something_convolves() -> None:
    arm = ARMS["amp_fx_channels_last"]
    assert CASES["resnet18"].takes(arm)
    assert CASES["gan"].takes(arm)
    assert not CASES["gpt2"].takes(arm)


def test_recipes_of_fp8_are_timed_where_a_case_asks_for_them() -> None:
    for name in ("fp8_by_cost", "fp8_rowwise", "fp8_tensorwise", "fp8_mxfp8"):
        assert ARMS[name].options
        assert CASES["llama_8b_block"].takes(ARMS[name])
        assert CASES["linear_4096x14336"].takes(ARMS[name])
        assert not CASES["gpt2"].takes(ARMS[name])
    assert CASES["gpt2"].takes(ARMS["fp8"])
    assert CASES["llama_8b_block_inference_length16"].takes(ARMS["fp8_rowwise"])
    assert {"fp8", "fp8_rowwise"} <= {*arms_for("inference", "cuda")}
    assert "fp8_mxfp8" not in arms_for("inference", "cuda")
    assert "fp8" not in arms_for("inference", "cpu")
    assert not CASES["llama_8b_block"].takes(ARMS["fp32"])


def test_the_block_of_llama_has_the_linears_of_8b() -> None:
    with torch.device("meta"):
        model, _ = CASES["llama_8b_block"].build(batch=1, length=16)
    shapes = [tuple(p.shape) for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2]
    assert shapes == [
        (4096, 4096),
        (1024, 4096),
        (1024, 4096),
        (4096, 4096),
        *[(14336, 4096)] * 2,
        (4096, 14336),
    ]


def test_the_floor_repeats_the_matmuls_of_a_step_and_nothing_else() -> None:
    x, w = torch.randn(4, 8), torch.randn(8, 8, requires_grad=True)
    repeat = only_matmuls(lambda: F.gelu(x @ w).sum().backward())
    with torch.profiler.profile() as profiled:
        repeat()
    called = [event.name for event in profiled.events() or ()]
    # the gradient of x is not asked for
    assert called.count("aten::mm") == 2
    assert not {"aten::gelu", "aten::gelu_backward", "aten::sum"} & set(called)


def test_memory_is_measured_before_what_compiles_once_more() -> None:
    asked: list[str] = []
    worker: Any = SimpleNamespace(ask=lambda name: asked.append(name) or {}, fields={}, notes=[])
    running._extras(worker, running.Settings(measures=("passes", "warm", "memory")))
    assert asked == ["memory", "warm", "passes"]


def test_an_unknown_case_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "mlpp"])
    assert "unknown case 'mlpp'; valid: gpt2, mlp" in capsys.readouterr().err
