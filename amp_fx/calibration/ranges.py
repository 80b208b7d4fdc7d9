"""Scales of the values that int8 calls read, from what a model computes on a few batches.

A value is ``(byte - zero point) * scale`` in uint8. The range has zero in it, so that zeros stay zeros: what is one-sided,
as behind relu, has all 256 bytes for its side. The ends are those that give the least squared error, rounding and
saturation together: the extremes, or less where few values are far out.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from amp_fx.calibration.meter import sample_stride
from amp_fx.graphs.traits import LinearForm, linear_form
from amp_fx.plans.label import label_of
from amp_fx.policy import OpClass

__all__ = ["Ranges", "fitted", "requantised", "value_read_below"]

logger = logging.getLogger(__name__)

aten = torch.ops.aten

#: elements of a value that are kept of each batch
_SAMPLES = 16384

#: shares of the extremes that ranges are tried with
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)

#: graph, name of the call
Call = tuple[int, str]


@dataclass
class Ranges:
    """What the first argument of each call that may run in int8 was, over all batches."""

    lowest: dict[Call, float] = field(default_factory=dict)
    highest: dict[Call, float] = field(default_factory=dict)
    samples: dict[Call, list[Tensor]] = field(default_factory=dict)

    def run(self, gm: fx.GraphModule, graph: int, args: Any) -> Any:
        """Runs a captured and classified graph, and observes what its calls read."""
        with torch.no_grad():
            return _Observed(gm, self, graph).run(*args)

    def observe(self, call: Call, value: Tensor) -> None:
        """Adds the value that a call reads in one batch."""
        if not value.numel():
            return
        low, high = (each.item() for each in value.aminmax())
        self.lowest[call] = min(low, self.lowest.get(call, 0.0))
        self.highest[call] = max(high, self.highest.get(call, 0.0))
        stride = sample_stride(value.shape, _SAMPLES)
        self.samples.setdefault(call, []).append(value.reshape(-1)[::stride].float())

    def scales(self) -> dict[Call, tuple[float, int]]:
        """Scale and zero point of what each call reads; none for a value that was zero, infinite or NaN."""
        found: dict[Call, tuple[float, int]] = {}
        for call, samples in self.samples.items():
            low, high = self.lowest[call], self.highest[call]
            if math.isfinite(high - low) and high > low:
                found[call] = fitted(torch.cat(samples), low, high)
            else:
                logger.warning(
                    "%s reads values from %s to %s: no scale fits them, so each call looks for one or stays in 16 bits",
                    call[1],
                    low,
                    high,
                )
        return found


class _Observed(fx.Interpreter):
    """Runs a graph, and shows what its calls read."""

    def __init__(self, gm: fx.GraphModule, ranges: Ranges, graph: int) -> None:
        super().__init__(gm)
        self._ranges, self._graph = ranges, graph

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "call_function" and (read := value_read_below(n)) is not None:
            label = label_of(n)
            if label is not None:
                self._ranges.observe((self._graph, label.name), self.env[read])
        return super().run_node(n)


def value_read_below(node: fx.Node) -> fx.Node | None:
    """The value that a linear or a convolution on the low list multiplies by its weight."""
    label = label_of(node)
    if label is None or label.op_class is not OpClass.LOW:
        return None
    form: LinearForm | None = linear_form(node)
    position = 0 if node.target is aten.conv2d.default else None if form is None else form.input
    value = None if position is None else node.args[position]
    return value if isinstance(value, fx.Node) else None


def fitted(sample: Tensor, low: float, high: float) -> tuple[float, int]:
    """The scale and zero point of least squared error for values from ``low <= 0`` to ``high >= 0``."""
    best, least = (1.0, 0), math.inf
    for share in _SHARES:
        scale = (high - low) * share / 255
        chosen = scale, round(-low * share / scale)
        error = (requantised(sample, chosen) - sample).square().sum().item()
        if error < least:
            best, least = chosen, error
    return best


def requantised(value: Tensor, by: tuple[float, int]) -> Tensor:
    """The value as it is read in uint8, in its own dtype."""
    scale, zero = by
    return torch.fake_quantize_per_tensor_affine(value, scale, zero, 0, 255)
