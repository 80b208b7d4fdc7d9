"""Adds up what rounding does, at values that are differentiated twice.

With gradients G of all parameters and s = <u, G> / |G| for one vector u of random signs, the gradient of s with
respect to a value is a, and with respect to the gradient of that value it is b. Rounding errors d of the value and c of
its gradient then add a^2 d^2 + b^2 c^2 to the squared relative error of G, summed over elements: errors of different
elements and different values have no sign in common. One double backward gives a and b of all values at once.

Where few numbers decide, as in the head of a classifier, most of the error has the direction of G. Of that direction,
u = G / |G| tells all without chance; random signs then only stand for what is across it. Together they are surer than
two vectors of signs.

Of what a model returns there is no second derivative: with outputs y, each divided by its norm, and s = <u, y>, one
backward gives a of all values, and there are no gradients that could be rounded.

Tensors with many elements are sampled at equal strides.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from amp_fx.plans.sensitivity import CallSensitivity, ReadSensitivity
from amp_fx.policy.levels import Level

__all__ = ["Key", "Meter", "RoleKey", "sample_stride"]

#: elements of a tensor that are looked at
SAMPLES = 65536

#: graph, call, slot; the slot is empty for the call's result
Key = tuple[int, str, str]

#: graph, call, role of the matmul, operand
RoleKey = tuple[int, str, str, str]

K = TypeVar("K", bound=Hashable)


@dataclass
class Meter:
    """Adds up what the hooks of one step see.

    Attributes:
        low: the low dtype.
        scale: loss scale at which gradients are rounded.
        phase: 0 in the forward, 1 in the backward, 2 in the double backward.
        weight: of what one double backward finds.
        values: sensitivity of rounding a value.
        gradients: the same, of rounding its gradient.
        leaves: values that need no gradient, made to have one so that their sensitivity is known.
        of_outputs: True where what is judged is what a model returns, so that there is no gradient to round.
        returned: numbers of graphs that return something.
        reached: those of which it has a part in what is judged.
        largest: magnitude in a value.
        level: below 16 bits, in which matmuls would run; None: that is not measured.
        roles: sensitivity of reading an operand in it.
    """

    low: torch.dtype
    scale: float
    phase: int = 0
    weight: float = 1.0
    values: dict[Key, float] = field(default_factory=dict)
    gradients: dict[Key, float] = field(default_factory=dict)
    leaves: list[torch.Tensor] = field(default_factory=list)
    of_outputs: bool = False
    returned: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    largest: dict[Key, float] = field(default_factory=dict)
    level: Level | None = None
    roles: dict[RoleKey, float] = field(default_factory=dict)
    _shared: dict[Key, Key] = field(default_factory=dict)

    def share(self, key: Key, known: Key) -> Key:
        """The sensitivity at ``key`` is what is found at ``known``; returns where that is added up."""
        self._shared[key] = self.known(known)
        return self._shared[key]

    def known(self, key: Key) -> Key:
        """Where the sensitivity of a key is added up."""
        return self._shared.get(key, key)

    def watch(self, value: torch.Tensor, key: Key) -> None:
        """Measures what rounding costs here; ``value`` has to be an alias of its own."""
        self.watch_value(value, key)
        self.watch_gradient(value, key)

    def watch_value(self, value: torch.Tensor, key: Key) -> None:
        """Measures what rounding the value costs."""
        self.values.setdefault(key, 0.0)
        error, stride = self.rounding(value)
        largest = torch.linalg.vector_norm(value.detach(), math.inf).item() if value.numel() else 0.0
        self.largest[key] = max(largest, self.largest.get(key, 0.0))
        if math.isfinite(largest) and torch.tensor(largest).to(self.low).isinf():
            self.values[key] = math.inf

        def hook(gradient: torch.Tensor) -> None:
            if self.phase == 2:
                self.add(self.values, key, gradient, error, stride)

        value.register_hook(hook)

    def watch_gradient(self, value: torch.Tensor, key: Key) -> None:
        """Measures what rounding the gradient of the value costs."""
        if self.of_outputs:
            return

        def hook(gradient: torch.Tensor) -> torch.Tensor | None:
            if self.phase != 1 or not gradient.requires_grad:
                return None
            error, stride = self.rounding(gradient, self.scale)
            alias = gradient.view_as(gradient)
            alias.register_hook(lambda second: self.add(self.gradients, key, second, error, stride))
            return alias

        value.register_hook(hook)

    def rounding(self, value: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, int]:
        """Error of elements at equal steps, infinite where a finite one becomes infinite; and how far a step goes.

        Errors are kept in bf16, whose range is that of fp32: there are many of them.
        """
        stride = sample_stride(value.shape)
        sample = value.detach().reshape(-1)[::stride]
        error = (sample * scale).to(self.low).to(sample.dtype).div_(scale).sub_(sample)
        return error.to(torch.bfloat16), stride

    def add(
        self,
        table: dict[K, float],
        key: K,
        sensitivity: torch.Tensor,
        error: torch.Tensor,
        stride: int,
    ) -> None:
        """Adds the sensitivity of a rounding.

        Args:
            table: :attr:`values`, :attr:`gradients` or :attr:`roles`.
            key: where it is added.
            sensitivity: gradient of s with respect to what is rounded.
            error: of elements of it, as :meth:`rounding` gave it.
            stride: between these elements.
        """
        if not bool(error.isfinite().all()):
            table[key] = math.inf
            return
        change = sensitivity.detach().reshape(-1)[::stride] * error
        table[key] = table.get(key, 0.0) + torch.dot(change, change).item() * stride * self.weight

    def rows(self, graph: int) -> list[CallSensitivity]:
        """What was found in one graph; nothing where it has no part in what is judged."""
        if graph in self.returned - self.reached:
            return []
        found: dict[str, CallSensitivity] = {}
        for key in {**self.values, **self.gradients, **self._shared}:
            number, name, slot = key
            if number != graph:
                continue
            row = found.setdefault(name, CallSensitivity(name))
            known = self.known(key)
            sensitivities = [_finite(table.get(known, 0.0)) for table in (self.values, self.gradients)]
            if slot:
                row.reads[slot] = ReadSensitivity(*sensitivities)
            else:
                row.value, row.gradient = sensitivities
                row.largest = _finite(self.largest.get(known, 0.0))
        for (number, name, role, operand), sensitivity in self.roles.items():
            if number == graph:
                found.setdefault(name, CallSensitivity(name)).roles.setdefault(role, {})[operand] = _finite(
                    sensitivity
                )
        return list(found.values())


def _finite(sensitivity: float) -> float | None:
    return sensitivity if math.isfinite(sensitivity) else None


def sample_stride(shape: Sequence[int], most: int = SAMPLES) -> int:
    """Steps between sampled elements, with no factor in common with a size: no row or column is left out."""
    if math.prod(shape) <= most:
        return 1
    stride = math.prod(shape) // most + 1
    while any(math.gcd(stride, size) > 1 for size in shape if size > 1):
        stride += 1
    return stride
