"""Who is told that scaling is missing, or that a scaler is ignored."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_fx.errors import ScalingWarning
from amp_fx.scaling import unscaled
from scaled import Net, batch, compiled, fp32_gradients, gradients_are, loss_of, new_scaler, sgd

MISSING = r"'scaler': 'default'.*amp_fx\.GradScaler"


@pytest.fixture(autouse=True)
def not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(unscaled, "_state", unscaled._Unscaled())


def backward(model: nn.Module, **options: Any) -> None:
    loss_of(compiled(model, **{"scaler": None, **options}), batch()).backward()


@pytest.mark.usefixtures("op_by_op")
def test_fp16_without_a_scaler_warns_once_at_the_first_step_and_names_the_fix() -> None:
    class Other(Net):
        pass

    model = Net()
    optimizer = sgd(model)
    backward(model)
    with pytest.warns(ScalingWarning, match=MISSING) as caught:
        optimizer.step()
    assert Path(caught[0].filename) == Path(__file__), "the line that steps"
    other = Other()
    backward(other)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
        sgd(other).step()


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_own_scaler_works_around_a_graph_without_a_scaler(fused: bool) -> None:
    model, x = Net(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    # schedulers wrap the step
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scaler.scale(loss_of(compiled(model, scaler=None), x)).backward()
        scaler.unscale_(optimizer)
        assert gradients_are(model, fp32_gradients(model, lambda m: loss_of(m, x)))
        scaler.step(optimizer)
        scaler.update()
        # the question is answered for good
        optimizer.step()


def test_a_disabled_scaler_of_torch_does_not_scale() -> None:
    model = Net()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", enabled=False)
    backward(model)
    with pytest.warns(ScalingWarning, match=MISSING):
        scaler.step(optimizer)


def test_optimizers_of_other_models_are_not_asked() -> None:
    model, other = Net(), Net()
    backward(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(other, batch()).backward()
        sgd(other).step()
    with pytest.warns(ScalingWarning, match=MISSING):
        sgd(model).step()


def test_a_skipped_step_leaves_the_question_open() -> None:
    model = Net()
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=128.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for bad in (True, False):
            scaler.scale(loss_of(compiled(model, scaler=None), batch(bad))).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


@pytest.mark.usefixtures("op_by_op")
def test_inference_and_bf16_do_not_warn() -> None:
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.no_grad():
            compiled(model, scaler=None)(batch())
        backward(model, dtype="bfloat16")
        sgd(model).step()


def test_nobody_looks_at_all_objects_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> list[Any]:
        raise AssertionError("all objects are asked for")

    for name in ("get_objects", "get_referrers"):
        monkeypatch.setattr(gc, name, refuse)
    model = Net()
    backward(model)
    with pytest.warns(ScalingWarning, match=MISSING):
        sgd(model).step()


def test_parameters_that_wait_for_a_step_may_die() -> None:
    backward(Net())
    gc.collect()
    assert [memory() for memory in unscaled._state.parameters.values()] == [None] * 4


def test_a_compiled_step_is_a_step() -> None:
    model = Net()
    step = torch.compile(sgd(model).step, backend="eager")
    backward(model)
    with pytest.warns(ScalingWarning, match=MISSING):
        step()


@pytest.mark.parametrize("given", [True, False])
def test_under_an_fp16_autocast_of_the_users_scaling_is_theirs_and_an_ignored_scaler_is_said_once(
    given: bool,
) -> None:
    model, x, scaler = Net(), batch(), new_scaler()
    optimizer = sgd(model)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return loss_of(compiled(model, scaler=scaler.name if given else None), x)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loss = forward()
        torch._dynamo.reset()
        forward()
    said = [w for w in caught if issubclass(w.category, ScalingWarning)]
    assert len(said) == given
    for warning in said:
        assert "is ignored" in str(warning.message)
        assert "torch.autocast('cpu', torch.float16)" in str(warning.message)
        assert Path(warning.filename).name == "scaled.py", "the line that calls the model"
    scaled = scaler.scale(loss)
    assert scaled.item() == pytest.approx(128.0 * loss.item())
    scaled.backward()
    scaler.unscale_(optimizer)
    assert gradients_are(model, fp32_gradients(model, lambda m: loss_of(m, x)))


@pytest.mark.usefixtures("op_by_op")
def test_under_a_bf16_autocast_there_is_nothing_to_scale() -> None:
    keep = new_scaler()
    with warnings.catch_warnings(), torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("error")
        loss_of(compiled(Net(), scaler=keep.name, dtype="auto"), batch()).backward()
