"""Gradients that something changes between the backward and the step: no parameter ever becomes inf or nan."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from amp_fx import GradScaler
from scaled import INF, batch, compiled, loss_of, new_scaler, same, sgd, weights
from small_models import UpDown

NAN = float("nan")

Bucket: Any = dist.GradBucket  # type: ignore[attr-defined]


def gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def replaced(model: UpDown) -> None:
    model.up.weight.grad = gradient(model.up.weight) * INF


def written_through_data(model: UpDown) -> None:
    gradient(model.up.weight).data.mul_(INF)


def one_element_through_data(model: UpDown) -> None:
    gradient(model.up.weight).data[7, 3] = NAN


def numpy(model: UpDown) -> None:
    gradient(model.up.weight).numpy()[2, 5] = NAN


def data_replaced(model: UpDown) -> None:
    gradient(model.up.weight).data = torch.full((8, 8), INF)


def swapped_with_a_bad_one(model: UpDown) -> None:
    model.down.weight.grad = torch.full((8, 8), NAN)
    model.up.weight.grad, model.down.weight.grad = model.down.weight.grad, model.up.weight.grad


def another_parameters(model: UpDown) -> None:
    gradient(model.down.weight).data.fill_(INF)
    model.up.weight.grad = model.down.weight.grad


def centralised(model: UpDown) -> None:
    """As gradient centralisation does, for which one infinite element makes a whole row nan."""
    gradient(model.up.weight).data[0, 0] = INF
    for p in (model.up.weight, model.down.weight):
        gradient(p).data.sub_(gradient(p).data.mean(dim=1, keepdim=True))


def clipped_by_norm(model: UpDown) -> None:
    gradient(model.up.weight).data[0, 0] = INF
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


CHANGES = [
    replaced,
    written_through_data,
    one_element_through_data,
    numpy,
    data_replaced,
    swapped_with_a_bad_one,
    another_parameters,
    centralised,
    clipped_by_norm,
]


def refuses(scaler: GradScaler, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step leaves the parameters as they are, and says so."""
    before = weights(model)
    scaler.step(optimizer)
    found = scaler.last_found_inf.item()
    scaler.update()
    skipped = found == 1.0 and same(model, before) and not scaler.step_taken(optimizer)
    return skipped and scaler.get_scale() == 64.0 and bool(scaler.first_nonfinite())


@pytest.mark.parametrize("fused", [False, True], ids=["sgd", "fused AdamW"])
def test_a_change_after_the_backward_is_seen(fused: bool) -> None:
    # one graph for all models
    call = compiled(lambda model, x: model(x))
    for change in CHANGES:
        model, scaler = UpDown(), new_scaler()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True) if fused else sgd(model)
        scaler.scale(loss_of(functools.partial(call, model), batch())).backward()
        change(model)
        assert refuses(scaler, model, optimizer), change.__name__


def tensor_hook(p: Tensor) -> Any:
    return p.register_hook(lambda g: g / 0.0)


def replacing_hook(p: Tensor) -> Any:
    def replace(leaf: Tensor) -> None:
        leaf.grad = gradient(leaf) * INF

    return p.register_post_accumulate_grad_hook(replace)


def writing_hook(p: Tensor) -> Any:
    def write(leaf: Tensor) -> None:
        gradient(leaf).data.fill_(NAN)

    return p.register_post_accumulate_grad_hook(write)


def node_hook(p: Tensor) -> Any:
    accumulator = torch.autograd.graph.get_gradient_edge(p).node
    # the node has to live as long as the hook
    return accumulator, accumulator.register_prehook(lambda grads: tuple(g * INF for g in grads))


def node_post_hook(p: Tensor) -> Any:
    def write(*_: object) -> None:
        gradient(p).data.fill_(INF)

    accumulator = torch.autograd.graph.get_gradient_edge(p).node
    return accumulator, accumulator.register_hook(write)


HOOKS = [tensor_hook, replacing_hook, writing_hook, node_hook, node_post_hook]


