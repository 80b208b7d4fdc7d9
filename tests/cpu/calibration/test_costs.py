"""What a calibration takes, in training steps: memory, which is counted, and processor time."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import amp_fx
from holding import peak_bytes
from small_models import GPT, tokens

BATCH = tokens(0, 8, 128)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return GPT(layers=4, width=128, heads=4, length=128)


def step(model: nn.Module) -> None:
    optimizer = torch.optim.Adam(model.parameters())
    model(*BATCH).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def calibrate(model: nn.Module, batches: int = 1) -> None:
    amp_fx.calibrate(model, [BATCH] * batches, profile="off")


def test_a_calibration_holds_five_times_what_a_training_step_does(model: nn.Module) -> None:
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    calibrate(model)
    ours, theirs = (peak_bytes(run) + parameters for run in (lambda: calibrate(model), lambda: step(model)))
    print(f"{ours / 1e6:.0f} MB, a training step {theirs / 1e6:.0f} MB: {ours / theirs:.2f}")
    # two derivatives of a loss keep 3.4 times as much, whoever takes them
    assert ours <= 5.4 * theirs


@pytest.mark.slow
def test_a_batch_takes_at_most_ten_training_steps(model: nn.Module) -> None:
    def seconds(run: Callable[[], None]) -> float:
        start = time.process_time()
        run()
        return time.process_time() - start

    step(model)
    # turns, so that a busy machine slows all of them; Dynamo's part is the same with one batch and with three
    turns = [
        [seconds(run) for run in (lambda: step(model), lambda: calibrate(model), lambda: calibrate(model, 3))]
        for _ in range(3)
    ]
    one, single, triple = (min(column) for column in zip(*turns, strict=True))
    print(f"{(triple - single) / 2 / one:.1f} steps a batch, {single / one:.1f} with Dynamo's part")
    assert (triple - single) / 2 <= 10 * one
