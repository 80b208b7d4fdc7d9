"""Weights that are cast once for several micro-batches have the bits that they would have if each cast them."""

from __future__ import annotations

import contextlib
import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accumulating import WIDTH, Loop, Net, assert_same, batches, gradients, loss_of
from torch import Tensor, nn
from torch._dynamo.compiled_autograd import _enable
from torch._functorch import config as functorch_config
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import amp_fx
from amp_fx import weights as weights_room
from amp_fx.weights import training
from graphs import DEFAULTS

Model = Callable[..., Tensor]

#: weights of Net's that are cast
CAST = 2


@dataclass
class Casts:
    """How many copies of weights were made."""

    count: int = 0


@contextlib.contextmanager
def counting() -> Iterator[Casts]:
    """Counts inside the block."""
    casts, narrowed = Casts(), training._narrowed

    def counted(weight: Tensor, dtype: torch.dtype) -> Tensor:
        casts.count += 1
        return narrowed(weight, dtype)

    with mock.patch.object(training, "_narrowed", counted):
        yield casts


def compiled(model: nn.Module, weights: str, **options: Any) -> Model:
    return torch.compile(model, backend="amp_fx", options={**DEFAULTS, "weights": weights, **options})


def run_both(loop: Loop, count: int = 4, make: Callable[[], nn.Module] = Net, **options: Any) -> int:
    """Runs a loop with weights cast in each call, and with copies; results and gradients must have the same bits.

    Returns:
        How many copies were made.
    """
    model = make()
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    reference = loop(compiled(twin, "cast", **options), twin, batches(count))
    torch._dynamo.reset()
    with counting() as casts:
        result = loop(compiled(model, "cache", **options), model, batches(count))
    assert_same(result, reference)
    for value, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert_same(value, other)
        assert_same(value.grad, other.grad)
    return casts.count


