"""Who steps parameters whose gradients were scaled inside a backward: their own scaler, and no other."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amp_fx import GradScaler
from amp_fx.errors import ScalerError, ScalingWarning
from amp_fx.scaling import unscaled
from scaled import Net, batch, compiled, loss_of, new_scaler, same, sgd, weights


@pytest.fixture(autouse=True)
def not_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(unscaled, "_state", unscaled._Unscaled())


def step(model: nn.Module, scaler: Any, optimizer: torch.optim.Optimizer, run: Any = None) -> None:
    """One step of the usual loop."""
    optimizer.zero_grad()
    scaler.scale(loss_of(model if run is None else run, batch())).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("init_scale", [128.0, 2.0**16])
def test_torchs_scaler_around_a_graph_that_scales_is_refused_at_its_first_step(
    fused: bool, init_scale: float
) -> None:
    model, keep = Net(), new_scaler(init_scale=init_scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    before = weights(model)
    with pytest.raises(ScalerError, match=r"amp_fx\.GradScaler"):
        step(model, torch.amp.GradScaler("cpu", init_scale), optimizer, compiled(model))
    assert same(model, before)
    # the remedy that it names
    step(model, keep, optimizer, compiled(model))
    assert not same(model, before)


def test_what_unscales_before_it_clips_is_refused_as_well() -> None:
    model, keep, scaler = Net(), new_scaler(), torch.amp.GradScaler("cpu", 128.0)
    optimizer = sgd(model)
    scaler.scale(loss_of(compiled(model), batch())).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerError, match=keep.name):
        scaler.step(optimizer)


def test_a_scaler_of_another_name_is_refused() -> None:
    model, keep, other = Net(), new_scaler(), new_scaler(name="other")
    with pytest.raises(ScalerError, match=r"'other'.*'default'"):
        step(model, other, sgd(model), compiled(model))
    del keep


@pytest.mark.parametrize("was_used", [False, True])
def test_a_scaler_whose_name_a_later_one_has_taken_is_refused(was_used: bool) -> None:
    model, first = Net(), new_scaler()
    optimizer, run = sgd(model), compiled(model)
    if was_used:
        step(model, first, optimizer, run)
    later = new_scaler()
    with pytest.raises(ScalerError, match="Two scalers"):
        step(model, first, optimizer, run)
    del later


def test_two_scalers_for_two_networks_and_one_for_both_are_as_they_were() -> None:
    first, second, a, b = Net(), Net(), new_scaler(name="a"), new_scaler(name="b")
    run_first, run_second = compiled(first, scaler="a"), compiled(second, scaler="b")
    for _ in range(2):
        step(first, a, sgd(first), lambda x: run_second(run_first(x)))
        step(second, b, sgd(second), run_second)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    step(first, a, both, lambda x: run_second(run_first(x)))


def test_torchs_scaler_may_step_other_models_and_the_same_one_without_the_graph() -> None:
    model, other, scaler, theirs = Net(), Net(), new_scaler(), torch.amp.GradScaler("cpu", 128.0)
    step(model, scaler, sgd(model), compiled(model))
    step(other, theirs, sgd(other))
    step(model, theirs, sgd(model))
    # in a step of its own, beside one that is not over
    scaler.scale(loss_of(compiled(model), batch())).backward()
    step(other, theirs, sgd(other))


def test_scalers_that_are_disabled_neither_scale_nor_are_refused() -> None:
    torch._dynamo.reset()
    model, disabled = Net(), new_scaler(enabled=False)
    before = weights(model)
    step(model, torch.amp.GradScaler("cpu", 128.0), sgd(model), compiled(model))
    step(model, disabled, sgd(model), compiled(model))
    assert not same(model, before)


@pytest.mark.usefixtures("op_by_op")
def test_under_an_fp16_autocast_of_the_users_torchs_scaler_is_right() -> None:
    torch._dynamo.reset()
    model, keep = Net(), new_scaler()

    def run(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            return compiled(model)(x)

    with pytest.warns(ScalingWarning, match="is ignored"):
        step(model, torch.amp.GradScaler("cpu", 128.0), sgd(model), run)
    del keep


def test_torch_is_as_it_was_where_no_graph_scales_and_again_when_the_last_scaler_is_gone() -> None:
    script = """
import torch, amp_fx
print(torch.amp.GradScaler.step.__module__)
scaler = amp_fx.GradScaler("cpu")
print(torch.amp.GradScaler.step is amp_fx.GradScaler.__mro__[1].step, hasattr(torch.amp.GradScaler.step, "__wrapped__"))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["torch.amp.grad_scaler", "True", "False"]
    gc.collect()
    model, scaler, second = Net(), new_scaler(), new_scaler(name="second")
    step(model, scaler, sgd(model), compiled(model))
    step(model, second, sgd(model), compiled(model, scaler="second"))
    changed: Any = torch.amp.GradScaler.step
    assert hasattr(changed, "__wrapped__")
    del scaler
    gc.collect()
    assert torch.amp.GradScaler.step is changed
    del second
    gc.collect()
    assert torch.amp.GradScaler.step is inspect.unwrap(changed)


def test_an_optimizer_that_is_stepped_without_the_graphs_scaler_warns_once() -> None:
    torch._dynamo.reset()
    model, scaler = Net(), new_scaler()
    optimizer, run = sgd(model), compiled(model)
    scaler.scale(loss_of(run, batch())).backward()
    with pytest.warns(ScalingWarning, match=r"scaler\.step") as caught:
        optimizer.step()
    assert Path(caught[0].filename) == Path(__file__), "the line that steps"
    loss_of(run, batch()).backward()
    optimizer.step()


def test_a_loop_that_looks_by_itself_is_not_warned() -> None:
    torch._dynamo.reset()
    model, scaler = Net(), new_scaler()
    optimizer = sgd(model)
    scaler.scale(loss_of(compiled(model), batch())).backward()
    scaler.unscale_(optimizer)
    if not scaler.last_found_inf:
        optimizer.step()
    scaler.update()


def test_a_loop_with_the_graphs_scaler_is_not_warned() -> None:
    torch._dynamo.reset()
    model, scaler = Net(), GradScaler("cpu", 128.0)
    for _ in range(2):
        step(model, scaler, sgd(model), compiled(model))
