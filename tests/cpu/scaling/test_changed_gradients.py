"""Gradients that something changes between the backward and the step: no parameter ever becomes inf or nan."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from support.models.loss_scaled import INF, NAN, Loop, batch, compiled, gradient, loss_of, same, weights
from support.models.small import UpDown

pytestmark = pytest.mark.usefixtures("op_by_op")

Bucket: Any = dist.GradBucket  # type: ignore[attr-defined]


def write(*at: Any, value: float = INF) -> Callable[[Any], object]:
    """Writes into the gradient of ``up.weight`` where autograd does not see it."""
    return lambda model: gradient(model.up.weight).data.__setitem__(at, value)


def put(p: Tensor, value: Tensor) -> None:
    p.grad = value


def swapped_with_a_bad_one(model: UpDown) -> None:
    model.down.weight.grad, model.up.weight.grad = model.up.weight.grad, torch.full((8, 8), NAN)


def another_parameters(model: UpDown) -> None:
    gradient(model.down.weight).data.fill_(INF)
    model.up.weight.grad = model.down.weight.grad


def centralised(model: UpDown) -> None:
    """As gradient centralisation does, for which one infinite element makes a whole row nan."""
    write(0, 0)(model)
    for p in (model.up.weight, model.down.weight):
        gradient(p).data.sub_(gradient(p).data.mean(dim=1, keepdim=True))


def clipped_by_norm(model: UpDown) -> None:
    write(0, 0)(model)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)


CHANGES: dict[str, Callable[[UpDown], object]] = {
    "replaced": lambda model: put(model.up.weight, gradient(model.up.weight) * INF),
    "written through data": write(...),
    "one element through data": write(7, 3, value=NAN),
    "numpy": lambda model: gradient(model.up.weight).numpy().__setitem__((2, 5), NAN),
    "data replaced": lambda model: setattr(gradient(model.up.weight), "data", torch.full((8, 8), INF)),
    "swapped with a bad one": swapped_with_a_bad_one,
    "another parameter's": another_parameters,
    "centralised": centralised,
    "clipped by norm": clipped_by_norm,
}


def refuses(loop: Loop) -> bool:
    """Whether a step leaves the parameters as they are, and says so."""
    before, scaler = weights(loop.model), loop.scaler
    scaler.step(loop.optimizer)
    found = scaler.last_found_inf.item()
    scaler.update()
    skipped = found == 1.0 and same(loop.model, before) and not scaler.step_taken(loop.optimizer)
    return skipped and scaler.get_scale() == 64.0 and bool(scaler.first_nonfinite())


@pytest.mark.parametrize("fused", [False, True], ids=["sgd", "fused AdamW"])
def test_a_change_after_the_backward_is_seen(fused: bool) -> None:
    # one graph for all models
    call = compiled(lambda model, x: model(x))
    for name, change in CHANGES.items():
        loop = Loop(optimizer=functools.partial(torch.optim.AdamW, fused=True) if fused else None)
        loop.backward(loss_of(functools.partial(call, loop.model), batch()))
        change(loop.model)
        assert refuses(loop), name


def on_node(p: Tensor, *, after: bool) -> Any:
    """A hook of what accumulates a gradient; it has to live as long as the hook."""
    node = torch.autograd.graph.get_gradient_edge(p).node
    if after:
        return node, node.register_hook(lambda *_: gradient(p).data.__setitem__(..., INF))
    return node, node.register_prehook(lambda grads: tuple(g * INF for g in grads))


HOOKS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda p: p.register_hook(lambda g: g / 0.0),
    "replacing": lambda p: p.register_post_accumulate_grad_hook(lambda leaf: put(leaf, gradient(leaf) * INF)),
    "writing": lambda p: p.register_post_accumulate_grad_hook(
        lambda p: gradient(p).data.__setitem__(..., NAN)
    ),
    "before the node": functools.partial(on_node, after=False),
    "after the node": functools.partial(on_node, after=True),
}


@pytest.mark.parametrize("when", ["before the compile", "after the forward"])
@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS)
def test_a_change_by_a_hook_is_seen(hook: Callable[[Tensor], Any], when: str) -> None:
    loop = Loop()
    handles = [hook(loop.model.up.weight)] if when == "before the compile" else []
    loss = loop.loss()
    if not handles:
        handles.append(hook(loop.model.up.weight))
    loop.backward(loss)
    assert refuses(loop)


def test_gradients_put_together_by_hand_are_read() -> None:
    """As PCGrad does: a gradient for each loss, projected, then assigned."""
    loop = Loop()
    leaves = list(loop.model.parameters())
    gradients = [torch.autograd.grad(loop.scaler.scale(loop.loss()), leaves) for _ in range(2)]
    for p, first, second in zip(leaves, *gradients, strict=True):
        p.grad = first - (first * second).sum() / torch.zeros(()) * second
    assert refuses(loop)


@pytest.mark.parametrize("parts", ["micro-batches", "backwards of one graph"])
def test_a_change_between_two_backwards_is_seen(parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functorch_config, "donated_buffer", False)
    loop = Loop()
    loss = loop.scaler.scale(loop.loss())
    loss.backward(retain_graph=True)
    write(...)(loop.model)
    (loop.scaler.scale(loop.loss()) if parts == "micro-batches" else loss).backward()
    assert refuses(loop)


def test_a_change_in_one_step_does_not_mark_the_next() -> None:
    loop = Loop()
    for changed in (True, False):
        loop.backward()
        if changed:
            write(...)(loop.model)
        assert loop.end() is not changed
        # also without gradients
        assert loop.scaler.first_nonfinite() == (["up.weight"] if changed else [])


def test_a_bad_gradient_that_was_clipped_by_value_after_unscale_is_still_bad() -> None:
    loop = Loop()
    loop.backward(bad=True)
    loop.scaler.unscale_(loop.optimizer)
    torch.nn.utils.clip_grad_value_(loop.model.parameters(), 1.0)
    assert refuses(loop)


@pytest.mark.usefixtures("group_of_one")
def test_the_local_part_of_a_sharded_gradient_is_read() -> None:
    mesh, local = init_device_mesh("cpu", (1,)), torch.ones(4, 4)
    sharded = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    loop = Loop(optimizer=lambda own: torch.optim.SGD([*own, sharded], lr=0.1))
    loop.backward()
    local[3, 3] = NAN
    sharded.grad = DTensor.from_local(local, mesh, [Shard(0)])
    loop.scaler.step(loop.optimizer)
    assert not loop.scaler.step_taken(loop.optimizer)


@pytest.mark.usefixtures("group_of_one")
def test_what_a_communication_hook_of_ddp_makes_of_gradients_is_read() -> None:
    def spoil(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer() * INF)
        return done

    ddp = nn.parallel.DistributedDataParallel(UpDown())
    # resolved, as DDP compares it with the class
    spoil.__annotations__ = {"bucket": Bucket, "return": torch.futures.Future[Tensor]}
    ddp.register_comm_hook(None, spoil)
    loop = Loop(ddp)
    loop.backward()
    assert refuses(loop)
