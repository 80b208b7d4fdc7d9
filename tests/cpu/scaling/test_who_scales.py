"""Who scales the gradients of a graph in fp16: one scaler, its own; another is an error, none is a warning."""

from __future__ import annotations

import gc
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
from support.models.loss_scaled import (
    OPTIONS,
    Loop,
    batch,
    compiled,
    gradients_are,
    loss_of,
    new_scaler,
    same,
    step,
    weights,
)
from support.models.small import UpDown

pytestmark = pytest.mark.usefixtures("op_by_op")

SGD = torch.optim.SGD


def theirs(init_scale: float = 128.0, **arguments: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale, **arguments)


@pytest.fixture
def no_other_scaler() -> None:
    """Scalers of earlier tests that wait for the garbage collector are not asked."""
    gc.collect()


# ---- two scalers ----


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("init_scale", [128.0, 2.0**16])
def test_torchs_scaler_around_a_graph_that_scales_takes_no_step(fused: bool, init_scale: float) -> None:
    loop = Loop(optimizer=lambda own: SGD(own, lr=0.1, fused=fused), init_scale=init_scale)
    before, other = weights(loop.model), theirs(init_scale)

    def steps() -> None:
        # what the two scales make inf is skipped by torch's scaler itself
        for _ in range(40):
            step(other, loop.optimizer, loop.run)

    with pytest.raises(ScalerError, match=r"amp_fx\.GradScaler 'default'"):
        steps()
    assert same(loop.model, before)
    assert other.get_scale() >= 1.0
    # the remedy that it names
    step(loop.scaler, loop.optimizer, loop.run)
    assert not same(loop.model, before)


#: how a step is taken without the graph's scaler
WAYS: dict[str, Callable[[torch.optim.Optimizer], object]] = {
    "without any": lambda optimizer: optimizer.step(),
    "with torch's, disabled": lambda optimizer: theirs(enabled=False).step(optimizer),
    "with torch's, after unscale_": lambda optimizer: unscaled(theirs(), optimizer).step(optimizer),
}


def unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> torch.amp.GradScaler:
    scaler.scale(torch.ones(()))
    scaler.unscale_(optimizer)
    return scaler


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_step_without_the_graphs_scaler_is_refused(way: Callable[[torch.optim.Optimizer], object]) -> None:
    loop = Loop()
    loop.backward()
    with pytest.raises(ScalerError, match=loop.scaler.name):
        way(loop.optimizer)


STEPS: dict[str, Callable[[Loop, Callable[[], Any]], object]] = {
    "SGD": lambda loop, closure: loop.optimizer.step(closure),
    "by name": lambda loop, closure: loop.optimizer.step(closure=closure),
    "LBFGS": lambda loop, closure: torch.optim.LBFGS(loop.model.parameters()).step(closure),
    "with torch's, disabled": lambda loop, closure: theirs(enabled=False).step(loop.optimizer, closure),
}


@pytest.mark.parametrize("take", STEPS.values(), ids=STEPS)
def test_a_step_whose_closure_makes_the_first_gradients_is_refused_before_it_changes_a_weight(
    take: Callable[[Loop, Callable[[], Any]], object],
) -> None:
    loop = Loop()
    before = weights(loop.model)

    def closure() -> Any:
        loss = loop.loss(bad=True)
        loss.backward()
        return loss

    with pytest.raises(ScalerError, match=loop.scaler.name):
        take(loop, closure)
    assert same(loop.model, before)


@pytest.mark.usefixtures("no_other_scaler")
def test_a_closure_that_looks_by_itself_steps_and_is_called_alone_until_there_is_another_scaler() -> None:
    loop = Loop()
    before, results, given = weights(loop.model), list[Tensor](), list[object]()
    loop.optimizer.register_step_pre_hook(lambda _, args, kwargs: given.extend((*args[1:], *kwargs.values())))

    def closure() -> Any:
        """The user's."""
        results.append(loop.loss())
        results[-1].backward()
        loop.scaler.unscale_(loop.optimizer)
        return results[-1]

    others = list[Loop]()
    for is_alone in (False, True, False):
        loop.optimizer.zero_grad()
        assert loop.optimizer.step(closure) is results[-1]
        loop.scaler.update()
        assert (given[-1] is closure) is is_alone
        assert given[-1].__doc__ == closure.__doc__
        if is_alone:
            others.append(Loop(name="other"))
    assert not same(loop.model, before)


