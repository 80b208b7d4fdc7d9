"""Bytes of training steps: gradients that the graph adds, and whole steps in one graph."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import training
from benchmarks.counts import counting
from benchmarks.workloads import Workload


class Block(nn.Module):
    """A transformer's block and a loss."""

    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.up, self.down = (
            nn.Linear(width, width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return (x + self.down(F.gelu(self.up(self.norm(x))))).square().mean()


def workload() -> Workload:
    torch.manual_seed(0)
    return Workload("block", Block(), {"x": torch.randn(2, 32, 128)})


def test_a_backward_that_adds_moves_eight_bytes_less_for_each_parameter() -> None:
    moved = training.measure(workload(), "off")
    weights = sum(p.numel() for p in Block().parameters() if p.ndim > 1)
    assert moved.added == weights
    autograd = moved.backward + 12 * moved.parameters
    graph = moved.adding + 12 * (moved.parameters - moved.added)
    assert autograd - graph == 8 * weights
    assert moved.per_parameter(1, in_graph=True) == moved.per_parameter(1)
    assert moved.per_parameter(4, in_graph=True) == pytest.approx(
        moved.per_parameter(4) - 8 * weights / moved.parameters * 3 / 4
    )


def test_a_model_in_16_bits_has_nothing_to_widen() -> None:
    moved = training.measure(workload(), "bf16")
    assert (moved.added, moved.element) == (0, 2)


def test_a_step_in_one_graph_is_counted_in_16_bits() -> None:
    moved = {arm: training.measure(workload(), arm) for arm in ("autocast", "off", "bf16")}
    assert moved["bf16"].whole < moved["off"].whole <= moved["autocast"].whole
    assert moved["off"].in_one_graph() <= moved["off"].per_parameter(1)


def whole_step(update: bool, backend: str, autocast: bool, options: dict[str, Any] | None = None) -> int:
    """Bytes that a step in one graph moves."""
    torch._dynamo.reset()
    work = workload()
    model, batch = copy.deepcopy(work.model), work.batch
    parameters = list(model.parameters())

    def step(x: Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = model(x)
        grads = torch.autograd.grad(loss, parameters)
        if not update:
            return loss.detach(), grads
        with torch.no_grad():
            for p, g in zip(parameters, grads, strict=True):
                p.sub_(g, alpha=1e-3)
        return loss.detach()

    with torch._dynamo.config.patch(trace_autograd_ops=True), counting() as counter:
        torch.compile(step, backend=backend, options=options)(batch["x"])
    assert len(counter.graphs) == 1
    return counter.total.bytes_moved


@pytest.mark.parametrize("policy", ["autocast", "fast"])
@pytest.mark.parametrize("update", [False, True], ids=["gradients", "update"])
def test_a_whole_step_in_one_graph_moves_at_most_what_stock_moves(update: bool, policy: str) -> None:
    stock = whole_step(update, "inductor", True)
    ours = whole_step(update, "amp_fx", False, {"policy": policy, "profile": "off", "strict": True})
    assert ours <= stock


def test_an_update_in_the_graph_is_one_kernel_with_the_widening_of_its_gradient() -> None:
    options = {"profile": "off", "strict": True}
    gradients, update = (whole_step(u, "amp_fx", False, options) for u in (False, True))
    weights = sum(p.numel() for p in Block().parameters())
    # apart, the update reads a gradient and a parameter and writes one
    assert update - gradients < 7 * weights < 12 * weights
