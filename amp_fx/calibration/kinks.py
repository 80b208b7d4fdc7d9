"""ReLU, smoothed by the noise that reaches it, so that flips of its derivative are seen.

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

from amp_fx._torch import OpOverload
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import storage_of, written_storages
from amp_fx.plans.label import label_of
from amp_fx.policy import OpClass

__all__ = ["is_relu", "noise", "smoothed"]

_IN_PLACE = torch.ops.aten.relu_.default


def is_relu(node: fx.Node) -> bool:
    """True for the calls that are smoothed."""
    return has_trait(node, Trait.RELU)


def smoothed(node: fx.Node, x: torch.Tensor, sigma: float) -> torch.Tensor:
    """``relu(x)``, or ``relu_(x)``, with the derivative of a ramp.

    Args:
        node: the call.
        x: what it reads.
        sigma: deviation of the noise in it, not 0.
    """
    if node.target is _IN_PLACE:
        # what is written to is no longer there for the backward
        return x.copy_(_smoothed(x.clone(), sigma))
    return _smoothed(x, sigma)


def _smoothed(x: torch.Tensor, sigma: float) -> torch.Tensor:
    width = sigma / math.sqrt(8)
    density = torch.exp(-0.5 * (x / width).square()) / math.sqrt(2 * math.pi)
    ramp = x * torch.special.ndtr(x / width) + width * density
    return ramp + (torch.relu(x) - ramp).detach()


def noise(gm: fx.GraphModule, low: torch.dtype, args: Sequence[Any]) -> dict[fx.Node, float]:
    """Deviation of what every ReLU reads, between fp32 and torch.autocast.

    Args:
        gm: captured and classified; not changed.
        low: the low dtype.
        args: one per placeholder; not written to.
    """
    if not any(map(is_relu, gm.graph.nodes)):
        return {}
    written = frozenset[int]().union(*map(written_storages, gm.graph.nodes))
    given = [
        arg.clone() if isinstance(arg, torch.Tensor) and storage_of(node) in written else arg
        for node, arg in zip(gm.graph.find_nodes(op="placeholder"), args, strict=True)
    ]
    state = torch.get_rng_state()
    pair = _Pair(gm, low)
    with torch.no_grad():
        pair.run(*given)
    torch.set_rng_state(state)
    return pair.found


class _Pair(fx.Interpreter):
    """Runs a graph in fp32 and as torch.autocast would, side by side."""

    def __init__(self, gm: fx.GraphModule, low: torch.dtype) -> None:
        super().__init__(gm)
        self._low = low
        self._rounded: dict[fx.Node, Any] = {}
        self.found: dict[fx.Node, float] = {}

    def run_node(self, n: fx.Node) -> Any:
        if is_relu(n):
            (x,) = n.all_input_nodes
            self.found[n] = (self._rounded[x] - self.env[x]).square().mean().sqrt().item()
        state = torch.get_rng_state()
        value = super().run_node(n)
        if isinstance(n.target, OpOverload) or _is_element(n):
            # what is dropped in one of the two is dropped in the other
            torch.set_rng_state(state)
            self._rounded[n] = self._as_autocast(n)
        else:
            self._rounded[n] = value.clone() if isinstance(value, torch.Tensor) else value
        for done in self.user_to_last_uses.get(n, ()):
            self._rounded.pop(done, None)
        return value

    def _as_autocast(self, n: fx.Node) -> Any:
        plan = label_of(n)
        is_low = plan is not None and plan.op_class is OpClass.LOW
        args, kwargs = fx.map_arg(
            (n.args, n.kwargs),
            lambda source: self._round(self._rounded[source]) if is_low else self._rounded[source],
        )
        result = n.target(*args, **kwargs)  # type: ignore[operator]  # a call_function node
        return self._round(result) if is_low else result

    def _round(self, value: Any) -> Any:
        is_wide = isinstance(value, torch.Tensor) and value.dtype is torch.float32
        return value.to(self._low).float() if is_wide else value


def _is_element(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem"