def accumulate(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
    """One backward for each micro-batch."""
    losses = [loss_of(run, x) for x in xs[:1]]
    losses[0].backward()
    for x in xs[1:]:
        losses.append(loss_of(run, x))
        losses[-1].backward()
    return losses


@pytest.mark.parametrize("accumulation", ["graph", "autograd"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_weights_are_cast_by_the_first_micro_batch(count: int, accumulation: str) -> None:
    assert run_both(accumulate, count, accumulation=accumulation) == CAST


def loops(weights: str) -> list[int]:
    """Of a forward, a backward, and a backward that adds: how often generated code goes through a weight."""
    model = Net()
    run = compiled(model, weights)
    torch._dynamo.reset()
    with fresh_inductor_cache():
        code = run_and_get_code(lambda: accumulate(run, model, batches(2)))[1]
    return [each.count(f"<static_cast<int64_t>({WIDTH * WIDTH}L)") for each in code]


def test_generated_code_narrows_no_weight_and_widens_as_before() -> None:
    assert loops("cast") == [CAST, CAST, CAST]
    assert loops("cache") == [0, CAST, CAST]


def steps(make_optimizer: Callable[[Any], torch.optim.Optimizer], set_to_none: bool = True) -> Loop:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        optimizer, losses = make_optimizer(model.parameters()), list[Tensor]()
        for _ in range(3):
            optimizer.zero_grad(set_to_none)
            losses += accumulate(run, model, xs)
            optimizer.step()
        return losses

    return loop


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("implementation", [{"foreach": True}, {"fused": True}, {"foreach": False}])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_step_is_noticed(kind: Any, implementation: dict[str, bool], set_to_none: bool) -> None:
    loop = steps(lambda parameters: kind(parameters, lr=1e-2, **implementation), set_to_none)
    assert run_both(loop) == 3 * CAST


class ByHand:
    """An optimizer that is none of torch's and writes where no version moves."""

    def __init__(self, parameters: Any) -> None:
        self._parameters = list(parameters)

    def zero_grad(self, set_to_none: bool) -> None:
        for p in self._parameters:
            p.grad = None if set_to_none else torch.zeros_like(p)

    def step(self) -> None:
        for p in self._parameters:
            p.data.sub_(p.grad, alpha=0.1)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_step_through_data_is_noticed(set_to_none: bool) -> None:
    make: Any = ByHand
    assert run_both(steps(make, set_to_none)) == 3 * CAST


def test_a_step_of_a_few_elements_is_noticed_when_gradients_are_gone() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        losses = accumulate(run, model, xs[:2])
        model.up.weight.data[3, 5] += 100.0
        model.zero_grad()
        return losses + accumulate(run, model, xs[2:])

    assert run_both(loop) == 2 * CAST


def between(write: Callable[[Any], object]) -> Loop:
    """Two micro-batches, a write, and two more that add to the same gradients."""

    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        losses = accumulate(run, model, xs[:2])
        write(model)
        return losses + accumulate(run, model, xs[2:])

    return loop


@torch.no_grad()
def in_place(model: Any) -> None:
    model.up.weight.mul_(1.5)


def through_data(model: Any) -> None:
    model.up.weight.data.mul_(1.5)


def other_data(model: Any) -> None:
    model.up.weight.data = model.up.weight.data * 1.5


def in_numpy(model: Any) -> None:
    model.up.weight.detach().numpy()[:] *= 1.5


def a_row_and_touch(model: Any) -> None:
    model.up.weight.data[7] *= 1.5
    weights_room.touch(model.up.weight)


def everything_is_cleared(model: Any) -> None:
    model.up.weight.data[7] *= 1.5
    weights_room.clear()


def state_loaded(model: Any) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def state_assigned(model: Any) -> None:
    grads = gradients(model)
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()}, assign=True)
    for p, grad in zip(model.parameters(), grads, strict=True):
        p.grad = grad


def averages_swapped_in_and_out(model: Any) -> None:
    kept = [p.data.clone() for p in model.parameters()]
    for p in model.parameters():
        p.data.mul_(0.5)
    for p, value in zip(model.parameters(), kept, strict=True):
        p.data.copy_(value)


def halves_exchanged(model: Any) -> None:
    """Addresses and versions stay, and each weight has what the other one had."""
    up, down = model.up.weight.data.clone(), model.down.weight.data.clone()
    model.up.weight.data.copy_(down)
    model.down.weight.data.copy_(up)


@pytest.mark.parametrize(
    ("write", "again"),
    [
        (in_place, 1),
        (through_data, 1),
        (other_data, 1),
        (in_numpy, 1),
        (a_row_and_touch, 1),
        (everything_is_cleared, 2),
        (state_loaded, 2),
        (state_assigned, 2),
        # nothing has changed
        (averages_swapped_in_and_out, 0),
        (halves_exchanged, 2),
    ],
)
def test_a_write_between_micro_batches_is_noticed(write: Callable[[Any], object], again: int) -> None:
    assert run_both(between(write)) == CAST + again


def test_a_write_that_nothing_shows_is_noticed_within_so_many_calls() -> None:
    model = Net()
    run = compiled(model, "cache")
    (x,) = batches(1)
    accumulate(run, model, [x])
    model.down.weight.data[7, 5] += 100.0
    expected = model(x).square().mean()
    losses = accumulate(run, model, [x] * training.LIFETIME)
    assert (losses[0] - expected).abs() > 0.1 * expected
    torch.testing.assert_close(losses[-1], expected, rtol=0.02, atol=0.0)


# --- a backward in flight ---


def test_a_backward_in_flight_keeps_what_its_forward_read() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        accumulate(run, model, xs[:1])
        first, second = loss_of(run, xs[1]), loss_of(run, xs[2])
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1)
        third = loss_of(run, xs[3])
        second.backward()
        third.backward()
        first.backward()
        return [first, second, third]

    assert run_both(loop) == 2 * CAST


def test_two_forwards_then_a_step_then_the_backwards() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        losses = [loss_of(run, x) for x in xs[:2]]
        losses[0].backward()
        optimizer.step()
        losses[1].backward()
        optimizer.step()
        return losses + accumulate(run, model, xs[2:])

    run_both(loop)


def test_a_graph_that_is_kept_over_a_step() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        loss = loss_of(run, xs[0])
        loss.backward(retain_graph=True)
        optimizer.step()
        loss.backward(retain_graph=True)
        return [loss, *accumulate(run, model, xs[1:])]

    # a kept graph cannot reuse what it has saved
    with functorch_config.patch(donated_buffer=False):
        run_both(loop)


class Scaled(nn.Module):
    """Its backward reads a parameter in fp32 as well: autograd sees when that is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.net = nn.Parameter(torch.ones(WIDTH)), Net()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * self.scale)


def test_what_autograd_refused_before_it_refuses_still() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        accumulate(run, model, xs[:2])
        loss = loss_of(run, xs[2].clone().requires_grad_())
        with torch.no_grad():
            model.scale.mul_(2.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()

    assert run_both(loop, make=Scaled) == CAST


# --- models ---


class Tied(nn.Module):
    """One weight, read twice, and once as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) + 0.01 * self.up.weight.sum()


def test_tied_weights() -> None:
    assert run_both(steps(lambda parameters: torch.optim.SGD(parameters, lr=0.1)), make=Tied) == 3


