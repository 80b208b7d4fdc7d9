"""``amp_fx.GradScaler`` itself: what is skipped and named, the scale, checkpoints, and which scaler a graph has."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import amp_fx.runtime.scaling.findings
from amp_fx import GradScaler, ScalerError
from support.models import loss_scaled
from support.models.loss_scaled import (
    INF,
    Loop,
    batch,
    compiled,
    gradient,
    gradients_are,
    loss_of,
    new_scaler,
    same,
    weights,
)
from support.models.small import Parts, UpDown
from support.tracing.captured_graphs import default_dtype

pytestmark = pytest.mark.usefixtures("op_by_op")


def fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


# ---- what is skipped, and why ----


class Syncs(TorchDispatchMode):
    """Counts how often a tensor is read on the host."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


# as gradients of a device on which the host has to wait
@mock.patch.object(amp_fx.runtime.scaling.findings, "AT_HAND", frozenset())
@pytest.mark.parametrize(("optimizer", "expected"), [(fused_adamw, 0), (torch.optim.SGD, 1)])
def test_the_host_waits_for_no_fused_optimizer_and_once_for_others(optimizer: Any, expected: int) -> None:
    loop = Loop(optimizer=optimizer)
    for _ in range(2):
        loss = loop.loss()
        with Syncs() as syncs:
            loop.backward(loss)
            loop.scaler.unscale_(loop.optimizer)
            loop.scaler.step(loop.optimizer)
            loop.scaler.update()
        assert syncs.count == expected


def test_a_gradient_that_was_bad_before_an_update_is_still_bad_after_it() -> None:
    loop = Loop()
    before = weights(loop.model)
    for bad in (True, False):  # and no zero_grad in between
        loop.backward(bad=bad)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
    assert same(loop.model, before)
    loop.optimizer.zero_grad(set_to_none=False)
    assert loop.step()
    assert not same(loop.model, before)


def test_gradients_that_are_repaired_by_hand_or_dropped_without_an_update_are_good() -> None:
    loop = Loop()
    loop.backward(bad=True)
    for p in loop.model.parameters():
        gradient(p).nan_to_num_(0.0, 0.0, 0.0)
    assert loop.end()
    loop.backward(bad=True)
    loop.optimizer.zero_grad()
    assert loop.scaler.first_nonfinite() == []
    assert loop.step()


def test_models_that_share_a_graph_which_has_their_loss_are_told_apart() -> None:
    scaler, models = new_scaler(), [UpDown(), UpDown()]
    optimizers, loss = [torch.optim.SGD(model.parameters()) for model in models], compiled(loss_of)
    counters.clear()
    for model, bad in zip(models, (False, True), strict=True):
        scaler.scale(loss(model, batch(bad))).backward()
    assert counters["stats"]["unique_graphs"] == 1
    for optimizer in optimizers:
        with pytest.raises(ScalerError, match="'default'"):
            optimizer.step()
    for optimizer in optimizers:
        scaler.step(optimizer)
    assert [scaler.step_taken(optimizer) for optimizer in optimizers] == [True, False]


def test_parameters_shared_with_eager_code_are_judged_by_both_uses() -> None:
    loop, x = Loop(), batch()
    model = loop.model

    def both(m: Any, weight: Tensor, factor: float = 1.0) -> Tensor:
        return loss_of(m, x) + (weight * factor).sum()

    loop.backward(both(loop.run, model.up.weight))
    assert gradients_are(model, lambda m: both(m, m.up.weight))
    assert loop.end()
    assert not loop.step(both(loop.run, model.up.weight, INF))
    assert loop.scaler.first_nonfinite() == ["up.weight"]


