"""What Dynamo does not compile is told in the log, once: functions that it gives up, and models of torch's own."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.backends import registry
from torch._dynamo.exc import BackendCompilerFailed, Unsupported

import amp_fx
import amp_fx.backend
from amp_fx._torch import hooks
from amp_fx.graphs import uncompiled


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process in which nothing was told yet; graphs run op by op."""
    hooks.remove_all()
    monkeypatch.setattr(uncompiled, "_told", set[str]())
    monkeypatch.setattr("amp_fx.compiling.lower", lambda gm, *_: gm.forward)
    amp_fx.backend.listen()
    yield
    hooks.remove_all()
    amp_fx.backend.listen()
    # when the tests end, there is nothing to tell
    uncompiled._settle()


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [row.getMessage() for row in caplog.records if row.levelno == logging.WARNING]


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.RNNBase]) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(8, 8), kind(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cell(x)[0])


class LateRecurrent(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(self.cell(x)[0])


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = Recurrent(nn.LSTM), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(x))


class OwnClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def compiled(model: nn.Module) -> Callable[..., Tensor]:
    return torch.compile(model, backend="amp_fx")


def compiled_in_place(model: nn.Module) -> Callable[..., Tensor]:
    model.compile(backend="amp_fx")
    return model


@pytest.mark.parametrize("compile", [compiled, compiled_in_place])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_function_with_a_recurrent_layer_is_told_once_with_dynamos_reason_and_remedy(
    caplog: pytest.LogCaptureFixture, kind: type[nn.RNNBase], compile: Callable[..., Callable[..., Tensor]]
) -> None:
    model = compile(Recurrent(kind))
    with amp_fx.record() as recording:
        for batch in (2, 3):
            model(torch.randn(batch, 4, 8))
    assert recording.plans == []
    (text,) = warned(caplog)
    assert "forward runs eagerly, in the dtypes of its weights" in text
    assert "Attempted to wrap RNN, GRU, or LSTM [" in text
    assert f"{__file__}:" in text
    assert "Call the layer in a method of its own with @torch.compiler.disable" in text


def test_the_rest_of_a_function_is_told_and_named_in_the_plan(caplog: pytest.LogCaptureFixture) -> None:
    with amp_fx.record() as recording:
        compiled(LateRecurrent(nn.LSTM))(torch.randn(2, 4, 8))
    (plan,) = recording.plans
    assert [row.op for row in plan.nodes] == ["linear", "relu"]
    (text,) = warned(caplog)
    assert "the rest of forward runs eagerly" in text
    assert "@torch.compiler.disable" in text
    assert plan.graph_break.startswith(
        "Attempted to wrap RNN, GRU, or LSTM; the rest of forward runs eagerly ["
    )


def test_code_around_what_dynamo_gives_up_is_compiled_and_only_that_is_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with amp_fx.record() as recording:
        compiled(Around())(torch.randn(2, 4, 8))
    assert len(recording.plans) == 1
    (text,) = warned(caplog)
    assert "forward runs eagerly" in text


def test_a_recurrent_layer_alone_is_told(caplog: pytest.LogCaptureFixture) -> None:
    compiled(nn.LSTM(8, 8))(torch.randn(2, 4, 8))
    # what Dynamo gave up says more than that there is no graph
    hooks.EXIT._call()
    (text,) = warned(caplog)
    assert "the model runs eagerly" in text


def test_what_is_an_error_is_not_told_as_well(caplog: pytest.LogCaptureFixture) -> None:
    whole = torch.compile(Recurrent(nn.LSTM), backend="amp_fx", fullgraph=True)
    with pytest.raises(Unsupported):
        whole(torch.randn(2, 4, 8))
    refused = torch.compile(OwnClass(), backend="amp_fx", options={"polcy": 1})
    with pytest.raises(BackendCompilerFailed, match="polcy"):
        refused(torch.randn(2, 8))
    assert warned(caplog) == []


def test_functions_compiled_for_other_backends_are_not_ours_to_tell(caplog: pytest.LogCaptureFixture) -> None:
    compiled(OwnClass())(torch.randn(2, 8))
    torch.compile(Recurrent(nn.LSTM), backend="eager")(torch.randn(2, 4, 8))
    torch.compile(Recurrent(nn.GRU), backend=lambda gm, _: gm)(torch.randn(2, 4, 8))
    assert warned(caplog) == []


def test_dynamos_reset_does_not_end_listening(caplog: pytest.LogCaptureFixture) -> None:
    torch.compiler.reset()
    torch.compiler.reset()
    compiled(Recurrent(nn.LSTM))(torch.randn(2, 4, 8))
    assert len(warned(caplog)) == 1