class Twice(nn.Module):
    """Two graphs that share their weights."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        torch._dynamo.graph_break()
        return self.net(x).tanh()


def test_graphs_that_share_a_weight_share_its_copy() -> None:
    # without a gradient, in each graph
    assert run_both(steps(lambda parameters: torch.optim.SGD(parameters, lr=0.1)), make=Twice) == 3 * 2 * CAST


def test_a_network_that_is_called_twice_in_a_step() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
        for _ in range(2):
            optimizer.zero_grad()
            for first, second in (xs[:2], xs[2:]):
                losses.append(loss_of(run, first) + loss_of(run, second))
                losses[-1].backward()
            optimizer.step()
        return losses

    assert run_both(loop) == 2 * 2 * CAST


class Checkpointed(nn.Module):
    """The compiled graph recomputes in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)  # type: ignore[return-value]


def test_a_checkpoint_inside_the_graph() -> None:
    assert (
        run_both(steps(lambda parameters: torch.optim.SGD(parameters, lr=0.1)), make=Checkpointed) == 3 * CAST
    )


def test_a_checkpoint_recomputes_with_what_its_forward_read() -> None:
    def gradients_of(make: Callable[[], nn.Module], weights: str) -> list[Tensor | None]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = make()
        loss = loss_of(compiled(model, weights), batches(1)[0])
        with torch.no_grad():
            # not biases, which are read again
            for p in (p for p in model.parameters() if p.ndim > 1):
                p.add_(0.1)
        loss.backward()
        return gradients(model)

    # as is what is cast in each call
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients_of(Checkpointed, "cast")
    assert_same(gradients_of(Checkpointed, "cache"), gradients_of(Net, "cast"))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_graph(reentrant: bool) -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        for x in xs:
            checkpoint(run, x.requires_grad_(), use_reentrant=reentrant).square().mean().backward()

    run_both(loop)


def test_weights_that_are_not_trained_are_cast_once() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        model.up.weight.requires_grad_(False)
        optimizer, losses = torch.optim.SGD([model.down.weight], lr=0.1), list[Tensor]()
        for x in xs:
            optimizer.zero_grad()
            losses += accumulate(run, model, [x])
            optimizer.step()
        return losses

    assert run_both(loop) == 1 + 4


def test_weights_that_are_frozen_and_thawed() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        losses = accumulate(run, model, xs[:2])
        model.up.weight.requires_grad_(False)
        losses += accumulate(run, model, xs[2:3])
        in_place(model)
        losses += accumulate(run, model, xs[3:])
        model.up.weight.requires_grad_(True)
        return losses + accumulate(run, model, xs)

    run_both(loop)