def test_what_happened_can_be_asked() -> None:
    loop = Loop(optimizer=fused_adamw)
    scaler = loop.scaler
    scheduler = torch.optim.lr_scheduler.StepLR(loop.optimizer, step_size=1, gamma=0.5)
    assert scaler.last_found_inf.item() == 0.0
    for bad in (False, True, False):
        before = weights(loop.model)
        loop.backward(bad=bad)
        for call in (lambda: scaler.step(loop.optimizer), scaler.update):
            call()
            assert scaler.last_found_inf.item() == bad
        assert same(loop.model, before) is bad
        if scaler.step_taken(loop.optimizer):
            scheduler.step()
        names = ["down.bias", "down.weight", "up.bias", "up.weight"]
        assert scaler.first_nonfinite() == (names if bad else [])
        loop.optimizer.zero_grad()
    assert scaler.skipped_steps == 1
    assert scheduler.get_last_lr() == [0.1 * 0.5**2]


def test_calls_out_of_order_are_refused_with_torchs_errors() -> None:
    loop = Loop()
    scaler, optimizer = loop.scaler, loop.optimizer
    with pytest.raises(AssertionError, match="_scale"):
        scaler.unscale_(optimizer)
    loop.backward()
    with pytest.raises(AssertionError):
        scaler.update()
    for args, kwargs in (((lambda: 0.0,), {}), ((), {"closure": lambda: 0.0})):
        with pytest.raises(RuntimeError, match=r"[Cc]losure"):
            scaler.step(optimizer, *args, **kwargs)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\)"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\)"):
        scaler.step(optimizer)


# ---- the scale ----


def test_the_scale_never_falls_below_its_minimum() -> None:
    loop = Loop(init_scale=4.0, min_scale=1.0)
    assert not any(loop.step(bad=True) for _ in range(4))
    assert loop.scaler.get_scale() == 1.0
    loop.backward()
    loop.scaler.unscale_(loop.optimizer)
    loop.scaler.update(0.5)
    assert loop.scaler.get_scale() == 0.5, "what the user sets is what it is"


def test_checkpoints_load_both_ways() -> None:
    loop, theirs = Loop(growth_interval=7), torch.amp.GradScaler("cpu", init_scale=3.0)
    loop.step(bad=True)
    state = loop.scaler.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    theirs.load_state_dict(state)
    assert theirs.state_dict() == state
    again = torch.amp.GradScaler("cpu", init_scale=5.0, growth_interval=9)
    loop.scaler.load_state_dict(again.state_dict())
    assert loop.scaler.state_dict() == again.state_dict()


# ---- which scaler, and whether at all ----


def test_a_scaler_is_torchs() -> None:
    assert isinstance(new_scaler(), torch.amp.GradScaler)
    # the same positional arguments
    theirs = torch.amp.GradScaler("cpu", 8.0, 3.0, 0.25, 5, True)
    assert GradScaler("cpu", 8.0, 3.0, 0.25, 5, True).state_dict() == theirs.state_dict()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, fused_adamw])
