"""What a terminal is told while a model is calibrated and planned, and what a file is."""

from __future__ import annotations

import io
import sys

import pytest
import torch
from torch import nn

from amp_fx.instruments import progress
from support.models.calibrated import calibrated


class Terminal(io.StringIO):
    def __init__(self, is_one: bool) -> None:
        super().__init__()
        self.is_one = is_one

    def isatty(self) -> bool:
        return self.is_one


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("is_one", [True, False])
def test_each_phase_is_said_on_a_terminal_and_nowhere_else(
    is_one: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(sys, "stderr", terminal := Terminal(is_one))
    net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    found = calibrated(net, torch.randn(16, 32))
    first = terminal.getvalue()
    found.plan()
    said = [part.removeprefix("\033[K") for part in terminal.getvalue().split("\r")]
    phases = [
        "calibrate: ranges",
        "calibrate: ranges of values, 0 of 2 batches: forward",
        "calibrate: what roundings",
        "calibrate: what roundings do, 1 of 2 batches: backward",
        "plan: prices",
        "plan: runs",
        "plan: compiles",
    ]
    assert [any(part.startswith(phase) for part in said) for phase in phases] == [is_one] * len(phases)
    assert ("plan" in first) is False
    # nothing is left behind
    assert not is_one or not said[-1].strip()
