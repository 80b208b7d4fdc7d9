"""A train step in one graph, compiled by Inductor."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_fx import record
from graphs import DEFAULTS, plans


def test_a_train_step_in_one_graph_computes_low_and_returns_exact_gradients() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
    x = torch.randn(32, 64)

    def step(net: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        loss = F.mse_loss(net(x), x)
        return loss.detach(), *torch.autograd.grad(loss, list(net.parameters()))

    def error(got: tuple[Tensor, ...]) -> float:
        return max(float((g.double() - e).norm() / e.norm()) for g, e in zip(got[1:], exact[1:], strict=True))

    exact = step(copy.deepcopy(net).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        autocast = step(net, x)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True), record() as recording:
        ours = torch.compile(step, backend="amp_fx", fullgraph=True, options=dict(DEFAULTS))(net, x)
    assert {value.dtype for value in ours} == {torch.float32}
    assert {row.dtype for row in plans(recording.plans[0], "linear")} == {torch.bfloat16}
    assert 1e-4 < error(ours) <= 1.05 * error(autocast) + 1e-3
