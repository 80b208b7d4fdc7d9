"""A small graph with its sensitivities, and what its roundings cost: for tests of placement by sensitivity."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, fx

from amp_fx.passes import Classify, Constrain, PassContext, PinDtypes
from amp_fx.passes.base import run_in_order
from amp_fx.passes.forward.place_by_sensitivity import PricedGraph, price
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.label import label_of
from amp_fx.precision.plans.sensitivity import CallSensitivity, ReadSensitivity, slots
from amp_fx.precision.policy import OpClass
from support.tracing.captured_graphs import captured

Rows = dict[str, CallSensitivity]

#: rates at which the matmuls below gain in low precision
FAST_LOW = DeviceProfile("test", "cpu", {"float32": 1e10, "bfloat16": 1e12, "float16": 1e12}, 1e11, 1e-9)
CONTEXT = PassContext(profile=FAST_LOW, training=True)


def variance(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A matmul, a difference of squares, a matmul."""
    h = torch.matmul(x, w)
    spread = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True).square()
    return torch.matmul(h * spread.rsqrt(), v)


ARGS = torch.randn(64, 16), torch.randn(16, 16), torch.randn(16, 16)


def sensed(name: str, value: float | None, reads: Iterable[str]) -> CallSensitivity:
    """A call whose operands are felt as its result is."""
    return CallSensitivity(name, value, value, {slot: ReadSensitivity(value, value) for slot in reads})


def uniform(gm: fx.GraphModule, value: float = 1e-6) -> Rows:
    """The same sensitivity everywhere."""
    run_in_order(gm, (PinDtypes(), Classify()), CONTEXT)
    return {
        label.name: sensed(label.name, value, (slot for slot, _, _ in slots(node)))
        for node in gm.graph.nodes
        if (label := label_of(node)) is not None and label.op_class is not OpClass.KEEP
    }


def priced(gm: fx.GraphModule, rows: Rows) -> PricedGraph:
    run_in_order(gm, (PinDtypes(), Classify(), Constrain()), CONTEXT)
    found = price(gm, CONTEXT, rows)
    assert found is not None
    return found


@functools.cache
def spread(device: str = "cpu") -> tuple[fx.GraphModule, Rows]:
    """The graph of :func:`variance`, and the same sensitivity everywhere."""
    gm = captured(variance, *ARGS, device=device)
    return gm, uniform(gm)


def node_of(name: str) -> fx.Node:
    return next(node for node in spread("cuda")[0].graph.nodes if node.name == name)
