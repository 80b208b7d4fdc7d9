"""Who scales the gradients of a graph in fp16: one scaler, its own; another is an error, none is a warning."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx._torch import BEFORE_STEP
from amp_fx.errors import ScalerError, ScalingWarning
from scaled import (
    OPTIONS,
    batch,
    compiled,
    fp32_gradients,
    gradients_are,
    loss_of,
    new_scaler,
    same,
    sgd,
    weights,
)
from small_models import UpDown


@pytest.fixture(autouse=True)
def told_nothing() -> None:
    """As in a new process."""
    torch._dynamo.reset()
    amp_fx.reset()


def step(model: nn.Module, scaler: Any, optimizer: torch.optim.Optimizer, run: Any = None) -> None:
    """One step of the usual loop."""
    optimizer.zero_grad()
    scaler.scale(loss_of(model if run is None else run, batch())).backward()
    scaler.step(optimizer)
    scaler.update()


# ---- two scalers ----


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("init_scale", [128.0, 2.0**16])
def test_torchs_scaler_around_a_graph_that_scales_takes_no_step(fused: bool, init_scale: float) -> None:
    model, keep, theirs = UpDown(), new_scaler(init_scale=init_scale), torch.amp.GradScaler("cpu", init_scale)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    before, run = weights(model), compiled(model)

    def steps() -> None:
        # what the two scales make inf is skipped by torch's scaler itself
        for _ in range(40):
            step(model, theirs, optimizer, run)

    with pytest.raises(ScalerError, match=r"amp_fx\.GradScaler 'default'"):
        steps()
    assert same(model, before)
    assert theirs.get_scale() >= 1.0
    # the remedy that it names
    step(model, keep, optimizer, run)
    assert not same(model, before)


def test_what_unscales_before_it_clips_is_refused_as_well() -> None:
    model, keep, scaler = UpDown(), new_scaler(), torch.amp.GradScaler("cpu", 128.0)
    optimizer = sgd(model)
    scaler.scale(loss_of(compiled(model), batch())).backward()
    scaler.unscale_(optimizer)
    with pytest.raises(ScalerError, match=keep.name):
        scaler.step(optimizer)


@pytest.mark.parametrize("scaler", [None, torch.amp.GradScaler("cpu", enabled=False)], ids=["none", "off"])
def test_a_step_without_the_graphs_scaler_is_refused(scaler: Any) -> None:
    model, keep = UpDown(), new_scaler()
    optimizer = sgd(model)
    keep.scale(loss_of(compiled(model), batch())).backward()
    with pytest.raises(ScalerError, match=keep.name):
        optimizer.step() if scaler is None else scaler.step(optimizer)


def test_a_scaler_of_another_name_is_refused() -> None:
    model, keep, other = UpDown(), new_scaler(), new_scaler(name="other")
    for _ in range(2):
        with pytest.raises(ScalerError, match=r"'default'.*'other'"):
            step(model, other, sgd(model), compiled(model))
    del keep


@pytest.mark.parametrize("was_used", [False, True])
def test_a_scaler_whose_name_a_later_one_has_taken_is_refused(was_used: bool) -> None:
    model, first = UpDown(), new_scaler()
    optimizer, run = sgd(model), compiled(model)
    if was_used:
        step(model, first, optimizer, run)
    later = new_scaler()
    with pytest.raises(ScalerError, match="the last one that was made with its name"):
        step(model, first, optimizer, run)
    del later


def test_two_scalers_for_two_networks_and_one_for_both_are_right() -> None:
    first, second, a, b = UpDown(), UpDown(), new_scaler(name="a"), new_scaler(name="b")
    run_first, run_second = compiled(first, scaler="a"), compiled(second, scaler="b")
    for _ in range(2):
        step(first, a, sgd(first), lambda x: run_second(run_first(x)))
        step(second, b, sgd(second), run_second)
    both = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    step(first, a, both, lambda x: run_second(run_first(x)))


def test_torchs_scaler_may_step_other_models_and_the_same_one_without_the_graph() -> None:
    model, other, scaler, theirs = UpDown(), UpDown(), new_scaler(), torch.amp.GradScaler("cpu", 128.0)
    step(model, scaler, sgd(model), compiled(model))
    step(other, theirs, sgd(other))
    step(model, theirs, sgd(model))
    # in a step of its own, beside one that is not over
    scaler.scale(loss_of(compiled(model), batch())).backward()
    step(other, theirs, sgd(other))


def test_scalers_that_are_disabled_neither_scale_nor_are_refused() -> None:
    model, disabled = UpDown(), new_scaler(enabled=False)
    before = weights(model)
    step(model, torch.amp.GradScaler("cpu", 128.0), sgd(model), compiled(model))
    step(model, disabled, sgd(model), compiled(model))
    assert not same(model, before)


def test_a_loop_that_looks_by_itself_is_not_refused_and_nobody_asks_twice() -> None:
    model, scaler = UpDown(), new_scaler()
    optimizer = sgd(model)
    scaler.scale(loss_of(compiled(model), batch())).backward()
    assert len(BEFORE_STEP._listeners) == 1
    scaler.unscale_(optimizer)
    if not scaler.last_found_inf:
        optimizer.step()
    scaler.update()
    assert not BEFORE_STEP._listeners


# ---- no scaler ----


def told(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if issubclass(each.category, ScalingWarning)]


def backward(model: nn.Module, **options: Any) -> Callable[[], object]:
    return lambda: loss_of(compiled(model, **{"scaler": None, **options}), batch()).backward()


@pytest.mark.usefixtures("op_by_op")
def test_fp16_without_a_scaler_warns_once_and_names_the_fix() -> None:
    class Other(UpDown):
        pass

    # in a report nothing is trained
    assert told(lambda: amp_fx.explain(UpDown(), batch(), options={**OPTIONS, "scaler": None})) == []
    (text,) = told(backward(UpDown()))
    assert "'scaler': 'default'" in text
    assert "scaler = amp_fx.GradScaler" in text
    assert told(backward(Other())) == []


@pytest.mark.usefixtures("op_by_op")
def test_inference_and_bf16_do_not_warn() -> None:
    keep = new_scaler()
    with torch.no_grad():
        assert told(lambda: compiled(UpDown(), scaler=None)(batch())) == []
    assert told(backward(UpDown(), dtype="bfloat16")) == []
    with torch.autocast("cpu", torch.bfloat16):
        assert told(backward(UpDown(), scaler=keep.name, dtype="auto")) == []


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_own_scaler_works_around_a_graph_without_a_scaler(fused: bool) -> None:
    model, x = UpDown(), batch()
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler.scale(loss_of(compiled(model, scaler=None), x)).backward()
    scaler.unscale_(optimizer)
    assert gradients_are(model, fp32_gradients(model, lambda m: loss_of(m, x)))
    before = weights(model)
    scaler.step(optimizer)
    scaler.update()
    assert not same(model, before)


@pytest.mark.parametrize("given", [True, False])
def test_under_an_fp16_autocast_of_the_users_scaling_is_theirs_and_a_scaler_is_one_from_outside(
    given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model, x, scaler = UpDown(), batch(), new_scaler()
    optimizer = sgd(model)

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return loss_of(compiled(model, scaler=scaler.name if given else None), x)

    losses = list[Tensor]()
    with caplog.at_level(logging.INFO, "amp_fx"):
        assert told(lambda: losses.append(forward())) == []
    assert ("is ignored" in caplog.text) is given
    scaled = scaler.scale(losses[0])
    assert scaled.item() == pytest.approx(128.0 * losses[0].item())
    scaled.backward()
    scaler.unscale_(optimizer)
    assert gradients_are(model, fp32_gradients(model, lambda m: loss_of(m, x)))
    scaler.step(optimizer)
