"""What a calibration takes, in training steps: memory and multiplications, both counted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

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


def test_a_batch_multiplies_at_most_as_much_as_seven_training_steps(model: nn.Module) -> None:
    def flops(run: Callable[[], None]) -> int:
        with profile(activities=[ProfilerActivity.CPU], with_flops=True) as found:
            run()
        return sum(event.flops for event in found.key_averages())

    # what Dynamo has run is the same with one batch and with two
    runs = (lambda: step(model), lambda: calibrate(model), lambda: calibrate(model, 2))
    once, single, double = map(flops, runs)
    print(f"{(double - single) / once:.1f} steps a batch")
    assert 0 < double - single <= 7 * once
