"""The layouts of convolutions' weights and gradients, in code that Inductor generates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.compiled_autograd import _enable
from torch.utils.checkpoint import checkpoint

from graphs import DEFAULTS

BF16 = torch.bfloat16


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(64, 64, 3, padding=1, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 64, 3, padding=1),
        nn.ReLU(),
        # what it returns is what a convolution computes
        nn.Conv2d(64, 128, 3, padding=1, bias=False),
    )


@dataclass(frozen=True)
class Step:
    """A training step of ``net``.

    Attributes:
        output: of the forward.
        gradients: by name.
        calls: names of the ATen calls of another step, each with the name of its innermost caller.
    """

    output: Tensor
    gradients: dict[str, Tensor]
    calls: list[tuple[str, str]]


def step(model: nn.Module, image: Tensor, run: Any) -> Step:
    """One step, and another one that is profiled."""
    output = run(image)
    output.float().square().mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    with torch.profiler.profile() as profiled:
        run(image).float().square().mean().backward()
    calls = [(e.name, e.cpu_parent.name if e.cpu_parent else "") for e in profiled.events() or ()]
    return Step(output.detach(), gradients, calls)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(torch.contiguous_format, id="nchw"),
        pytest.param(torch.channels_last, id="nhwc", marks=pytest.mark.slow),
    ],
)
def steps(request: pytest.FixtureRequest) -> Iterator[tuple[Step, Step, Step]]:
    """(amp_fx, eager autocast, fp64) on an image of one layout."""
    image = torch.randn(2, 64, 8, 8).to(memory_format=request.param)
    model = net()
    low, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    torch._dynamo.reset()
    own = step(model, image, torch.compile(model, backend="amp_fx", options=dict(DEFAULTS)))

    def autocast(x: Tensor) -> Tensor:
        with torch.autocast("cpu", BF16):
            return low(x)

    yield own, step(low, image, autocast), step(exact, image.double(), exact)
    torch._dynamo.reset()


def test_gradients_lie_as_their_parameters_and_autograd_copies_none(steps: tuple[Step, Step, Step]) -> None:
    own, _, _ = steps
    for name, parameter in net().named_parameters():
        assert own.gradients[name].stride() == parameter.stride(), name
    # three weights, forward and backward
    assert [name for name, _ in own.calls].count("amp_fx::convert") == 6
    assert "torch::autograd::AccumulateGrad" in {name for name, _ in own.calls}
    assert not [name for name, caller in own.calls if "AccumulateGrad" in caller and "copy" in name]


def test_what_a_convolution_returns_lies_as_it_would_eagerly(steps: tuple[Step, Step, Step]) -> None:
    own, eager, _ = steps
    assert own.output.stride() == eager.output.stride()
    assert own.output.dtype is torch.float32


def test_values_and_gradients_are_as_close_to_fp64_as_autocasts(steps: tuple[Step, Step, Step]) -> None:
    own, eager, exact = steps

    def error(got: Tensor, right: Tensor) -> float:
        return float((got.double() - right).norm() / right.norm())

    assert error(own.output, exact.output) <= 1.1 * error(eager.output, exact.output)
    for name, right in exact.gradients.items():
        assert error(own.gradients[name], right) <= 1.25 * error(eager.gradients[name], right) + 1e-3, name


@pytest.mark.parametrize("weights", ["cast", "auto"])
def test_without_gradients_weights_are_laid_out_by_the_same_call(weights: str) -> None:
    torch._dynamo.reset()
    model, image = net().eval(), torch.randn(2, 64, 8, 8)
    run = torch.compile(model, backend="amp_fx", options={**DEFAULTS, "weights": weights})
    with torch.no_grad():
        output = run(image)
        with torch.profiler.profile() as profiled:
            run(image)
        right = copy.deepcopy(model).double()(image.double())
    assert [event.name for event in profiled.events() or ()].count("amp_fx::convert") == 3
    assert output.is_contiguous()
    assert float((output.double() - right).norm() / right.norm()) < 1e-2


@pytest.mark.usefixtures("op_by_op")
def test_gradients_are_the_same_when_recomputed_or_compiled_by_compiled_autograd() -> None:
    model, image = nn.Conv2d(64, 64, 3), torch.randn(2, 64, 8, 8)

    def gradient(program: Callable[[Tensor], Tensor], around: AbstractContextManager[Any]) -> Tensor:
        torch._dynamo.reset()
        model.zero_grad()
        output = torch.compile(program, backend="amp_fx", options=dict(DEFAULTS))(image)
        with around:
            output.square().mean().backward()
        assert model.weight.grad is not None
        return model.weight.grad

    plain = gradient(model, nullcontext())
    again = gradient(lambda x: checkpoint(model, x, use_reentrant=False), nullcontext())
    compiled = gradient(model, _enable(torch.compile(backend="amp_fx")))
    for other in (again, compiled):
        assert other.stride() == model.weight.stride()
        torch.testing.assert_close(other, plain, rtol=0, atol=0)
