"""``amp_fx.GradScaler``: torch's loop, torch's cases, and what it does that torch's scaler does not."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amp_fx.scaling.findings
from amp_fx import GradScaler, ScalerError
from amp_fx._torch import FakeTensor, FakeTensorMode
from amp_fx.scaling import ScaledGraph
from gpt import GPT, GPTConfig, get_batch, make_corpus
from scaled import (
    INF,
    OPTIONS,
    batch,
    close,
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
from versions import fails_in


class Syncs(TorchDispatchMode):
    """Counts how often a tensor is read on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients on the CPU are looked at as those of a device on which the host has to wait."""
    monkeypatch.setattr(amp_fx.scaling.findings, "_AT_HAND", frozenset())


# ---- torch's own cases, against eager fp32 without a scaler ----


@pytest.fixture(scope="module")
def torchs() -> ModuleType:
    """Where torch has its cases; takes seconds to import."""
    from torch.testing._internal import common_cuda

    return common_cuda


OPTIMIZERS = {
    "SGD": (torch.optim.SGD, {"lr": 0.5}),
    "Adam": (torch.optim.Adam, {"lr": 1e-2}),
    "fused AdamW": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
}


def spoil(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.fill_(INF)


def plain(x: Tensor, y: Tensor, model: Any, optimizer: Any, scaler: Any, loss_fn: Any, bad: bool) -> None:
    scaler.scale(loss_fn(model(x), y)).backward()
    if bad:
        spoil(next(model.parameters()))
    scaler.step(optimizer)


def clipping(x: Tensor, y: Tensor, model: Any, optimizer: Any, scaler: Any, loss_fn: Any, bad: bool) -> None:
    scaler.scale(loss_fn(model(x * INF if bad else x), y)).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.2)
    scaler.step(optimizer)


def accumulation(
    x: Tensor, y: Tensor, model: Any, optimizer: Any, scaler: Any, loss_fn: Any, bad: bool
) -> None:
    for part, (half, target) in enumerate(zip(x.chunk(2), y.chunk(2), strict=True)):
        scaler.scale(loss_fn(model(half * INF if bad and part == 0 else half), target) / 2).backward()
    scaler.step(optimizer)


class NoScaler:
    """The control's scaler."""

    def __init__(self, skipping: bool) -> None:
        self.skipping = skipping

    def scale(self, loss: Tensor) -> Tensor:
        return loss

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        pass

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        if not self.skipping:
            optimizer.step()


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("pattern", [plain, clipping, accumulation])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_torchs_scaling_cases_end_where_eager_fp32_ends(
    torchs: Any, optimizer: str, pattern: Callable[..., None]
) -> None:
    ctor, kwargs = OPTIMIZERS[optimizer]
    case = torchs._create_scaling_case(device="cpu", optimizer_ctor=ctor, optimizer_kwargs=kwargs)
    control, scaling, opt_control, opt_scaling, data, loss_fn, skip = case
    scaler = new_scaler(growth_interval=1)
    model = compiled(scaling)
    for index, (x, y) in enumerate(data):
        opt_control.zero_grad()
        pattern(x, y, control, opt_control, NoScaler(index == skip), loss_fn, False)
        opt_scaling.zero_grad()
        pattern(x, y, model, opt_scaling, scaler, loss_fn, index == skip)
        assert scaler.step_taken(opt_scaling) is (index != skip)
        scaler.update()
    assert close(scaling, control, 5e-3)
    # three steps taken, one skipped
    assert scaler.get_scale() == 128.0 * 2**3 * 0.5
    assert scaler.skipped_steps == 1