def test_a_hook_of_ours_in_a_compiled_step_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    model = OwnClass()
    model(torch.randn(2, 8)).sum().backward()
    steps = list[object]()
    hooks.AFTER_STEP.listen(lambda *given: steps.append(given[0]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.compile(optimizer.step, backend="amp_fx")()
    assert steps == [optimizer]
    assert not [text for text in warned(caplog) if "not compiled" in text]


def test_explaining_tells_nothing_and_listening_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Recurrent(nn.LSTM), torch.randn(2, 4, 8)
    amp_fx.explain(model, x)
    assert warned(caplog) == []
    compiled(model)(x)
    assert len(warned(caplog)) == 1


def train(model: nn.Module, x: Tensor, steps: int = 2) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Linear(8, 8), nn.ReLU()),
        nn.Linear(8, 8),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    ],
    ids=lambda model: type(model).__name__,
)
def test_a_model_of_torchs_own_that_is_compiled_in_place_is_told_at_the_first_step(
    caplog: pytest.LogCaptureFixture, model: nn.Module
) -> None:
    with amp_fx.record() as recording:
        compiled_in_place(model)
        train(model, torch.randn(2, 4, 8))
    assert recording.plans == []
    (text,) = warned(caplog)
    assert "no graph has reached amp_fx" in text
    assert "a subclass with a forward of your own" in text


def test_training_what_is_compiled_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    model = OwnClass()
    compiled_in_place(model)
    train(model, torch.randn(2, 8))
    assert warned(caplog) == []


def test_training_in_a_process_that_does_not_use_amp_fx_tells_nothing(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(registry._COMPILER_FNS, "amp_fx", raising=False)
    train(OwnClass(), torch.randn(2, 8))
    assert warned(caplog) == []


class OwnSequential(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


@pytest.mark.parametrize("way", ["torch.compile", "wrap_top_frame", "subclass"])
def test_the_remedies_that_are_named_compile_a_model_of_torchs_own(way: str) -> None:
    kind: Callable[..., nn.Module] = OwnSequential if way == "subclass" else nn.Sequential
    model, x = kind(nn.Linear(8, 8), nn.ReLU()), torch.randn(2, 8)
    with amp_fx.record() as recording, torch._dynamo.config.patch(wrap_top_frame=way == "wrap_top_frame"):
        run = compiled(model) if way == "torch.compile" else compiled_in_place(model)
        run(x)
    assert [row.op for row in recording.plans[0].nodes] == ["linear", "relu"]


def test_the_remedy_for_recurrent_layers_compiles_what_is_around_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Apart(LateRecurrent):
        def forward(self, x: Tensor) -> Tensor:
            # typed as if disable took the method, not the function
            return self.last(self.recur(self.first(x).relu()))  # pyright: ignore[reportCallIssue]

        @torch.compiler.disable
        def recur(self, x: Tensor) -> Tensor:
            return self.cell(x)[0]

    model, x = Apart(nn.LSTM), torch.randn(2, 4, 8)
    with amp_fx.record() as recording:
        compiled(model)(x).sum().backward()
    assert [[row.op for row in plan.nodes] for plan in recording.plans] == [["linear", "relu"], ["linear"]]
    assert warned(caplog) == []
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_deep_copy_of_a_model_compiled_in_place_is_not_compiled_and_one_that_is_compiled_again_is() -> None:
    from torch.optim.swa_utils import AveragedModel

    model, x = OwnClass(), torch.randn(2, 8)
    compiled_in_place(model)
    average = AveragedModel(model)
    with amp_fx.record() as recording:
        average(x)
        assert recording.plans == []
        average.module.compile(backend="amp_fx")
        average(x)
    assert len(recording.plans) == 1


IN_PLACE = """
import torch, amp_fx
net = torch.nn.Sequential(torch.nn.Linear(4, 4))
net.compile(backend='amp_fx')
with torch.inference_mode():
    net(torch.ones(2, 4))
"""


def test_a_process_that_ends_without_a_graph_says_so() -> None:
    done = subprocess.run([sys.executable, "-c", IN_PLACE], capture_output=True, text=True, check=True)
    assert done.stderr.count("the process ends, but no graph has reached amp_fx") == 1


@pytest.mark.parametrize(("backend", "told"), [("amp_fx", 1), ("eager", 0)])
def test_at_the_end_is_told_what_was_not_told_before_if_amp_fx_was_asked_for(
    backend: str, told: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend != "amp_fx":
        # looked up by other tests
        monkeypatch.delitem(registry._COMPILER_FNS, "amp_fx", raising=False)
    model = nn.Sequential(nn.Linear(4, 4))
    model.compile(backend=backend)
    model(torch.ones(2, 4))
    for _ in range(2):
        hooks.EXIT._call()
    assert len(warned(caplog)) == told
