"""A scaler's numbers in TensorBoard and in logs of dicts; no graph is needed to have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import amp_fx
from amp_fx.integrations.metrics import ScalerMetrics, TensorBoardMetrics


class Scaler(amp_fx.GradScaler):
    """Knows the names that compiled graphs would tell it."""

    def first_nonfinite(self) -> list[str]:
        return ["weight", "bias"]


class Logger:
    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def log(self, data: dict[str, Any]) -> None:
        self.rows.append(data)


def train(scaler: amp_fx.GradScaler, metrics: ScalerMetrics, bad: set[int], steps: int = 4) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1)
    for step in range(1, steps + 1):
        x = torch.ones(1, 2) * (float("inf") if step in bad else 1.0)
        scaler.scale(model(x).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        metrics(step)
        optimizer.zero_grad()


def test_an_object_with_log_gets_scale_skipped_steps_and_the_first_bad_parameter() -> None:
    scaler, logger = Scaler("cpu", init_scale=8.0), Logger()
    train(scaler, ScalerMetrics(scaler, logger), bad={2})
    assert logger.rows == [
        {"amp_fx/loss_scale": 8.0, "amp_fx/skipped_steps": 0},
        {"amp_fx/loss_scale": 4.0, "amp_fx/skipped_steps": 1, "amp_fx/first_nonfinite": "weight"},
        {"amp_fx/loss_scale": 4.0, "amp_fx/skipped_steps": 1},
        {"amp_fx/loss_scale": 4.0, "amp_fx/skipped_steps": 1},
    ]


def test_a_scaler_that_no_graph_uses_has_no_names() -> None:
    scaler, rows = amp_fx.GradScaler("cpu", init_scale=8.0), []
    train(scaler, ScalerMetrics(scaler, rows.append), bad={1}, steps=1)
    assert rows == [{"amp_fx/loss_scale": 4.0, "amp_fx/skipped_steps": 1}]


def test_a_function_gets_every_second_step_under_another_prefix() -> None:
    scaler, rows = amp_fx.GradScaler("cpu", init_scale=8.0), []
    train(scaler, ScalerMetrics(scaler, rows.append, every=2, prefix="train/"), bad=set())
    assert rows == [{"train/loss_scale": 8.0, "train/skipped_steps": 0}] * 2


def test_tensorboard_has_curves_and_names(tmp_path: Path) -> None:
    scaler = Scaler("cpu", init_scale=8.0)
    with SummaryWriter(str(tmp_path)) as writer:
        train(scaler, TensorBoardMetrics(scaler, writer), bad={2})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    scale = events.Scalars("amp_fx/loss_scale")
    assert [(event.step, event.value) for event in scale] == [(1, 8.0), (2, 4.0), (3, 4.0), (4, 4.0)]
    assert [event.value for event in events.Scalars("amp_fx/skipped_steps")] == [0, 1, 1, 1]
    (name,) = events.Tensors("amp_fx/first_nonfinite/text_summary")
    assert name.step == 2
    assert name.tensor_proto.string_val == [b"weight"]


def test_bad_arguments_are_errors() -> None:
    scaler = amp_fx.GradScaler("cpu")
    with pytest.raises(amp_fx.OptionsError, match=r"every .*1.*0"):
        ScalerMetrics(scaler, print, every=0)
    nothing: Any = 3
    with pytest.raises(amp_fx.OptionsError, match=r"log\(dict\)"):
        ScalerMetrics(scaler, nothing)