@pytest.mark.parametrize("when", ["before the compile", "after the forward"])
@pytest.mark.parametrize("hook", HOOKS)
def test_a_change_by_a_hook_is_seen(hook: Callable[[Tensor], Any], when: str) -> None:
    model, scaler = UpDown(), new_scaler()
    optimizer = sgd(model)
    handles = [hook(model.up.weight)] if when == "before the compile" else []
    loss = scaler.scale(loss_of(compiled(model), batch()))
    if not handles:
        handles.append(hook(model.up.weight))
    loss.backward()
    assert refuses(scaler, model, optimizer)


def test_gradients_put_together_by_hand_are_read() -> None:
    """As PCGrad does: a gradient for each loss, projected, then assigned."""
    model, scaler = UpDown(), new_scaler()
    own, optimizer, leaves = compiled(model), sgd(model), list(model.parameters())
    gradients = [torch.autograd.grad(scaler.scale(loss_of(own, batch())), leaves) for _ in range(2)]
    for p, first, second in zip(leaves, *gradients, strict=True):
        zero = torch.zeros(())
        p.grad = first - (first * second).sum() / zero * second
    assert refuses(scaler, model, optimizer)


def test_a_change_between_micro_batches_is_seen() -> None:
    model, scaler = UpDown(), new_scaler()
    own, optimizer = compiled(model), sgd(model)
    for part in range(2):
        scaler.scale(loss_of(own, batch()) / 2).backward()
        if not part:
            written_through_data(model)
    assert refuses(scaler, model, optimizer)


def test_a_change_between_two_backwards_of_one_graph_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functorch_config, "donated_buffer", False)
    model, scaler = UpDown(), new_scaler()
    optimizer = sgd(model)
    loss = scaler.scale(loss_of(compiled(model), batch()))
    loss.backward(retain_graph=True)
    written_through_data(model)
    loss.backward()
    assert refuses(scaler, model, optimizer)


def test_a_change_in_one_step_does_not_mark_the_next() -> None:
    model, scaler = UpDown(), new_scaler()
    own, optimizer = compiled(model), sgd(model)
    for change in (written_through_data, None):
        scaler.scale(loss_of(own, batch())).backward()
        if change is not None:
            change(model)
        scaler.step(optimizer)
        scaler.update()
        assert scaler.step_taken(optimizer) is (change is None)
        optimizer.zero_grad()
        assert scaler.first_nonfinite() == ([] if change is None else ["up.weight"]), "also without gradients"


def test_a_bad_gradient_that_was_clipped_by_value_after_unscale_is_still_bad() -> None:
    model, scaler = UpDown(), new_scaler()
    optimizer = sgd(model)
    scaler.scale(loss_of(compiled(model), batch(bad=True))).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
    assert refuses(scaler, model, optimizer)


@contextmanager
def averaging_over_one_process() -> Iterator[None]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_the_local_part_of_a_sharded_gradient_is_read() -> None:
    with averaging_over_one_process():
        mesh = init_device_mesh("cpu", (1,))
        local = torch.ones(4, 4)
        sharded = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
        model, scaler = UpDown(), new_scaler()
        optimizer = torch.optim.SGD([*model.parameters(), sharded], lr=0.1)
        scaler.scale(loss_of(compiled(model), batch())).backward()
        local[3, 3] = NAN
        sharded.grad = DTensor.from_local(local, mesh, [Shard(0)])
        scaler.step(optimizer)
        assert not scaler.step_taken(optimizer)


def test_what_a_communication_hook_of_ddp_makes_of_gradients_is_read() -> None:
    model, scaler = UpDown(), new_scaler()

    def spoil(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() * INF)
        return done

    with averaging_over_one_process():
        ddp = nn.parallel.DistributedDataParallel(model)
        # resolved, as DDP compares it with the class
        spoil.__annotations__ = {"bucket": Bucket, "return": torch.futures.Future[Tensor]}
        ddp.register_comm_hook(None, spoil)
        optimizer = sgd(model)
        scaler.scale(loss_of(compiled(ddp), batch())).backward()
        assert refuses(scaler, model, optimizer)
