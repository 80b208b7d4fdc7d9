"""ReLUs with a derivative of second order: ramps as wide as the noise of what they read.

Where rounding flips the sign of what a ReLU reads, its derivative jumps: no derivative of second order shows that. A
ReLU whose derivative is a ramp as wide as the noise has one. With noise of deviation sigma, a normal ramp of deviation
``sigma / sqrt(8)`` gives the same mean square change of the derivative as the flips do: with x spread evenly around 0,
``sigma^2 * integral(phi(x / w)^2 / w^2) = sigma^2 / (2 sqrt(pi) w)`` is to be the mean ``sigma sqrt(2 / pi)`` of the
noise's magnitude, the share of elements that flip.

The noise is that of torch.autocast. Flips grow with sigma, and what a smoothed derivative shows with its square: for a
plan with a quarter of the noise they are twice as many as predicted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_map

from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import storage_of, storages_written_in
from amp_fx.precision.plans.label import label_of
from amp_fx.precision.policy import OpClass


def smoothed(node: fx.Node, x: Tensor, sigma: float) -> Tensor:
    """``relu(x)``, or ``relu_(x)``, with the derivative of a ramp for noise of deviation ``sigma``, not 0."""
    is_in_place = node.target is torch.ops.aten.relu_.default
    # what is written to is no longer there for the backward
    read = x.clone() if is_in_place else x
    width = sigma / math.sqrt(8)
    density = torch.exp(-0.5 * (read / width).square()) / math.sqrt(2 * math.pi)
    ramp = read * torch.special.ndtr(read / width) + width * density
    result = ramp + (torch.relu(read) - ramp).detach()
    return x.copy_(result) if is_in_place else result


def noise(gm: fx.GraphModule, low: torch.dtype, args: Sequence[Any]) -> dict[fx.Node, float]:
    """Deviation of what every ReLU of a classified graph reads, between fp32 and torch.autocast; changes no input."""
    if not any(has_trait(node, Trait.RELU) for node in gm.graph.nodes):
        return {}
    written = storages_written_in(gm.graph)
    inputs = list(zip(gm.graph.find_nodes(op="placeholder"), args, strict=True))
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    wide, narrow = (_Rounded(gm, dtype) for dtype in (torch.float32, low))
    for run in (wide, narrow):
        given = [
            arg.clone() if isinstance(arg, Tensor) and storage_of(node) in written else arg
            for node, arg in inputs
        ]
        # what is dropped in one of the two is dropped in the other
        with torch.random.fork_rng(devices), torch.no_grad():
            run.run(*given)
    return {node: (narrow.read[node] - x).square().mean().sqrt().item() for node, x in wide.read.items()}


class _Rounded(fx.Interpreter):
    """Runs a graph with the roundings of torch.autocast, and keeps what every ReLU reads."""

    def __init__(self, gm: fx.GraphModule, low: torch.dtype) -> None:
        super().__init__(gm)
        self._low = low
        self.read: dict[fx.Node, Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        if has_trait(n, Trait.RELU):
            (x,) = n.all_input_nodes
            self.read[n] = self.env[x].clone()
        return self._rounded(n, super().run_node(n))

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        return tree_map(lambda value: self._rounded(n, value), super().fetch_args_kwargs_from_env(n))

    def _rounded(self, n: fx.Node, value: Any) -> Any:
        label = label_of(n)
        is_low = label is not None and label.op_class is OpClass.LOW
        is_wide = isinstance(value, Tensor) and value.dtype is torch.float32
        return value.to(self._low).float() if is_low and is_wide else value
