"""Programs whose numbers the pages have, run on less than what the pages show; and other engines."""

from __future__ import annotations

import importlib.util
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import budgets, held_out, learning, long_runs
from benchmarks.__main__ import main
from benchmarks.arms import ARMS, prepare
from benchmarks.learning import TASKS
from benchmarks.long_runs import SHOWN, Run
from benchmarks.results import read_timings
from benchmarks.workloads import build_workload, linears


@pytest.mark.parametrize("name", TASKS)
def test_batches_depend_on_step_and_seed_and_not_on_what_is_held_out(name: str) -> None:
    task = TASKS[name]()
    inputs, targets = task.batch(3, 0)
    assert torch.equal(inputs, task.batch(3, 0)[0])
    assert not torch.equal(inputs, task.batch(4, 0)[0])
    assert not torch.equal(inputs, task.batch(3, 1)[0])
    model = task.make()
    assert math.isfinite(float(model(inputs, targets).detach()))
    untrained = task.measure(model)
    optimizer = torch.optim.AdamW(model.parameters(), task.rate)
    for step in range(30):
        model(*task.batch(step, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    learned = task.measure(model)
    assert learned < untrained if "loss" in task.measured else learned > untrained


def test_tables_and_figures_show_every_arm_and_what_was_skipped(tmp_path: Path) -> None:
    pairs = itertools.product(SHOWN, (0, 1))
    runs = [Run("digits_conv", arm, n, "accuracy", (2.0, 1.0 + n), 0.9 + 0.02 * n, n) for arm, n in pairs]
    row = long_runs.table(runs).splitlines()[2]
    assert row.count("0.9100 (0.9000-0.9200), 1 skipped") == len(SHOWN)
    long_runs.draw(runs, tmp_path / "curves.png")
    assert (tmp_path / "curves.png").stat().st_size > 10_000


@pytest.mark.slow
def test_a_run_in_each_arm_learns() -> None:
    task = TASKS["digits_vit"]()
    losses = {arm: long_runs.train("digits_vit", task, ARMS[arm], [0], 200)[0].curve[-1] for arm in SHOWN}
    assert losses["fp32"] < 1.5
    for arm, loss in losses.items():
        assert loss == pytest.approx(losses["fp32"], rel=0.05), arm


@pytest.mark.slow
def test_an_arm_is_measured_in_its_own_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results.jsonl"
    # it is not compiled, so that the test takes seconds
    wanted = ["--only", "linears_batch1", "--arms", "eager_autocast", "--rounds", "3", "--processes", "1"]
    assert main([*wanted, "--json", str(path)]) == 0
    header, rows = read_timings(path)
    assert (header["rounds"], header["processes"]) == (3, 1)
    [row] = rows
    assert (row.arm, row.compile_cold, row.notes, len(row.times)) == ("eager_autocast", None, (), 3)
    assert min(row.times) > 0
    assert row.peak_bytes is not None
    assert "linears_batch1, inference: batch 1" in capsys.readouterr().out


@pytest.mark.slow
def test_a_budget_in_bytes_moves_less_than_autocast_at_no_more_error() -> None:
    row = budgets.measure("digits_vit", 1.0, 30, None)
    assert row.moved < 0.95
    assert row.predicted <= 1
    assert row.measured < 1.3


@pytest.mark.slow
def test_held_out_text_is_read_in_bf16_in_int8_and_between(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(learning, "HELD_OUT_BYTES", 5000)
    monkeypatch.setattr(held_out, "BUDGETS", (1.2,))
    rows = {row.arm: row for row in held_out.measure(held_out.text(2), 1)}
    assert rows["bf16"].in_int8 == 0 < rows["int8"].in_int8 < rows["all"].in_int8
    assert 0 < rows["bf16"].divergence < rows["int8"].divergence
    assert rows["int8"].loss == pytest.approx(rows["bf16"].loss, rel=0.01)
    held_out.draw(list(rows.values()), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


@pytest.mark.slow
def test_held_out_digits_are_read_by_measured_scales() -> None:
    rows = {row.arm: row for row in held_out.measure(held_out.digits(30), 1)}
    assert rows["measured"].in_int8
    assert rows["measured"].loss == pytest.approx(rows["bf16"].loss, rel=0.02)


# theirs
@pytest.mark.quick_rows("openvino", "x86_int8")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "name",
    [
        # which calibrates for the rates of this CPU
        pytest.param(arm.name, marks=[pytest.mark.int8_rate] * (arm.name == "package_int8"))
        for arm in ARMS.values()
        if arm.engine
    ],
)
def test_an_engine_returns_what_the_model_returns(name: str) -> None:
    arm = ARMS[name]
    missing = [library for library in arm.needs if not importlib.util.find_spec(library)]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    workload = build_workload("linears", linears, batch=4, width=32, layers=2)
    found = prepare(workload, arm, "inference").forward()
    wanted = workload.model(**workload.batch)
    assert found.dtype is torch.float32
    assert (found - wanted).norm() / wanted.norm() < 0.05