def test_several_losses_models_and_optimizers_share_a_scaler(
    torchs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # torch's own condition for retain_graph on compiled graphs
    monkeypatch.setattr(functorch_config, "donated_buffer", False)
    control0, scaling0, opt_control0, opt_scaling0, data, loss_fn, skip = torchs._create_scaling_case(
        device="cpu"
    )
    control1, scaling1, opt_control1, opt_scaling1 = torchs._create_scaling_models_optimizers(device="cpu")
    scaler = new_scaler(growth_interval=1)
    model0, model1 = compiled(scaling0), compiled(scaling1)

    def losses(m0: Any, m1: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        out0, out1 = m0(x), m1(x)
        return loss_fn(0.3 * out0 + 0.7 * out1, y), loss_fn(0.6 * out0 - 0.4 * out1, y)

    for index, (x, y) in enumerate(data):
        for optimizer in (opt_control0, opt_control1, opt_scaling0, opt_scaling1):
            optimizer.zero_grad()
        for retain, loss in zip((True, False), losses(control0, control1, x, y), strict=True):
            loss.backward(retain_graph=retain)
        for retain, loss in zip((True, False), scaler.scale(losses(model0, model1, x, y)), strict=True):
            loss.backward(retain_graph=retain)
        if index == skip:
            spoil(list(scaling1.parameters())[2])
        else:
            opt_control1.step()
        opt_control0.step()
        scaler.step(opt_scaling0)
        scaler.step(opt_scaling1)
        # only the optimizer whose own parameters are bad is skipped
        assert [scaler.step_taken(o) for o in (opt_scaling0, opt_scaling1)] == [True, index != skip]
        scaler.update()
    assert close(scaling0, control0, 5e-3)
    assert close(scaling1, control1, 5e-3)
    assert scaler.get_scale() == 128.0 * 2**3 * 0.5


# ---- gradients ----


def test_gradients_are_true_to_scale_the_moment_backward_returns() -> None:
    model, x, scaler = UpDown(), batch(), new_scaler()
    loss = loss_of(compiled(model), x)
    assert scaler.scale(loss) is loss
    loss.backward()
    assert gradients_are(model, fp32_gradients(model, lambda m: loss_of(m, x)))
    assert all(p.grad is not None and p.grad.dtype is torch.float32 for p in model.parameters())


def test_tiny_gradients_arrive() -> None:
    torch.manual_seed(1)
    model, x = UpDown(), batch()
    scaler = new_scaler(init_scale=2.0**24)

    def tiny(m: Callable[..., Tensor]) -> Tensor:
        return m(x).pow(2).mean() * 1e-9

    exact = fp32_gradients(model, tiny)
    assert max(value.abs().max() for value in exact) < 6e-8 / 10, "fp16 could hold these by itself"
    scaler.scale(tiny(compiled(model))).backward()
    assert gradients_are(model, exact, error=0.05)

    unscaled = copy.deepcopy(model)
    unscaled.zero_grad()
    off = new_scaler(name="off", enabled=False)
    tiny(compiled(unscaled, scaler=off.name)).backward()
    assert not gradients_are(unscaled, exact, error=0.9), "without scaling they do not"


def test_the_scale_may_change_at_every_step_without_another_compile() -> None:
    model, scaler = UpDown(), new_scaler(growth_interval=1)
    own, optimizer = compiled(model), sgd(model)
    for step in range(4):
        counters.clear()
        scaler.scale(loss_of(own, batch())).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert step == 0 or not counters["stats"]["unique_graphs"]
    assert scaler.get_scale() == 128.0 * 2**4


def test_caches_hit_and_tell_scaled_graphs_from_others() -> None:
    def saved() -> int:
        counters.clear()
        torch._dynamo.reset()
        model = UpDown()
        scaler = new_scaler()
        loss_of(compiled(model), x).backward()
        assert list(scaler._now.names.values()) == ["up.weight", "up.bias", "down.weight", "down.bias"]
        return counters["aot_autograd"]["autograd_cache_hit"]

    x = batch()
    saved()
    assert saved() == 1
    assert counters["aot_autograd"]["autograd_cache_bypass"] == 0


def test_an_update_between_a_forward_and_its_backward_changes_neither_network() -> None:
    scaler = new_scaler(growth_interval=1)
    first, second, x = UpDown(), UpDown(), batch()
    exact = [fp32_gradients(model, lambda m: loss_of(m, x)) for model in (first, second)]
    losses = [loss_of(compiled(model), x) for model in (first, second)]
    scaler.scale(losses[0]).backward()
    scaler.step(sgd(first, lr=0.0))
    scaler.update()
    scaler.scale(losses[1]).backward()
    assert scaler.get_scale() == 256.0
    assert gradients_are(first, exact[0])
    assert gradients_are(second, exact[1])


# ---- what is skipped, and why ----


@pytest.mark.usefixtures("as_on_a_device")
def test_host_syncs_none_for_a_fused_optimizer_and_one_for_others() -> None:
    model = UpDown()
    scaler = new_scaler()
    own = compiled(model)
    for fused, expected in ((True, 0), (False, 1)):
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9, fused=fused)
        for _ in range(2):
            loss = loss_of(own, batch())
            with Syncs() as syncs:
                scaler.scale(loss)
                loss.backward()
                scaler.unscale_(optimizer)
                scaler.step(optimizer)
                scaler.update()
            assert syncs.count == expected
            optimizer.zero_grad()


def test_a_gradient_that_was_bad_before_an_update_is_still_bad_after_it() -> None:
    model, scaler = UpDown(), new_scaler()
    own, optimizer = compiled(model), sgd(model)
    before = weights(model)
    for bad in (True, False):  # and no zero_grad in between
        scaler.scale(loss_of(own, batch(bad))).backward()
        scaler.step(optimizer)
        scaler.update()
    assert same(model, before)
    optimizer.zero_grad(set_to_none=False)
    scaler.scale(loss_of(own, batch())).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not same(model, before)


def test_a_gradient_that_was_repaired_by_hand_is_good() -> None:
    model, scaler = UpDown(), new_scaler()
    optimizer = sgd(model)
    scaler.scale(loss_of(compiled(model), batch(bad=True))).backward()
    for p in model.parameters():
        assert p.grad is not None
        p.grad.nan_to_num_(0.0, 0.0, 0.0)
    scaler.step(optimizer)
    assert scaler.step_taken(optimizer)


@pytest.mark.usefixtures("op_by_op")
def test_gradients_that_are_dropped_without_an_update_are_forgotten() -> None:
    model, scaler = UpDown(), new_scaler()
    own, optimizer = compiled(model), sgd(model)
    scaler.scale(loss_of(own, batch(bad=True))).backward()
    optimizer.zero_grad()
    assert scaler.first_nonfinite() == []
    scaler.scale(loss_of(own, batch())).backward()
    scaler.step(optimizer)
    assert scaler.step_taken(optimizer)


@pytest.mark.usefixtures("op_by_op")
def test_models_that_share_a_graph_which_has_their_loss_are_told_apart() -> None:
    scaler, models = new_scaler(), [UpDown(), UpDown()]
    optimizers, loss = [sgd(model) for model in models], compiled(loss_of)
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
    model, x, scaler = UpDown(), batch(), new_scaler()
    own, optimizer = compiled(model), sgd(model)

    def both(m: Callable[..., Tensor], weight: Tensor, factor: float = 1.0) -> Tensor:
        return loss_of(m, x) + (weight * factor).sum()

    scaler.scale(both(own, model.up.weight)).backward()
    assert gradients_are(model, fp32_gradients(model, lambda m: both(m, m.up.weight)))  # type: ignore[union-attr]
    scaler.step(optimizer)
    assert scaler.step_taken(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(both(own, model.up.weight, INF)).backward()
    scaler.step(optimizer)
    assert not scaler.step_taken(optimizer)
    assert scaler.first_nonfinite() == ["up.weight"]


def test_what_happened_can_be_asked() -> None:
    model, scaler = UpDown(), new_scaler()
    own, optimizer = compiled(model), torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    assert scaler.last_found_inf.item() == 0.0
    for bad in (False, True, False):
        before = weights(model)
        scaler.scale(loss_of(own, batch(bad))).backward()
        scaler.step(optimizer)
        assert scaler.last_found_inf.item() == bad
        scaler.update()
        assert scaler.last_found_inf.item() == bad
        assert same(model, before) is bad
        if scaler.step_taken(optimizer):
            scheduler.step()
        assert scaler.first_nonfinite() == (
            ["down.bias", "down.weight", "up.bias", "up.weight"] if bad else []
        )
        optimizer.zero_grad()
    assert scaler.skipped_steps == 1
    assert scheduler.get_last_lr() == [0.1 * 0.5**2]


@pytest.mark.usefixtures("op_by_op")
def test_only_the_bad_parameters_are_named() -> None:
    class Two(UpDown):
        def forward(self, x: Tensor) -> Tensor:
            return self.up(x[:, :8]).sum() + self.down(x[:, 8:]).sum()

    model, scaler = Two(), new_scaler()
    x = torch.randn(8, 16)
    x[3, 2] = INF
    scaler.scale(compiled(model)(x)).backward()
    assert scaler.first_nonfinite() == ["up.weight"]


def test_calls_out_of_order_are_refused_with_torchs_errors() -> None:
    model, scaler = UpDown(), new_scaler()
    optimizer = sgd(model)
    with pytest.raises(AssertionError, match="_scale"):
        scaler.unscale_(optimizer)
    scaler.scale(loss_of(compiled(model), batch())).backward()
    with pytest.raises(AssertionError):
        scaler.update()
    for given in ((lambda: 0.0,), ()):
        with pytest.raises(RuntimeError, match=r"[Cc]losure"):
            scaler.step(optimizer, *given, **({} if given else {"closure": lambda: 0.0}))
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match=r"unscale_\(\)"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(RuntimeError, match=r"step\(\)"):
        scaler.step(optimizer)


# ---- models ----


@pytest.mark.usefixtures("op_by_op")
def test_graph_breaks() -> None:
    class Broken(UpDown):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.up(x).relu()
            torch._dynamo.graph_break()
            return self.down(hidden)

    model, x, scaler = Broken(), batch(), new_scaler()
    optimizer = sgd(model)
    scaler.scale(loss_of(compiled(model), x)).backward()
    assert len(scaler._now.names) == 4
    assert gradients_are(model, fp32_gradients(model, lambda m: loss_of(m, x)))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(loss_of(compiled(model), x * INF)).backward()
    scaler.step(optimizer)
    assert set(scaler.first_nonfinite()) == {"up.weight", "up.bias", "down.weight", "down.bias"}


@pytest.mark.usefixtures("op_by_op")
@fails_in("2.11", fault="no guard notices that a parameter is thawed")
def test_frozen_parameters() -> None:
    model, x, scaler = UpDown(), batch(), new_scaler()
    model.up.requires_grad_(False)
    optimizer = sgd(model)
    own = compiled(model)
    scaler.scale(loss_of(own, x)).backward()
    scaler.step(optimizer)
    assert scaler.step_taken(optimizer)
    scaler.update()
    optimizer.zero_grad()
    # thawed in the middle of training
    model.up.requires_grad_(True)
    scaler.scale(loss_of(own, x)).backward()
    assert gradients_are(model, fp32_gradients(model, lambda m: loss_of(m, x)))


@pytest.mark.usefixtures("op_by_op")
def test_sparse_embedding_gradients_of_eager_code_are_read() -> None:
    table, model, scaler = nn.Embedding(10, 8, sparse=True), UpDown(), new_scaler()
    own, optimizer = compiled(model), torch.optim.SGD([*table.parameters(), *model.parameters()], lr=0.1)
    for factor in (1.0, INF):
        scaler.scale(loss_of(own, table(torch.tensor([1, 1, 3])) * factor)).backward()
        assert table.weight.grad is not None
        assert table.weight.grad.is_sparse
        scaler.step(optimizer)
        assert scaler.step_taken(optimizer) is (factor == 1.0)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.usefixtures("op_by_op")
def test_a_gradient_penalty_on_the_eager_part_works_and_inside_the_graph_is_torchs_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, scaler = UpDown(), new_scaler()
    own, optimizer = compiled(model), sgd(model)
    x = batch().requires_grad_()
    head = nn.Linear(8, 1)

    def penalized(net: Callable[..., Tensor]) -> Tensor:
        features = net(x).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(head(features).pow(2).sum(), features, create_graph=True)
        return loss_of(net, x) + gradient.pow(2).sum()

    scaler.scale(penalized(own)).backward()
    assert gradients_are(model, fp32_gradients(model, penalized))
    scaler.step(optimizer)
    scaler.update()
    monkeypatch.setattr(functorch_config, "donated_buffer", False)
    torch._dynamo.reset()
    (gradient,) = torch.autograd.grad(scaler.scale(loss_of(own, x)), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.pow(2).sum().backward()


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("inside", [True, False])
def test_checkpointing(inside: bool) -> None:
    class Checkpointed(UpDown):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(checkpoint(lambda value: self.up(value).relu(), x, use_reentrant=False))

    model, x, scaler = Checkpointed() if inside else UpDown(), batch(), new_scaler()
    own = compiled(model)
    called = own if inside else lambda value: checkpoint(own, value, use_reentrant=False)
    for bad in (False, True):
        scaler.scale(loss_of(called, x * INF if bad else x)).backward()
        if not bad:
            assert gradients_are(model, fp32_gradients(model, lambda m: loss_of(m, x)))
        optimizer = sgd(model, lr=0.0)
        scaler.step(optimizer)
        assert scaler.step_taken(optimizer) is not bad
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.usefixtures("op_by_op")
def test_dynamic_shapes() -> None:
    model, scaler = UpDown(), new_scaler()
    own = torch.compile(model, backend="amp_fx", dynamic=True, options=OPTIONS)
    for rows in (4, 8):
        x = torch.randn(rows, 8)
        model.zero_grad()
        scaler.scale(loss_of(own, x)).backward()
        assert gradients_are(model, fp32_gradients(model, lambda m, x=x: loss_of(m, x)))


@pytest.mark.usefixtures("op_by_op")
def test_a_graph_without_parameters_hands_gradients_through() -> None:
    scaler, x = new_scaler(), batch().requires_grad_()
    eager = nn.Linear(8, 8)
    own = compiled(lambda value: value @ value)
    scaler.scale(own(eager(x)).mean()).backward()
    exact = fp32_gradients(eager, lambda m: (m(x) @ m(x)).mean())
    assert gradients_are(eager, exact)
    scaler.step(sgd(eager))


@pytest.mark.slow
def test_a_small_gpt_in_fp16_reaches_the_loss_of_the_fp32_run() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(context=16, layers=1, heads=2, width=16))
    corpus = make_corpus(lines=500)

    def final(own: nn.Module, scaler: Any) -> float:
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        losses: list[float] = []
        for step in range(60):
            loss = own(*get_batch(corpus, step, batch=4, length=16))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.item())
        return sum(losses[-20:]) / 20

    fp32 = final(copy.deepcopy(model), torch.amp.GradScaler("cpu", enabled=False))
    fp16 = copy.deepcopy(model)
    fp16.compile(backend="amp_fx", options=OPTIONS)
    scaler = new_scaler()
    assert final(fp16, scaler) == pytest.approx(fp32, rel=0.01)
    assert scaler.skipped_steps <= 3


# ---- the scale ----


def test_the_scale_never_falls_below_its_minimum() -> None:
    model, scaler = UpDown(), new_scaler(init_scale=4.0, min_scale=1.0)
    own, optimizer = compiled(model), sgd(model)
    for _ in range(4):
        scaler.scale(loss_of(own, batch(bad=True))).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 1.0
    scaler.scale(loss_of(own, batch())).backward()
    scaler.unscale_(optimizer)
    scaler.update(0.5)
    assert scaler.get_scale() == 0.5, "what the user sets is what it is"


def test_checkpoints_load_both_ways() -> None:
    ours, theirs = new_scaler(growth_interval=7), torch.amp.GradScaler("cpu", init_scale=3.0)
    model = UpDown()
    ours.scale(loss_of(compiled(model), batch(bad=True))).backward()
    ours.step(sgd(model))
    ours.update()
    state = ours.state_dict()
    assert state.keys() == theirs.state_dict().keys()
    theirs.load_state_dict(state)
    assert theirs.state_dict() == state
    again = torch.amp.GradScaler("cpu", init_scale=5.0, growth_interval=9)
    ours.load_state_dict(again.state_dict())
    assert ours.state_dict() == again.state_dict()


# ---- which scaler, and whether at all ----


def test_a_scaler_is_torchs() -> None:
    scaler = new_scaler()
    assert isinstance(scaler, torch.amp.GradScaler)
    # the same positional arguments
    assert GradScaler("cpu", 8.0, 3.0, 0.25, 5, True).state_dict() == {
        "scale": 8.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 5,
        "_growth_tracker": 0,
    }


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_scaler_that_no_graph_uses_behaves_as_torchs(optimizer: str) -> None:
    ctor, kwargs = OPTIMIZERS[optimizer]
    torch.manual_seed(3)
    results = []
    data = [batch(), batch(), batch(bad=True), batch()]
    start = UpDown()
    for scaler in (new_scaler(growth_interval=2), torch.amp.GradScaler("cpu", 128.0, growth_interval=2)):
        model = copy.deepcopy(start)
        own = ctor(model.parameters(), **kwargs)
        seen: list[Any] = []
        for x in data:
            scaled = scaler.scale(loss_of(model, x))
            scaled.backward()
            seen += [scaled.item(), scaler.get_scale()]
            seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            scaler.step(own)
            scaler.update()
            own.zero_grad()
        results.append([*seen, *model.parameters(), *scaler.state_dict().values()])
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(torch.as_tensor(ours).nan_to_num(7.0), torch.as_tensor(theirs).nan_to_num(7.0))


def test_a_step_that_began_before_any_graph_used_the_scaler_ends_as_torchs() -> None:
    scaler = new_scaler()
    eager, model, x = UpDown(), UpDown(), batch()
    exact = [fp32_gradients(m, lambda m: loss_of(m, x)) for m in (eager, model)]
    scaler.scale(loss_of(eager, x)).backward()  # times 128
    scaler.scale(loss_of(compiled(model), x)).backward()  # in this step, too
    # kept: a scaler knows optimizers by their id
    optimizers = [sgd(eager), sgd(model)]
    for own, optimizer, gradients in zip((eager, model), optimizers, exact, strict=True):
        scaler.unscale_(optimizer)
        assert gradients_are(own, gradients)
        own.zero_grad()
    scaler.update()
    loss = loss_of(eager, x) + loss_of(compiled(model), x)
    assert scaler.scale(loss) is loss
    loss.backward()
    assert gradients_are(eager, exact[0])
    assert gradients_are(model, exact[1])


def test_a_disabled_scaler_changes_nothing() -> None:
    model, x, scaler = UpDown(), batch(), new_scaler(enabled=False)
    optimizer = sgd(model)
    loss = loss_of(compiled(model), x)
    assert scaler.scale(loss) is loss
    scaler.scale(loss).backward()
    assert gradients_are(model, fp32_gradients(model, lambda m: loss_of(m, x)))
    before = weights(model)
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert not same(model, before)
    assert (scaler.state_dict(), scaler.skipped_steps, scaler.step_taken(optimizer)) == ({}, 0, True)


@pytest.mark.usefixtures("op_by_op")
def test_fp16_parameters_are_named() -> None:
    model, scaler = UpDown(), new_scaler()
    model.down.half()
    own = compiled(lambda x: model.down(model.up(x).half()))
    scaler.scale(own(batch()).float().mean()).backward()
    with pytest.raises(ScalerError, match=r"2 .*down\.weight.*float32"):
        scaler.step(sgd(model))


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
    model, scaler = UpDown(), new_scaler(name="copied")
    scaler.scale(loss_of(compiled(model, scaler="copied"), batch())).backward()
    scaler.step(sgd(model))
    scaler.update(4.0)
    for other in (copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other.state_dict() == scaler.state_dict()
        assert isinstance(other.scale(torch.ones(1)), Tensor)
    loss = loss_of(compiled(model, scaler="copied"), batch())
    assert scaler.scale(loss) is loss, "the name is still the original's"


def test_nested_losses_come_back_as_they_were() -> None:
    model, scaler = UpDown(), new_scaler()
    loss = loss_of(compiled(model), batch())
    assert scaler.scale([loss, (loss,)]) == [loss, (loss,)]
    assert list(scaler.scale(itertools.repeat(loss, 2))) == [loss, loss]
    with pytest.raises(ValueError, match="Tensor"):
        scaler.scale(3)


@pytest.mark.parametrize(
    ("arguments", "message"), [({"name": ""}, "name"), ({"min_scale": 1e6}, "min_scale")]
)
def test_bad_arguments_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ScalerError, match=message):
        new_scaler(**arguments)


# ---- cost ----


@pytest.mark.parametrize("kind", ["linear", "embedding"])
def test_scaling_adds_no_kernel_and_next_to_no_bytes_to_the_graphs(kind: str) -> None:
    from benchmarks.counts import counting

    first = nn.Linear(256, 256) if kind == "linear" else nn.Embedding(2000, 256)
    x = torch.randn(32, 256) if kind == "linear" else torch.randint(0, 2000, (32,))

    def counts(scaler: str | None) -> tuple[int, int]:
        torch._dynamo.reset()
        model = nn.Sequential(first, nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
        with counting() as counter:
            compiled(model, scaler=scaler)(x).sum().backward()
        return counter.total.bytes_moved, counter.total.kernels

    keep = new_scaler()
    (moved, kernels), (stock, stock_kernels) = counts(keep.name), counts(None)
    assert 0 < moved <= 1.001 * stock
    assert kernels == stock_kernels


def test_no_values_are_made_while_a_graph_is_compiled() -> None:
    graph = fx.symbolic_trace(UpDown())
    mode = FakeTensorMode()
    for node in graph.graph.find_nodes(op="placeholder"):
        node.meta["example_value"] = mode.from_tensor(batch())
    parameter = nn.Parameter(torch.ones(8, 8))
    scaled = ScaledGraph.of(graph, [parameter], "default")
    extended, (_, scale) = scaled.extend(graph, [parameter])
    assert isinstance(scale, FakeTensor)
    assert scale.fake_mode is mode
    assert [n.name for n in extended.graph.find_nodes(op="placeholder")] == ["x", "amp_fx_scale"]


def test_a_graph_without_parameters_takes_fake_values_without_a_scaler() -> None:
    # as DDPOptimizer and targets call it, and as a frozen network is
    mode = FakeTensorMode()
    scaled = ScaledGraph("nobody's", 1, (), 0, (), torch.device("cpu"))
    given = mode.from_tensor(batch())
    (_, scale) = scaled.bind(lambda *args: args)(given)
    assert scale.fake_mode is mode
