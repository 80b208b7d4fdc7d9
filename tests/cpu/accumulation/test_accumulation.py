"""A compiled backward that adds to gradients leaves the bits that autograd would, whatever the program does."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accumulating import (
    WIDTH,
    Loop,
    Net,
    assert_same,
    batches,
    compiled,
    gradients,
    loss_of,
    run_both,
    watching,
)
from memory import peak_bytes
from torch import Tensor, nn
from torch._dynamo.compiled_autograd import _enable
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import amp_fx
from graphs import DEFAULTS

Model = Callable[..., Tensor]


def accumulate(run: Model, model: Any, xs: list[Tensor]) -> None:
    """One backward for each micro-batch."""
    for x in xs:
        loss_of(run, x).backward()


@pytest.mark.parametrize("count", [1, 2, 4])
def test_every_micro_batch_after_the_first_is_added_by_the_graph(count: int) -> None:
    added, model, _ = run_both(accumulate, count)
    assert added == count - 1
    assert all(grad is not None for grad in gradients(model))


def test_gradients_that_are_zero_are_added_to_as_well() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        for x in xs:
            model.zero_grad(set_to_none=False)
            loss_of(run, x).backward()

    assert run_both(loop)[0] == 3


def test_gradients_are_looked_at_when_the_backward_runs_not_before() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        accumulate(run, model, xs[:2])
        losses = [loss_of(run, x) for x in xs]
        model.zero_grad()
        losses[0].backward()
        first = [grad.clone() for grad in gradients(model) if grad is not None]
        for loss in losses[1:]:
            loss.backward()
        return first

    assert run_both(loop)[0] == 1 + 3


def test_a_gradient_stays_the_same_tensor_and_its_version_moves() -> None:
    model = Net()
    run = compiled(model, "graph")
    accumulate(run, model, batches(1))
    before = gradients(model)
    versions = [grad._version for grad in before if grad is not None]
    with watching() as added:
        accumulate(run, model, batches(1))
    assert added.count == 1
    assert all(one is two for one, two in zip(before, gradients(model), strict=True))
    assert all(grad._version > v for grad, v in zip(before, versions, strict=True) if grad is not None)


def test_what_saved_a_gradient_for_its_backward_is_told_that_it_has_changed() -> None:
    model = Net()
    run = compiled(model, "graph")
    accumulate(run, model, batches(1))
    x = torch.ones(WIDTH, WIDTH, requires_grad=True)
    assert model.up.weight.grad is not None
    held = (x * model.up.weight.grad).sum()
    with watching() as added:
        accumulate(run, model, batches(1))
    assert added.count == 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        held.backward()


def test_a_micro_batch_that_adds_holds_no_more_memory_than_autocasts() -> None:
    def peak(run: Model) -> int:
        accumulate(run, None, batches(2))
        return peak_bytes(lambda: accumulate(run, None, batches(1)))

    stock = torch.compile(Net())

    def under_autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return stock(x)

    with watching() as added:
        ours = peak(compiled(Net(), "graph"))
    assert added.count == 2
    torch._dynamo.reset()
    assert ours <= peak(under_autocast)


def test_a_step_and_the_steps_after_it() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            accumulate(run, model, xs)
            optimizer.step()
        return [p.detach() for p in model.parameters()]

    assert run_both(loop)[0] == 9


class Convolutional(nn.Module):
    """Its gradients come out of convolutions: one that is laid out anew, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.point = nn.Conv2d(64, 64, 3), nn.Conv2d(64, 256, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.point(self.wide(x.reshape(-1, 64, 4, 4)).relu())


def test_convolutions() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        for x in xs:
            run(x[:, :64].repeat(4, 1).reshape(4, -1)).square().mean().backward()

    assert run_both(loop, make=Convolutional)[0] == 3


def test_a_scaler_inside_the_backward() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
        scaler = amp_fx.GradScaler("cpu", init_scale=128.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            for x in xs:
                scaler.scale(loss_of(run, x)).backward()
            scaler.step(optimizer)
            scaler.update()
        return [p.detach() for p in model.parameters()]

    assert run_both(loop, dtype="float16", scaler="default")[0] == 6


def test_torchs_own_scaler() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.float16):
            for x in xs:
                scaler.scale(loss_of(run, x)).backward()
        scaler.step(optimizer)

    assert run_both(loop)[0] == 3


# --- where autograd adds ---


def after_two(then: Loop) -> Loop:
    """A loop after two micro-batches: one found gradients."""

    def loop(run: Model, model: Any, xs: list[Tensor]) -> object:
        accumulate(run, model, xs[:2])
        return then(run, model, xs[2:])

    return loop


def with_gradients(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(run, xs[0]), list(model.parameters())))


