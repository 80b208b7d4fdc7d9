"""What is told: once, that no graph has reached amp_fx; on a terminal, that something takes long."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends import registry

import amp_fx
import amp_fx.compiler.backend
from amp_fx._torch import dynamo as hooks
from amp_fx.compiler import notices
from amp_fx.instruments import progress
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.label import ReasonKind
from support.models.small import Recurrent
from support.torch_versions import UP_TO_2_13


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which no graph has arrived; graphs run op by op."""
    monkeypatch.setattr("amp_fx.compiler.compiling.lower", lambda gm, *_: gm.forward)
    amp_fx.compiler.backend.listen()
    yield
    # when the tests end, there is nothing to tell
    notices.graph_arrived()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [row.getMessage() for row in caplog.records if row.levelno == logging.WARNING]


class Apart(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        # typed as if disable took the method, not the function
        return self.last(self.recur(self.first(x).relu()))  # pyright: ignore[reportCallIssue]

    @torch.compiler.disable
    def recur(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


class Left(nn.Linear):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class OwnSequential(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="amp_fx")
    return model


def train(model: nn.Module, x: Tensor) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        model(x).sum().backward()
        optimizer.step()


ENCODER = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


@pytest.mark.parametrize("model", [nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 8), ENCODER], ids=type)
def test_a_model_of_torchs_own_compiled_in_place_is_told_at_the_first_step(caplog: Any, model: Any) -> None:
    with amp_fx.record() as recording:
        train(compiled_in_place(model), torch.randn(2, 4, 8))
    assert bool(recording.plans) is not UP_TO_2_13
    words = (
        "an optimizer has stepped, but no graph has reached amp_fx",
        "a subclass with a forward of your own",
    )
    assert [all(word in text for word in words) for text in warned(caplog)] == [True] * UP_TO_2_13


def test_training_what_is_compiled_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    train(compiled_in_place(OwnSequential(nn.Linear(8, 8))), torch.randn(2, 8))
    hooks.EXIT.call_listeners()
    assert warned(caplog) == []


def test_explaining_tells_nothing_and_counts_for_nothing(caplog: pytest.LogCaptureFixture) -> None:
    amp_fx.explain(OwnSequential(nn.Linear(8, 8)), torch.randn(2, 8))
    assert warned(caplog) == []
    train(compiled_in_place(Left(8, 8)), torch.randn(2, 8))
    assert len(warned(caplog)) == 1


def test_a_plan_that_is_checked_by_a_compiled_step_tells_nothing(caplog: Any, monkeypatch: Any) -> None:
    # looked up by other tests
    monkeypatch.delitem(registry._COMPILER_FNS, "amp_fx", raising=False)
    amp_fx.calibrate(nn.Linear(8, 8), torch.randn(2, 8), torch.sum).plan()
    hooks.EXIT.call_listeners()
    assert not [text for text in warned(caplog) if "no graph has reached" in text]


@pytest.mark.parametrize("way", ["torch.compile", "wrap_top_frame", "subclass"])
def test_the_remedies_that_are_named_compile_a_model_of_torchs_own(way: str) -> None:
    kind: Callable[..., nn.Module] = OwnSequential if way == "subclass" else nn.Sequential
    model, x = kind(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)
    with amp_fx.record() as recording, torch._dynamo.config.patch(wrap_top_frame=way == "wrap_top_frame"):
        run = torch.compile(model, backend="amp_fx") if way == "torch.compile" else compiled_in_place(model)
        run(x)
    assert [row.op for row in recording.plans[0].nodes] == ["linear", "relu"]


@pytest.mark.parametrize("remedied", [False, True])
def test_what_is_around_a_recurrent_layer_is_compiled(remedied: bool) -> None:
    model, x = (Apart if remedied else Recurrent)(late=True), torch.randn(2, 4, 8)
    with amp_fx.record() as recording:
        torch.compile(model, backend="amp_fx")(x).sum().backward()
    assert [[row.op for row in plan.nodes] for plan in recording.plans] == [["linear", "relu"], ["linear"]]
    assert all(parameter.grad is not None for parameter in model.parameters())
    words = "Dynamo does not support RNN, GRU, or LSTM"
    assert remedied or recording.plans[0].graph_break.startswith(words)


def test_a_deep_copy_of_a_model_compiled_in_place_is_not_compiled_and_one_that_is_compiled_again_is() -> None:
    from torch.optim.swa_utils import AveragedModel

    model, x = compiled_in_place(OwnSequential(nn.Linear(8, 8))), torch.randn(2, 8)
    average = AveragedModel(model)
    with amp_fx.record() as recording:
        average(x)
        assert recording.plans == []
        compiled_in_place(average.module)
        average(x)
    assert len(recording.plans) == 1


DISABLED = """
import torch, amp_fx
net = torch.nn.Linear(4, 4); net.forward = torch.compiler.disable(net.forward)
net.compile(backend='amp_fx')
with torch.inference_mode():
    net(torch.ones(2, 4))
"""


@pytest.mark.slow
def test_a_process_that_ends_without_a_graph_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", DISABLED], capture_output=True, text=True, check=True)
    assert done.stderr.count("the process ends, but no graph has reached amp_fx") == 1


@pytest.mark.parametrize("backend", ["amp_fx", "eager"])
def test_it_is_told_once_and_only_where_amp_fx_was_asked(backend: str, caplog: Any, monkeypatch: Any) -> None:
    if backend != "amp_fx":
        # looked up by other tests
        monkeypatch.delitem(registry._COMPILER_FNS, "amp_fx", raising=False)
    (model := Left(4, 4)).compile(backend=backend)
    train(model, torch.ones(2, 4))
    for _ in range(2):
        hooks.EXIT.call_listeners()
    assert len(warned(caplog)) == (backend == "amp_fx")


def test_a_terminal_sees_a_line_that_goes_again_if_it_takes_long(monkeypatch: Any, capsys: Any) -> None:
    with progress.progress("counting"):
        pass
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.progress("counting"):
        pass
    assert capsys.readouterr().err == "", "no terminal, or quick"
    monkeypatch.setattr(progress, "PATIENCE", 0.01)
    before = threading.active_count()
    with progress.progress("counting"):
        time.sleep(0.2)
    said = capsys.readouterr().err
    assert "counting" in said
    assert said.endswith("\033[K")
    assert threading.active_count() == before


class Region(nn.Module):
    """A linear for which autocast is off, in the graph or after a break in it."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.breaks, self.inner = breaks, nn.Linear(8, 8)

    def part(self, x: Tensor) -> Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return self.inner(x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.part(x)


@pytest.mark.parametrize(
    ("model", "around", "told"),
    [
        (Region(breaks=False), None, 0),
        (Region(breaks=True), None, 1),
        (OwnSequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"enabled": False}, 1),
        (OwnSequential(nn.Linear(8, 8), nn.Linear(8, 8)), {"dtype": torch.bfloat16}, 0),
        (OwnSequential(nn.ReLU()), {"enabled": False}, 0),
    ],
    ids=["a region", "a region after a break", "around it", "one that is on", "nothing to lower"],
)
def test_it_is_told_where_autocast_is_off_around_what_is_lowered(
    model: nn.Module, around: Any, told: int, caplog: pytest.LogCaptureFixture
) -> None:
    amp_fx.reset()
    torch._dynamo.reset()
    run = torch.compile(model, backend="amp_fx", options={"profile": "off"})
    for size in (2, 3):
        with contextlib.nullcontext() if around is None else torch.autocast("cpu", **around):
            run(torch.randn(size, 8))
    assert sum("enabled=False" in text for text in warned(caplog)) == told


@pytest.mark.parametrize(
    ("mode", "rates", "launch", "why"),
    [
        (
            torch.inference_mode,
            (1e12, 1.0e12, 1.1e12),
            1e-6,
            ReasonKind.LEVEL_DEARER.sentence.format(policy="int8"),
        ),
        (torch.no_grad, (1e12, 1.0e12, 1.1e12), 1e-6, ReasonKind.LEVEL_DEARER.sentence.format(policy="int8")),
        (torch.no_grad, (1e9, 1.1e9, 1.2e9), 1e-3, "slow"),
    ],
)
def test_a_policy_below_16_bits_that_runs_nothing_there_is_told_once_with_the_reason(
    mode: Any,
    rates: tuple[float, ...],
    launch: float,
    why: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    peak: dict[str, float] = dict(zip(("float32", "bfloat16", "int8"), rates, strict=True))
    DeviceProfile("slow", "cpu", peak, 1e9, launch).save(profile := tmp_path / "profile.json")
    options: dict[str, Any] = {"policy": "int8", "profile": str(profile)}
    for width in (64, 32):
        model = OwnSequential(
            nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 16)
        )
        torch._dynamo.reset()
        with mode():
            torch.compile(model, backend="amp_fx", options=options)(torch.randn(8, width))
    [said] = warned(caplog)
    assert all(each in said for each in ("0/0", "int8", why))
