"""Measured sensitivity against ablation: one call low at a time, run op by op, its gradient beside fp64's."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn

import amp_fx
from amp_fx.graphs.capture import capture
from amp_fx.graphs.regions import ambient_regions
from amp_fx.graphs.values import in_place_target
from amp_fx.passes import (
    Classify,
    Constrain,
    FuseCasts,
    InsertCasts,
    Pass,
    PassContext,
    PinDtypes,
)
from amp_fx.passes.base import run_in_order
from amp_fx.plans.label import Takes, label_of
from amp_fx.plans.sensitivity import CallSensitivity, as_number
from amp_fx.policy import OpClass
from small_models import GPT, Fragile, Parts, tokens, train

Batch = tuple[Tensor, Tensor]
Gradients = list[Tensor | None]


@dataclass(frozen=True)
class OneLow(Pass):
    """Places one call low and all others in fp32."""

    name: ClassVar[str] = "one-low"
    needs: ClassVar[frozenset[str]] = frozenset({"classes", "hazards-pinned"})
    ensures: ClassVar[frozenset[str]] = frozenset({"dtypes"})
    call_name: str = ""

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        for node in gm.graph.nodes:
            plan = label_of(node)
            if plan is None or plan.op_class is OpClass.KEEP or in_place_target(node) is not None:
                continue
            plan.dtype = None if plan.traced is None else torch.float32
            if plan.name == self.call_name:
                plan.dtype, plan.takes, plan.op_class = plan.low, Takes.DTYPE, OpClass.PROMOTE
        return self.call_name


class Ablation:
    """A model's one graph with its real inputs."""

    def __init__(self, model: nn.Module, batch: Batch, low: torch.dtype, scale: float) -> None:
        self.low, self.scale = low, scale
        found: list[tuple[fx.GraphModule, Sequence[Any]]] = []

        def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
            found.append((gm, list(inputs)))
            return gm.forward

        torch.compile(model, backend=keep, fullgraph=True)(*batch)
        ((self.gm, self.inputs),) = found
        exact = copy.deepcopy(model).double()
        wanted = {id(p): exact.get_parameter(name) for name, p in model.named_parameters()}
        exact(*batch).backward()
        self.parameters = [x for x in self.inputs if isinstance(x, nn.Parameter)]
        self.exact = [wanted[id(p)].grad for p in self.parameters]

    def error(self, call: str) -> float:
        """Relative error of the gradient where one call is low."""
        gm = capture(self.gm, ambient_regions({"cpu": self.low}))
        passes = PinDtypes(), Classify(), Constrain(), OneLow(call), InsertCasts(), FuseCasts()
        run_in_order(gm, passes, PassContext(training=True))
        (loss,) = gm(*self.inputs)
        gradients = torch.autograd.grad(loss * self.scale, self.parameters)
        pairs = list(zip(gradients, self.exact, strict=True))
        far = sum((g.double() / self.scale - e).square().sum().item() for g, e in pairs if e is not None)
        norm = sum(e.square().sum().item() for _, e in pairs if e is not None)
        return math.sqrt(far / norm) if math.isfinite(far) else math.inf


def estimate(row: CallSensitivity) -> float:
    """What one call does alone: its operands, its result and their gradients rounded."""
    parts = [row, *row.reads.values()]
    return math.sqrt(sum(as_number(part.value) + as_number(part.gradient) for part in parts))


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; infinities are the largest and equal."""

    def ranks(values: Sequence[float]) -> Tensor:
        tensor = torch.tensor([min(value, 1e30) for value in values], dtype=torch.float64)
        _, places = torch.unique(tensor, return_inverse=True)
        counts = torch.bincount(places).double()
        return (counts.cumsum(0) - (counts + 1) / 2)[places]

    return torch.corrcoef(torch.stack([ranks(first), ranks(second)]))[0, 1].item()


def judged(model: nn.Module, batch: Batch, dtype: str, scale: float = 1.0) -> tuple[list[float], list[float]]:
    """Estimates and truths of every call that computes."""
    cal = amp_fx.calibrate(model, batch, dtype=dtype, scale=scale, profile="off")
    (graph,) = cal.sensitivity.graphs
    rows = {row.name: row for row in graph.outline.nodes}
    ablation = Ablation(model, batch, cal.sensitivity.dtype, cal.sensitivity.scale)
    calls = [
        row
        for row in graph.calls
        if rows[row.name].op_class is not OpClass.FOLLOW and rows[row.name].traced is not None
    ]
    return [estimate(row) for row in calls], [ablation.error(row.name) for row in calls]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_sensitivity_of_a_gpts_calls_is_that_of_ablation(dtype: str) -> None:
    model = train(GPT(), tokens, 30)
    estimates, truths = judged(model, tokens(0), dtype, 4096.0)
    print(f"spearman {spearman(estimates, truths):.3f}")
    assert len(truths) > 20
    assert spearman(estimates, truths) >= 0.95
    ratios = sorted(e / t for e, t in zip(estimates, truths, strict=True) if t > 3e-5)
    assert 0.9 <= ratios[len(ratios) // 2] <= 1.1


@pytest.mark.slow
def test_fragile_calls_are_ranked_as_by_ablation() -> None:
    def batch(seed: int) -> Batch:
        return tokens(seed, 1, 256, 512)

    model = train(Fragile(), batch, 5)
    estimates, truths = judged(model, batch(0), "bfloat16")
    print(f"spearman {spearman(estimates, truths):.3f}")
    assert spearman(estimates, truths) >= 0.93


def test_calls_that_overflow_in_fp16_are_named() -> None:
    def program(m: Any, x: Tensor) -> Tensor:
        h = m.a(x) * 1e5
        return (m.b(h / 1e5) ** 2).mean()

    torch.manual_seed(0)
    model = Parts(program, a=nn.Linear(8, 8), b=nn.Linear(8, 1))
    cal = amp_fx.calibrate(model, torch.randn(4, 8), dtype="float16", scale=1.0, profile="off")
    (graph,) = cal.sensitivity.graphs
    assert [row.name for row in graph.calls if row.value is None] == ["mul"]
    assert [row.name for row in graph.calls if any(r.value is None for r in row.reads.values())] == ["div"]
