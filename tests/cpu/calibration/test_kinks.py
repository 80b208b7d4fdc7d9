"""ReLU under BatchNorm: what flips of its derivative do."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx.calibration import measuring
from amp_fx.calibration.measuring import noise, smoothed
from amp_fx.passes import Classify, PassContext, PinDtypes
from amp_fx.passes.base import run_in_order
from graphs import captured
from small_models import Parts


def net(in_place: bool) -> nn.Module:
    """Convolutions, BatchNorm and ReLU, with the choice of the one in place."""

    def program(m: Any, x: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(m.head(m.body(x).mean((2, 3))), labels)

    torch.manual_seed(0)
    parts = ((nn.Conv2d(c, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(in_place)) for c in (3, 16, 16))
    return Parts(program, body=nn.Sequential(*itertools.chain(*parts)), head=nn.Linear(16, 4))


def batch(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(32, 3, 16, 16, generator=generator), torch.randint(4, (32,), generator=generator)


def true_error(model: nn.Module) -> float:
    """Of eager torch.autocast, against fp64."""
    squares: list[float] = []
    for seed in range(2):
        x, labels = batch(seed)
        low, wide = copy.deepcopy(model), copy.deepcopy(model).double()
        with torch.autocast("cpu", torch.bfloat16):
            loss = low(x, labels)
        loss.backward()
        wide(x.double(), labels).backward()
        found, exact = (
            torch.cat([p.grad.double().flatten() for p in m.parameters() if p.grad is not None])
            for m in (low, wide)
        )
        squares.append(((found - exact).norm() / exact.norm()).item() ** 2)
    return math.sqrt(sum(squares) / 2)


@pytest.mark.parametrize("in_place", [False, True])
def test_flips_of_a_relu_are_predicted_in_magnitude(in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = net(in_place)
    before = copy.deepcopy(model.state_dict())
    batches = [batch(seed) for seed in range(2)]
    with_flips = amp_fx.calibrate(model, batches, profile="off").autocast_error
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    monkeypatch.setattr(measuring, "noise", lambda *_: {})
    without = amp_fx.calibrate(model, batches, profile="off").autocast_error
    true = true_error(model)
    print(f"with {with_flips:.2e}, without {without:.2e}, true {true:.2e}")
    assert without < true / 3
    assert true / 2 < with_flips < 2 * true


def test_a_smoothed_relu_has_the_values_of_a_relu_and_the_slope_of_a_ramp() -> None:
    (node,) = captured(torch.relu, torch.randn(4)).graph.find_nodes(
        op="call_function", target=torch.ops.aten.relu.default
    )
    x = torch.linspace(-4, 4, 81).requires_grad_()
    y = smoothed(node, x, math.sqrt(8))
    torch.testing.assert_close(y, x.relu())
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, torch.special.ndtr(x.detach()))


def test_noise_is_what_autocast_adds_and_leaves_inputs_and_generator_alone() -> None:
    def program(x: Tensor, w: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        h = F.dropout(torch.matmul(x, w), 0.5)
        return torch.relu(F.batch_norm(h, mean, var, training=True) * 3 + h)

    args = torch.randn(256, 32), torch.randn(32, 8), torch.zeros(8), torch.ones(8)
    gm = captured(program, *args)
    run_in_order(gm, (PinDtypes(), Classify()), PassContext(training=True))
    state, given = torch.get_rng_state(), [arg.clone() for arg in args]
    (sigma,) = noise(gm, torch.bfloat16, args).values()
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(arg, before) for arg, before in zip(args, given, strict=True))
    # both runs dropped the same elements: what is left is rounding, of a matmul's result and of its operands
    scale = torch.matmul(*args[:2]).std().item()
    assert 2**-11 * scale < sigma < 2**-5 * scale
    assert noise(captured(torch.matmul, *args[:2]), torch.bfloat16, args[:2]) == {}
    # only what is on a low list is rounded
    gm = captured(lambda x: torch.relu(x.sin() * 3), args[0])
    run_in_order(gm, (PinDtypes(), Classify()), PassContext(training=True))
    assert [*noise(gm, torch.bfloat16, args[:1]).values()] == [0]
