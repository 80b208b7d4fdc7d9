"""Bytes that a training step in one graph moves: loss, gradients and update."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.counts import counting
from graphs import DEFAULTS
from small_models import Block, Parts


def block() -> nn.Module:
    return Parts(lambda m, x: m.block(x).square().mean(), block=Block(128, 1))


@functools.cache
def moved(update: bool, policy: str | None) -> int:
    """Bytes by Inductor's estimate; without a policy, those of stock Inductor under autocast."""
    torch._dynamo.reset()
    model = block()
    parameters = list(model.parameters())

    def step(x: Tensor) -> object:
        with contextlib.nullcontext() if policy else torch.autocast("cpu", torch.bfloat16):
            loss = model(x)
        grads = torch.autograd.grad(loss, parameters)
        if not update:
            return loss.detach(), grads
        with torch.no_grad():
            for p, g in zip(parameters, grads, strict=True):
                p.sub_(g, alpha=1e-3)
        return loss.detach()

    ours: dict[str, Any] = {"backend": "amp_fx", "options": {**DEFAULTS, "policy": policy}}
    with torch._dynamo.config.patch(trace_autograd_ops=True), counting() as counter:
        torch.compile(step, **(ours if policy else {}))(torch.randn(2, 32, 128))
    assert len(counter.graphs) == 1
    return counter.total.bytes_moved


@pytest.mark.parametrize("policy", ["autocast", "fast"])
@pytest.mark.parametrize("update", [False, True], ids=["gradients", "update"])
def test_a_step_in_one_graph_moves_at_most_what_stock_moves(update: bool, policy: str) -> None:
    assert moved(update, policy) <= moved(update, None)


def test_an_update_in_the_graph_is_one_kernel_with_the_widening_of_its_gradient() -> None:
    gradients, update = (moved(inside, "autocast") for inside in (False, True))
    # apart, the update reads a gradient and a parameter and writes one: 12 bytes
    assert update - gradients < 7 * sum(p.numel() for p in block().parameters())
