"""Every kernel that Inductor generates for CUDA compiles to machine code, without a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import zoo
from amp_fx.targets.tracing import TracedGraph
from small_models import Parts
from targets import OFF, needs_a_target, process, trace_case, traced

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


def block(m: Any, x: Tensor, labels: Tensor) -> Tensor:
    """A convolution, a residual add, a norm and a loss: kernels of every kind that amp_fx casts in."""
    x = (x + F.gelu(m.conv(x))).mean((2, 3))
    return F.cross_entropy(m.head(m.norm(x)), labels)


def sizes(graphs: list[TracedGraph], architectures: tuple[int, ...]) -> dict[str, dict[int, int]]:
    codes = process().call("generated:sources", graphs, OFF)
    return process().call("generated:cubins", codes, architectures)


def test_kernels_of_a_small_net_compile_for_hopper() -> None:
    layers = {"conv": nn.Conv2d(8, 8, 3, padding=1), "norm": nn.LayerNorm(8), "head": nn.Linear(8, 16)}
    graphs = traced(Parts(block, **layers), torch.randn(4, 8, 16, 16), torch.randint(16, (4,)))
    found = sizes(graphs, (90,))
    assert len(found) >= 6
    assert all(size > 1000 for by_architecture in found.values() for size in by_architecture.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet"])
def test_kernels_of_a_model_compile_for_ampere_hopper_and_blackwell(name: str) -> None:
    found = sizes(trace_case(zoo.make(name), "train"), (80, 90, 100))
    assert len(found) >= 20
    assert all(set(sizes) == {80, 90, 100} for sizes in found.values())
    assert all(size > 1000 for by_architecture in found.values() for size in by_architecture.values())
