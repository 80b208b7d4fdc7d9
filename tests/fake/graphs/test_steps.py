"""Train steps in one graph: gradients that the compiled function takes itself, and the bytes that a step moves."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_fx import GradScaler, ScalingWarning, record
from benchmarks.counts import counting
from support.checks.whole_program import agree
from support.models.small import Block, Parts
from support.torch_versions import fails_in
from support.tracing.captured_graphs import DEFAULTS, plans, without_inductor

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def _gradients_in_graphs() -> Iterator[None]:
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        yield


class Net(nn.Module):
    """Two linear layers with a norm, and a step of one kind on them."""

    def __init__(self, step: Callable[[Net, Tensor], object]) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(32, 64), nn.LayerNorm(64), nn.Linear(64, 32)
        self._step = step

    def hidden(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))

    def loss(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.hidden(x))).square().mean()

    def forward(self, x: Tensor) -> object:
        return self._step(self, x)


def gradients(net: Net, x: Tensor) -> object:
    loss = net.loss(x)
    return loss.detach(), torch.autograd.grad(loss, list(net.parameters()))


def backward(net: Net, x: Tensor) -> object:
    loss = net.loss(x)
    loss.backward()
    return loss.detach()


def accumulated(net: Net, x: Tensor) -> object:
    for part in x.chunk(2):
        loss = net.loss(part) / 2
        loss.backward()
    return loss.detach()


def of_a_low_value(net: Net, x: Tensor) -> object:
    """The hidden value is the result of a matmul: as a bf16 value cast for the call, no loss would depend on it."""
    h = net.up(x)
    loss = net.down(net.norm(F.gelu(h))).square().mean()
    return loss.detach(), torch.autograd.grad(loss, [h, *net.down.parameters()])


def given_by_name(net: Net, x: Tensor) -> object:
    h = x @ net.up.weight.T
    y = h.relu() @ net.down.weight.T
    return torch.autograd.grad(outputs=[y], inputs=[h, net.up.weight], grad_outputs=[torch.ones_like(y)])


def used_again(net: Net, x: Tensor) -> object:
    h = torch.tanh(x @ net.up.weight.T)
    (g,) = torch.autograd.grad((h @ net.down.weight.T).square().sum(), [h], retain_graph=True)
    return torch.autograd.grad((h - 0.01 * g).square().sum(), [net.up.weight])


def gradient_penalty(net: Net, x: Tensor) -> object:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(net.loss(x) * 100, [x], create_graph=True)
    loss = ((g.norm(dim=1) - 1) ** 2).mean()
    return torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)


def unused(net: Net, x: Tensor) -> object:
    loss = net.hidden(x).square().mean()
    return torch.autograd.grad(loss, list(net.parameters()), allow_unused=True)


def descent(net: Net, x: Tensor) -> object:
    found = torch.autograd.grad(net.loss(x), list(net.parameters()))
    with torch.no_grad():
        for parameter, gradient in zip(net.parameters(), found, strict=True):
            parameter.sub_(gradient, alpha=10.0)
    return [parameter.detach().clone() for parameter in net.parameters()]


STEPS = (gradients, backward, accumulated, of_a_low_value, given_by_name, used_again, unused, descent)


@pytest.mark.parametrize(
    ("step", "policy", "ambient"),
    [
        *((step, "autocast", None) for step in STEPS),
        pytest.param(gradient_penalty, "autocast", None, marks=fails_in("2.11", fault="no requires_grad_()")),
        *((step, "fast", BF16) for step in (backward, used_again, descent)),
    ],
)
def test_a_step_is_one_graph_whose_matmuls_run_low(
    step: Callable[[Net, Tensor], object], policy: str, ambient: torch.dtype | None
) -> None:
    # "fast" rounds more than autocast does, which is what the result is compared with
    tolerance = 1e-3 if policy == "autocast" else 2e-2
    given = {"options": {"policy": policy}, "ambient": ambient, "tolerance": tolerance}
    (found,) = agree(Net(step), torch.randn(16, 32), **given)
    matmuls = [*plans(found, "linear"), *plans(found, "matmul")]
    assert {row.dtype for row in matmuls} == {BF16}


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().double().flatten() for tensor in tensors])


def test_gradients_are_as_exact_as_those_of_separate_graphs() -> None:
    net, x = Net(gradients), torch.randn(16, 32)
    wide = copy.deepcopy(net).double()
    exact = flat(torch.autograd.grad(wide.loss(x.double()), list(wide.parameters())))
    with without_inductor():
        _, inside = torch.compile(net, backend="amp_fx", options=dict(DEFAULTS))(x)
        loss = torch.compile(net.loss, backend="amp_fx", options=dict(DEFAULTS))(x)
        outside = torch.autograd.grad(loss, list(net.parameters()))
    errors = [(flat(got) - exact).norm() for got in (inside, outside)]
    assert 1e-4 * exact.norm() < errors[0] <= 1.01 * errors[1]


def test_a_scaler_that_cannot_scale_says_so() -> None:
    net, x = Net(gradients), torch.randn(16, 32)
    options = {**DEFAULTS, "dtype": "float16", "scaler": "inside"}
    step = torch.compile(net, backend="amp_fx", options=options)
    warns = pytest.warns(ScalingWarning, match="scaler='inside'")
    with without_inductor(), record() as recording, warns:
        step(x)
    assert {row.dtype for row in plans(recording.plans[0], "linear")} == {torch.float16}


def penalty(net: Net, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (g,) = torch.autograd.grad(net.loss(x), [x], create_graph=True)
    return net.loss(x) + (g.norm(dim=1) - 1).square().mean()


def test_the_backward_outside_is_scaled_where_a_gradient_is_taken_inside() -> None:
    """A gradient penalty: its own gradient is the program's, the loss's the scaler's."""
    net, x = Net(penalty), torch.randn(16, 32)
    options = {**DEFAULTS, "dtype": "float16", "scaler": "outside"}
    scaler = GradScaler("cpu", init_scale=256.0, name="outside")
    with without_inductor():
        loss = torch.compile(net, backend="amp_fx", options=options)(x)
        scaler.scale(loss).backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.step_taken(optimizer)


# ---- bytes of loss, gradients and update ----


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
    with counting() as counter:
        torch.compile(step, **(ours if policy else {}))(torch.randn(2, 32, 128))
    assert len(counter.graphs) == 1
    return counter.total.bytes_moved


@pytest.mark.quick_rows("update-autocast")
@pytest.mark.parametrize("policy", ["autocast", "fast"])
@pytest.mark.parametrize("update", [False, True], ids=["gradients", "update"])
def test_a_step_in_one_graph_moves_at_most_what_stock_moves(update: bool, policy: str) -> None:
    assert moved(update, policy) <= moved(update, None)


def test_an_update_in_the_graph_is_one_kernel_with_the_widening_of_its_gradient() -> None:
    gradients, update = (moved(inside, "autocast") for inside in (False, True))
    # apart, the update reads a gradient and a parameter and writes one: 12 bytes
    assert update - gradients < 7 * sum(p.numel() for p in block().parameters())