def test_a_scaler_of_another_name_is_refused() -> None:
    loop, other = Loop(), new_scaler(name="other")
    for _ in range(2):
        with pytest.raises(ScalerError, match=r"'default'.*'other'"):
            step(other, loop.optimizer, loop.run)


@pytest.mark.parametrize("was_used", [False, True])
def test_a_scaler_whose_name_a_later_one_has_taken_is_refused(was_used: bool) -> None:
    loop = Loop()
    if was_used:
        loop.step()
    later = new_scaler()
    with pytest.raises(ScalerError, match="the last one that was made with its name"):
        loop.step()
    del later


def test_two_scalers_for_two_networks_and_one_for_both_are_right() -> None:
    first, second = Loop(name="a"), Loop(name="b")
    for _ in range(2):
        step(first.scaler, first.optimizer, lambda x: second.run(first.run(x)))
        step(second.scaler, second.optimizer, second.run)
    both = SGD([*first.model.parameters(), *second.model.parameters()])
    step(first.scaler, both, lambda x: second.run(first.run(x)))


def test_torchs_scaler_may_step_other_models_and_the_same_one_without_the_graph() -> None:
    loop, other, scaler = Loop(), UpDown(), theirs()
    loop.step()
    step(scaler, SGD(other.parameters()), other)
    step(scaler, SGD(loop.model.parameters()), loop.model)
    # in a step of its own, beside one that is not over
    loop.backward()
    step(scaler, SGD(other.parameters()), other)


@pytest.mark.usefixtures("no_other_scaler")
def test_a_loop_that_looks_by_itself_is_not_refused_and_nobody_asks_twice() -> None:
    loop = Loop()
    loop.backward()
    assert len(BEFORE_STEP.listeners) == 1
    loop.scaler.unscale_(loop.optimizer)
    assert not loop.scaler.last_found_inf
    loop.optimizer.step()
    loop.scaler.update()
    assert not BEFORE_STEP.listeners


# ---- no scaler ----


def told(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(each.message) for each in caught if issubclass(each.category, ScalingWarning)]


def backward(model: nn.Module, **options: Any) -> Callable[[], object]:
    return lambda: loss_of(compiled(model, **{"scaler": None, **options}), batch()).backward()


def test_fp16_without_a_scaler_warns_once_and_names_the_fix() -> None:
    # in a report nothing is trained
    assert told(lambda: amp_fx.explain(UpDown(), batch(), options={**OPTIONS, "scaler": None})) == []
    (text,) = told(backward(UpDown()))
    assert "'scaler': 'default'" in text
    assert "scaler = amp_fx.GradScaler" in text
    assert told(backward(nn.Linear(8, 8))) == []


def test_inference_and_bf16_do_not_warn() -> None:
    keep = new_scaler()
    with torch.no_grad():
        assert told(lambda: compiled(UpDown(), scaler=None)(batch())) == []
    assert told(backward(UpDown(), dtype="bfloat16")) == []
    with torch.autocast("cpu", torch.bfloat16):
        assert told(backward(UpDown(), scaler=keep.name, dtype="auto")) == []


@pytest.mark.parametrize("fused", [False, True])
def test_torchs_own_scaler_works_around_a_graph_without_a_scaler(fused: bool) -> None:
    model, x, scaler = UpDown(), batch(), theirs()
    optimizer = SGD(model.parameters(), lr=0.1, fused=fused)
    scaler.scale(loss_of(compiled(model, scaler=None), x)).backward()
    scaler.unscale_(optimizer)
    assert gradients_are(model, x)
    before = weights(model)
    scaler.step(optimizer)
    scaler.update()
    assert not same(model, before)


@pytest.mark.parametrize("given", [True, False])
def test_under_the_users_fp16_autocast_a_scaler_is_one_from_outside(given: bool, caplog: Any) -> None:
    model, x, scaler = UpDown(), batch(), new_scaler()
    optimizer, losses = SGD(model.parameters()), list[Tensor]()

    def forward() -> None:
        with torch.autocast("cpu", torch.float16):
            losses.append(loss_of(compiled(model, scaler=scaler.name if given else None), x))

    with caplog.at_level(logging.INFO, "amp_fx"):
        assert told(forward) == []
    assert ("is ignored" in caplog.text) is given
    scaled = scaler.scale(losses[0])
    assert scaled.item() == pytest.approx(128.0 * losses[0].item())
    scaled.backward()
    scaler.unscale_(optimizer)
    assert gradients_are(model, x)
    scaler.step(optimizer)
