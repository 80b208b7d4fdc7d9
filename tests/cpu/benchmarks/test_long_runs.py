"""Long runs: what is trained, and how what came out is shown."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from benchmarks import long_runs
from benchmarks.arms import ARMS
from benchmarks.learning import TASKS
from benchmarks.long_runs import SHOWN, Run


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
    runs = [
        Run("digits_conv", arm, seed, "accuracy", (2.0, 1.0 + seed), 0.9 + 0.02 * seed, seed)
        for arm in SHOWN
        for seed in (0, 1)
    ]
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
