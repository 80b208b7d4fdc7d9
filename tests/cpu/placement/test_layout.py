"""The layouts of convolutions' weights and gradients, in code that Inductor generates."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.compiled_autograd import _enable
from torch.utils.checkpoint import checkpoint

from amp_fx import record
from support.tracing.captured_graphs import DEFAULTS


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


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(torch.contiguous_format, id="nchw"),
        pytest.param(torch.channels_last, id="nhwc", marks=pytest.mark.slow),
    ],
)
def test_gradients_lie_as_their_parameters_and_autograd_copies_none(layout: torch.memory_format) -> None:
    model, image = net(), torch.randn(2, 64, 8, 8).to(memory_format=layout)
    run = torch.compile(model, backend="amp_fx", options=dict(DEFAULTS))
    output = run(image)
    # what a convolution returns lies as it would eagerly
    assert output.stride() == model(image).stride()
    output.square().mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.stride() == parameter.stride(), name
    model.zero_grad()
    with torch.profiler.profile() as profiled:
        run(image).square().mean().backward()
    calls = [(e.name, e.cpu_parent.name if e.cpu_parent else "") for e in profiled.events() or ()]
    # three weights, forward and backward
    assert [name for name, _ in calls].count("amp_fx::convert") == 6
    assert "torch::autograd::AccumulateGrad" in {name for name, _ in calls}
    assert not [name for name, caller in calls if "AccumulateGrad" in caller and "copy" in name]


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["cast", "auto"])
def test_without_gradients_weights_are_laid_out_by_the_same_call(weights: str) -> None:
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
    with record() as recording:
        compiled = gradient(model, _enable(torch.compile(backend="amp_fx", options=dict(DEFAULTS))))
    # its backward has the casts of the forward already
    assert len(recording.plans) == 1
    for other in (again, compiled):
        assert other.stride() == model.weight.stride()
        torch.testing.assert_close(other, plain, rtol=0, atol=0)