def with_gradients_of_some(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
    x = xs[0].clone().requires_grad_()
    return list(torch.autograd.grad(loss_of(run, x), [model.up.weight, x]))


def with_gradients_of_the_input(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
    x = xs[0].clone().requires_grad_()
    return list(torch.autograd.grad(loss_of(run, x), [x]))


def with_inputs(run: Model, model: Any, xs: list[Tensor]) -> None:
    loss_of(run, xs[0]).backward(inputs=[model.down.weight])


def with_a_graph_that_is_kept(run: Model, model: Any, xs: list[Tensor]) -> None:
    loss = loss_of(run, xs[0])
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def with_a_graph_of_gradients(run: Model, model: Any, xs: list[Tensor]) -> bool:
    loss_of(run, xs[0]).backward(create_graph=True, retain_graph=False)
    has_graph = [grad.requires_grad for grad in gradients(model) if grad is not None]
    for p in model.parameters():
        p.grad = None if p.grad is None else p.grad.detach()
    return all(has_graph)


def with_a_hook(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
    seen = list[Tensor]()
    handle = model.up.weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    accumulate(run, model, xs)
    handle.remove()
    return seen


def with_a_post_accumulate_hook(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
    seen = list[Tensor]()
    handle = model.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    accumulate(run, model, xs)
    handle.remove()
    return seen


def with_a_hook_of_the_node(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
    seen = list[Tensor]()
    node = torch.autograd.graph.get_gradient_edge(model.down.weight).node
    node.register_hook(lambda _, grads: seen.append(grads[0].clone()))
    accumulate(run, model, xs)
    return seen


def with_a_hook_before_the_node(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
    seen = list[Tensor]()
    node = torch.autograd.graph.get_gradient_edge(model.down.weight).node
    node.register_prehook(lambda grads: seen.append(grads[0].clone()))
    accumulate(run, model, xs)
    return seen


def with_a_hook_on_all_gradients(run: Model, model: Any, xs: list[Tensor]) -> list[Tensor]:
    seen = list[Tensor]()
    handle = torch.autograd.graph.register_multi_grad_hook(
        list(model.parameters()), lambda grads: seen.extend(g.clone() for g in grads if g is not None)
    )
    accumulate(run, model, xs)
    handle.remove()
    return seen


def with_a_penalty(run: Model, model: Any, xs: list[Tensor]) -> None:
    for x in xs:
        (loss_of(run, x) + 1e-2 * model.up.weight.square().sum()).backward()


def with_two_calls_in_one_loss(run: Model, model: Any, xs: list[Tensor]) -> None:
    (loss_of(run, xs[0]) + loss_of(run, xs[1])).backward()


def with_the_eager_model_in_the_loss(run: Model, model: Any, xs: list[Tensor]) -> None:
    (loss_of(run, xs[0]) + loss_of(model, xs[1])).backward()


def with_a_leaf_as_root(run: Model, model: Any, xs: list[Tensor]) -> None:
    weight = model.up.weight
    torch.autograd.backward([loss_of(run, xs[0]), weight], [torch.ones(()), torch.ones_like(weight)])


def with_an_edge_as_root(run: Model, model: Any, xs: list[Tensor]) -> None:
    loss = loss_of(run, xs[0]) + model.up.weight.sum()
    torch.autograd.backward([torch.autograd.graph.get_gradient_edge(loss)], [torch.ones(())])


def with_anomaly_mode(run: Model, model: Any, xs: list[Tensor]) -> None:
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        accumulate(run, model, xs)


def with_a_gradient_laid_out_otherwise(run: Model, model: Any, xs: list[Tensor]) -> None:
    grad = model.up.weight.grad
    assert grad is not None
    model.up.weight.grad = grad.t().contiguous().t()
    accumulate(run, model, xs)


def with_a_sparse_gradient(run: Model, model: Any, xs: list[Tensor]) -> None:
    grad = model.up.weight.grad
    assert grad is not None
    model.up.weight.grad = grad.to_sparse()
    # the sum is dense
    accumulate(run, model, xs[:1])


def with_one_gradient_for_two(run: Model, model: Any, xs: list[Tensor]) -> None:
    model.down.weight.grad = model.up.weight.grad
    accumulate(run, model, xs)


def with_gradients_that_overlap(run: Model, model: Any, xs: list[Tensor]) -> None:
    flat = torch.zeros(WIDTH + 1, WIDTH)
    model.up.weight.grad, model.down.weight.grad = flat[:-1], flat[1:]
    accumulate(run, model, xs)


def with_a_gradient_that_has_one(run: Model, model: Any, xs: list[Tensor]) -> None:
    grad = model.up.weight.grad
    assert grad is not None
    model.up.weight.grad = grad.clone().requires_grad_()
    accumulate(run, model, xs)


def with_a_missing_gradient(run: Model, model: Any, xs: list[Tensor]) -> None:
    model.up.weight.grad = None
    loss_of(run, xs[0]).backward()


def with_a_gradient_of_another_dtype(run: Model, model: Any, xs: list[Tensor]) -> None:
    model.up.weight.grad = None
    model.up.weight.grad_dtype = torch.bfloat16
    accumulate(run, model, xs)
    model.up.weight.grad_dtype = None
    accumulate(run, model, xs)
    model.up.weight.grad = None
    model.up.weight.grad_dtype = torch.float32


class Watched(TorchDispatchMode):
    """Sees what runs op by op."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def with_a_dispatch_mode(run: Model, model: Any, xs: list[Tensor]) -> None:
    losses = [loss_of(run, x) for x in xs]
    with Watched():
        for loss in losses:
            loss.backward()


def with_compiled_autograd(run: Model, model: Any, xs: list[Tensor]) -> None:
    for x in xs:
        loss = loss_of(run, x)
        with _enable(torch.compile(backend="amp_fx")):
            loss.backward()


def with_a_frozen_weight(run: Model, model: Any, xs: list[Tensor]) -> None:
    losses = [loss_of(run, x) for x in xs]
    model.up.weight.requires_grad_(False)
    for loss in losses:
        loss.backward()
    model.up.weight.requires_grad_(True)


@pytest.mark.parametrize(
    "then",
    [
        with_gradients,
        with_gradients_of_some,
        with_gradients_of_the_input,
        with_inputs,
        with_a_graph_that_is_kept,
        with_a_graph_of_gradients,
        with_a_hook,
        with_a_post_accumulate_hook,
        with_a_hook_of_the_node,
        with_a_hook_before_the_node,
        with_a_hook_on_all_gradients,
        with_a_penalty,
        with_two_calls_in_one_loss,
        with_the_eager_model_in_the_loss,
        with_a_leaf_as_root,
        with_an_edge_as_root,
        with_anomaly_mode,
        with_a_gradient_laid_out_otherwise,
        with_a_sparse_gradient,
        with_one_gradient_for_two,
        with_gradients_that_overlap,
        with_a_gradient_that_has_one,
        with_a_missing_gradient,
        with_a_gradient_of_another_dtype,
        with_a_dispatch_mode,
        with_compiled_autograd,
        with_a_frozen_weight,
    ],
)
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_autograd_adds(then: Loop) -> None:
    # a kept graph cannot reuse what it has saved
    with functorch_config.patch(donated_buffer=False):
        added, _, _ = run_both(after_two(then))
    assert added == 1, "the second micro-batch, before there was a reason not to"


class Gated(nn.Module):
    """Its backward reads the input in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.down = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x * self.gate)


def test_autograd_adds_to_what_the_backward_reads() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        accumulate(run, model, xs[:2])
        grad = model.down.weight.grad
        assert grad is not None
        loss_of(run, grad[:16]).backward()

    assert run_both(loop, make=Gated)[0] == 1


def test_two_threads_that_train_one_model_leave_adding_to_autograd() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        # both are alive at once: a thread that ends leaves its identity to the next
        with ThreadPoolExecutor() as first, ThreadPoolExecutor() as second:
            first.submit(accumulate, run, model, xs[:2]).result()
            second.submit(accumulate, run, model, xs[2:]).result()

    assert run_both(loop)[0] == 1


def test_gradients_are_added_in_a_thread_that_is_not_the_main_one() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        with ThreadPoolExecutor(1) as only:
            only.submit(accumulate, run, model, xs[:2]).result()
            only.submit(accumulate, run, model, xs[2:]).result()

    assert run_both(loop)[0] == 3


class Twice(nn.Module):
    """Two graphs that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: Tensor) -> Tensor:
        x = self.net(x)
        torch._dynamo.graph_break()
        return self.net(x)


def test_two_graphs_that_share_their_weights_leave_adding_to_autograd() -> None:
    assert run_both(accumulate, make=Twice)[0] == 0


class Broken(nn.Module):
    """Two graphs with weights of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(), Net()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.second(x)


def test_each_graph_of_a_model_adds_for_itself() -> None:
    assert run_both(accumulate, make=Broken)[0] == 2 * 3


class Passing(nn.Module):
    """The second graph returns what comes from the first one, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), Net()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        x, y = x.view_as(x), self.second(x)
        torch._dynamo.graph_break()
        return x + y


def test_a_graph_that_returns_what_another_graph_made_finds_its_own_backward() -> None:
    assert run_both(accumulate, make=Passing)[0] == 2 * 3


def test_a_backward_that_fails_does_not_keep_its_graph() -> None:
    model = Net()
    run = compiled(model, "graph")
    accumulate(run, model, batches(2))

    def fail(grad: Tensor) -> None:
        raise ValueError("stop")

    x = torch.zeros(16, WIDTH, requires_grad=True)
    y = x * 2
    y.register_hook(fail)
    # a dict that lives as long as the node
    metadata: Any = y.grad_fn and y.grad_fn.metadata
    metadata["mark"] = mark = Net()
    node = weakref.ref(mark)
    loss = loss_of(run, y)
    with watching() as added, pytest.raises(ValueError, match="stop"):
        loss.backward()
    assert added.count == 1
    del y, loss, mark, metadata
    gc.collect()
    assert node() is None


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_around_the_model(reentrant: bool) -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        for x in xs:
            # without an input that has a gradient, a reentrant one has no backward
            checkpoint(run, x.requires_grad_(), use_reentrant=reentrant).square().mean().backward()

    assert run_both(loop)[0] == 3


def test_one_weight_in_several_checkpoints_is_added_to_in_each() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        for x in xs:
            x = checkpoint(run, x.requires_grad_(), use_reentrant=True)
            checkpoint(run, x, use_reentrant=True).square().mean().backward()

    # each is a backward of its own
    assert run_both(loop)[0] == 7


def test_shapes_that_change_leave_adding_to_autograd() -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        for x, rows in zip(xs, (16, 12, 8, 4), strict=True):
            loss_of(run, x[:rows]).backward()

    model_added = run_both(loop)[0]
    assert model_added == 0


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("as_view", [False, True])
def test_distributed_data_parallel(group: None, as_view: bool) -> None:
    def loop(run: Model, model: Any, xs: list[Tensor]) -> None:
        wrapped = DistributedDataParallel(run, gradient_as_bucket_view=as_view)  # type: ignore[arg-type]
        for _ in range(2):
            with wrapped.no_sync():
                accumulate(wrapped, model, xs[:-1])
            accumulate(wrapped, model, xs[-1:])

    assert run_both(loop)[0] > 0


@pytest.mark.parametrize("syncs", [True, False])
def test_sharded_parameters(group: None, syncs: bool) -> None:
    def accumulated(accumulation: str) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Net()
        model.compile(backend="amp_fx", options={**DEFAULTS, "accumulation": accumulation})
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=False)
        for number, x in enumerate(batches(4)):
            model.set_requires_gradient_sync(syncs or number == 3)  # type: ignore[operator]  # a method of FSDP's
            loss_of(model, x).backward()
        return [p.grad.full_tensor() for p in model.parameters() if p.grad is not None]  # type: ignore[attr-defined]

    graph, autograd = accumulated("graph"), accumulated("autograd")
    assert_same(graph, autograd)
    assert len(graph) == 4


def test_without_the_option_autograd_adds_and_graphs_are_as_before() -> None:
    model = Net()
    run = compiled(model, "autograd")
    with watching() as added:
        accumulate(run, model, batches(3))
    assert added.count == 0