def test_a_scaler_that_no_graph_uses_behaves_as_torchs(optimizer: Any) -> None:
    results = []
    data, start = [batch(), batch(), batch(bad=True), batch()], UpDown()
    for scaler in (new_scaler(growth_interval=2), torch.amp.GradScaler("cpu", 128.0, growth_interval=2)):
        model = copy.deepcopy(start)
        own = optimizer(model.parameters())
        seen: list[Any] = []
        for x in data:
            loss = scaler.scale(loss_of(model, x))
            loss.backward()
            seen += [loss.item(), scaler.get_scale(), *(gradient(p).clone() for p in model.parameters())]
            scaler.step(own)
            scaler.update()
            own.zero_grad()
        results.append([*seen, *model.parameters(), *scaler.state_dict().values()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(torch.as_tensor(ours).nan_to_num(7.0), torch.as_tensor(theirs).nan_to_num(7.0))


def test_a_step_that_began_before_any_graph_used_the_scaler_ends_as_torchs() -> None:
    eager, loop, x = UpDown(), Loop(), batch()
    loop.backward(loss_of(eager, x))  # times 128
    loop.backward(loss_of(loop.run, x))  # in this step, too
    # kept: a scaler knows optimizers by their id
    optimizers = [torch.optim.SGD(eager.parameters()), loop.optimizer]
    for own, optimizer in zip((eager, loop.model), optimizers, strict=True):
        loop.scaler.unscale_(optimizer)
        assert gradients_are(own, x)
        own.zero_grad()
    loop.scaler.update()
    loss = loss_of(eager, x) + loss_of(loop.run, x)
    assert loop.scaler.scale(loss) is loss
    loss.backward()
    assert gradients_are(eager, x)
    assert gradients_are(loop.model, x)


def test_a_disabled_scaler_changes_nothing() -> None:
    loop, x = Loop(enabled=False), batch()
    loss = loss_of(loop.run, x)
    assert loop.scaler.scale(loss) is loss
    loop.backward(loss)
    assert gradients_are(loop.model, x)
    loop.scaler.unscale_(loop.optimizer)
    # nor is torch's scaler around the graph refused, or the disabled one around eager code
    around = ((loop.scaler, loop.run), (torch.amp.GradScaler("cpu"), loop.run), (loop.scaler, loop.model))
    for scaler, run in around:
        before = weights(loop.model)
        loss_scaled.step(scaler, loop.optimizer, run)
        assert not same(loop.model, before)
    assert loop.scaler.step_taken(loop.optimizer)
    assert (loop.scaler.state_dict(), loop.scaler.skipped_steps) == ({}, 0)


def test_fp16_parameters_are_named() -> None:
    model = UpDown()
    model.down.half()
    loop = Loop(Parts(lambda m, x: m.net.down(m.net.up(x).half()), net=model))
    loop.backward(loop.run(batch()).float().mean())
    with pytest.raises(ScalerError, match=r"2 .*down\.weight.*float32"):
        loop.scaler.step(loop.optimizer)


def test_a_later_scaler_of_the_same_name_takes_over_and_a_dead_one_is_gone() -> None:
    model, keep = UpDown(), new_scaler(name="mien")
    own = compiled(model, scaler="mine")
    first = new_scaler(name="mine")
    first.scale(loss_of(own, batch())).backward()
    second = new_scaler(name="mine", init_scale=2.0)
    loss = loss_of(own, batch())
    assert second.scale(loss) is loss
    del first, second
    gc.collect()
    with pytest.raises(ScalerError, match=r"'mine'.*'mien'.*GradScaler.*name='mine'"):
        own(batch())
    assert keep.name == "mien"


def test_copies_and_pickles_scale_on_their_own() -> None:
    loop = Loop(name="copied")
    loop.backward()
    loop.scaler.step(loop.optimizer)
    loop.scaler.update(4.0)
    for other in (copy.deepcopy(loop.scaler), pickle.loads(pickle.dumps(loop.scaler))):
        assert other.state_dict() == loop.scaler.state_dict()
        assert isinstance(other.scale(torch.ones(1)), Tensor)
    loss = loop.loss()
    assert loop.scaler.scale(loss) is loss, "the name is still the original's"


def test_nested_losses_come_back_as_they_were() -> None:
    loop = Loop()
    loss, scale = loop.loss(), loop.scaler.scale
    assert scale([loss, (loss,)]) == [loss, (loss,)]
    assert list(scale(itertools.repeat(loss, 2))) == [loss, loss]
    for wrong in (3, [loss, 3], (loss, [3])):
        with pytest.raises(ValueError, match="Tensor"):
            scale(wrong)


@pytest.mark.parametrize("arguments", [{"name": ""}, {"min_scale": 1e6}], ids=str)
def test_bad_arguments_are_named(arguments: dict[str, Any]) -> None:
    with pytest.raises(ScalerError, match=next(iter(arguments))):
        new_scaler(**arguments)


# ---- settings of the process ----


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_programs_default_dtype_is_not_that_of_scaling(default: torch.dtype) -> None:
    loop = Loop(model=UpDown(), optimizer=fused_adamw)
    x = batch()
    with default_dtype(default):
        assert loop.scaler.last_found_inf.dtype is torch.float32
        loop.backward(loss_of(loop.run, x))
        assert gradients_are(loop.model, x)
        assert loop.scaler.first_nonfinite() == []
        assert loop.end()
        assert not loop.step(loss_of(loop.run, x * INF))