class Written(nn.Module):
    """Writes to a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.target = Net(), nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.net(x) - self.target(x)
        with torch.no_grad():
            self.target.weight.lerp_(self.net.up.weight, 0.5)
        return y


def test_a_weight_that_the_graph_writes_to_is_cast_in_each_call() -> None:
    assert run_both(steps(lambda parameters: torch.optim.SGD(parameters, lr=0.1)), make=Written) == 3 * CAST


def test_gradients_that_are_taken_by_name() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        found = list[Tensor]()
        for x in xs:
            found += torch.autograd.grad(loss_of(run, x), list(model.parameters()))
        return found

    assert run_both(loop) == 4 * CAST


def test_compiled_autograd() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
        for pair in (xs[:2], xs[2:]):
            optimizer.zero_grad()
            for x in pair:
                losses.append(loss_of(run, x))
                with _enable(torch.compile(backend="amp_fx")):
                    losses[-1].backward()
            optimizer.step()
        return losses

    assert run_both(loop) == 2 * CAST


def test_clipped_gradients_and_a_scaler() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        scaler = amp_fx.GradScaler("cpu", init_scale=128.0)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[Tensor]()
        for step in range(3):
            optimizer.zero_grad()
            for x in xs:
                losses.append(loss_of(run, x * (float("inf") if step == 1 else 1.0)))
                scaler.scale(losses[-1]).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
        return [loss for loss in losses if loss.isfinite()]

    assert run_both(loop, dtype="float16", scaler="default") == 3 * CAST


def test_torchs_own_scaler() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = list[Tensor]()
        with torch.autocast("cpu", torch.float16):
            for x in xs:
                losses.append(loss_of(run, x))
                scaler.scale(losses[-1]).backward()
        scaler.step(optimizer)
        return losses

    assert run_both(loop) == CAST


def test_shapes_that_change() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        losses = list[Tensor]()
        for x, rows in zip(xs, (16, 12, 8, 4), strict=True):
            losses += accumulate(run, model, [x[:rows]])
        return losses

    assert run_both(loop) == CAST


def test_a_dtype_that_changes() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        losses = accumulate(run, model, xs[:2])
        model.to(torch.bfloat16)
        model.zero_grad()
        losses += [loss_of(run, x.bfloat16()) for x in xs[:1]]
        model.to(torch.float32)
        return losses + accumulate(run, model, xs[2:])

    assert run_both(loop) == 2 * CAST


def test_a_weight_that_is_laid_out_anew_at_its_address() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        losses = accumulate(run, model, xs[:2])
        grad = model.up.weight.grad
        model.up.weight.data = model.up.weight.data.t()
        model.up.weight.grad = None
        losses += accumulate(run, model, xs[2:3])
        model.up.weight.data = model.up.weight.data.t()
        model.up.weight.grad = grad
        return losses + accumulate(run, model, xs[3:])

    run_both(loop)


# --- who calls ---


def test_models_of_one_class_share_code_and_not_copies() -> None:
    models = [Net() for _ in range(3)]
    models[2] = copy.deepcopy(models[1])
    with torch.no_grad():
        models[2].up.weight.mul_(2.0)

    def loop(weights: str) -> list[Tensor]:
        torch._dynamo.reset()
        runs = [compiled(model, weights) for model in models]
        losses = list[Tensor]()
        for model in models:
            model.zero_grad()
        for x in batches(3):
            for run, model in zip(runs, models, strict=True):
                losses += accumulate(run, model, [x])
        return losses

    reference = loop("cast")
    with counting() as casts:
        assert_same(loop("cache"), reference)
    assert casts.count == 3 * CAST


def test_a_deep_copy_has_copies_of_its_own() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        losses = accumulate(run, model, xs[:2])
        twin = copy.deepcopy(model)
        in_place(twin)
        other: Any = compiled(twin, "cast")
        return losses + accumulate(other, twin, xs[2:3]) + accumulate(run, model, xs[3:])

    run_both(loop)


def test_two_threads() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        accumulate(run, model, xs[:1])
        with ThreadPoolExecutor() as first, ThreadPoolExecutor() as second:
            waiting = [pool.submit(loss_of, run, xs[1]) for pool in (first, second)]
            for each in waiting:
                each.result().backward()
            in_place(model)
            waiting = [pool.submit(loss_of, run, xs[2]) for pool in (first, second)]
            for each in waiting:
                each.result().backward()

    run_both(loop)


def test_copies_die_with_their_model() -> None:
    before = weights_room.held_bytes()
    model = Net()
    run = compiled(model, "cache")
    accumulate(run, model, batches(2))
    assert weights_room.held_bytes() == before + CAST * 2 * WIDTH * WIDTH
    died = weakref.ref(model.up.weight)
    copies = [weakref.ref(value) for each in training._lent.values() for value in each.values.values()]
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert died() is None
    assert weights_room.held_bytes() == before
    assert all(value() is None for value in copies)


def test_evaluation_between_micro_batches() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        results = list[Tensor]()
        for _ in range(2):
            optimizer.zero_grad()
            for x in xs:
                results += accumulate(run, model, [x])
                with torch.no_grad():
                    results.append(run(x).bfloat16())
            optimizer.step()
        return results[::2]

    assert run_both(loop) == 2 * CAST


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("static", [False, True])
def test_distributed_data_parallel(group: None, static: bool) -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        wrapped: Any = DistributedDataParallel(run, static_graph=static)  # type: ignore[arg-type]
        optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1), list[Tensor]()
        for _ in range(2):
            optimizer.zero_grad()
            # a static graph is learnt from a backward that communicates
            with contextlib.nullcontext() if static else wrapped.no_sync():
                losses += accumulate(wrapped, model, xs[:-1])
            losses += accumulate(wrapped, model, xs[-1:])
            optimizer.step()
        return losses

    assert run_both(loop) == 2 * CAST


def test_sharded_parameters_are_cast_in_each_call(group: None) -> None:
    def losses(weights: str) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        model.compile(backend="amp_fx", options={**DEFAULTS, "weights": weights})
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        return accumulate(model, model, batches(4))

    reference = losses("cast")
    with counting() as casts:
        assert_same(losses("cache"), reference)
    assert casts.count == 0


@pytest.mark.parametrize(
    "options", [{"weights": "auto"}, {"weights": "freeze"}, {"weights": "cache", "max_autotune": True}]
)
def test_otherwise_weights_are_cast_in_each_call(options: dict[str, Any]) -> None:
    model = Net()
    run = compiled(model, **options)
    with counting() as casts:
        accumulate(run, model, batches(2))
    assert casts.count == 0
    assert not training._lent
