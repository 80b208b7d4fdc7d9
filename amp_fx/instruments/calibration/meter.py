"""Adds up what rounding does, at values differentiated twice; ``docs/contributors/predictions.md`` has the formula.

Errors of different elements and different values have no sign in common. Where few numbers decide, as in the head of a
classifier, most of the error has the direction of the gradients G. Of that, u = G / |G| tells all without chance;
random signs only stand for what is across it. Together they are surer than two vectors of signs.

Of what a model returns there is no second derivative: with outputs y, each divided by its norm, and s = <u, y>, one
backward gives what all values do to s, and there are no gradients that could be rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from amp_fx.instruments.calibration.equalising import Chosen, Products, Way
from amp_fx.instruments.calibration.ranges import Ranges, call_with_result, extremes, sample_stride, sampled
from amp_fx.precision.plans.sensitivity import (
    ADDED,
    INPUT,
    MEASURED,
    MEASURED_WEIGHT,
    WEIGHT,
    CallSensitivity,
    ReadSensitivity,
)
from amp_fx.precision.policy.levels import FORWARD, Level

#: graph, call, slot; the slot is empty for the call's result
Key = tuple[int, str, str]

#: graph, call, role of the matmul, operand
RoleKey = tuple[int, str, str, str]

K = TypeVar("K", bound=Hashable)


class Rounding(NamedTuple):
    """What rounding does to a value, see :meth:`Meter.rounding`; and whether that makes a finite element infinite."""

    error: Tensor
    stride: int
    overflows: bool


@dataclass
class Meter:
    """Adds up what the hooks of one step observe; gradients are rounded at the loss scale."""

    low: torch.dtype
    scale: float
    #: True where what is judged is what a model returns, so that there is no gradient to round
    of_outputs: bool = False
    #: below 16 bits, in which matmuls would run; None: that is not measured
    level: Level | None = None
    #: collects what calls below 16 bits read; None: nothing does
    ranges: Ranges | None = None
    #: collects the channels of these, of products; None: nothing does
    products: Products | None = None
    #: (graph, call) -> the ways to read what it multiplies in integers
    ways: Mapping[tuple[int, str], Sequence[Way]] = field(default_factory=dict)
    #: what each of them costs: graph, call, operand, position of the way
    tried: dict[tuple[int, str, str, int], float] = field(default_factory=dict)
    #: (graph, call) -> those that were chosen
    chosen: Mapping[tuple[int, str], Chosen] = field(default_factory=dict)
    #: 0 in the forward, 1 in the backward, 2 in the double backward
    phase: int = 0
    #: of what one double backward finds
    weight: float = 1.0
    #: sensitivity of rounding a value, of rounding its gradient, and of reading an operand in the level
    values: dict[Key, float] = field(default_factory=dict)
    gradients: dict[Key, float] = field(default_factory=dict)
    roles: dict[RoleKey, float] = field(default_factory=dict)
    #: of rounding those elements of a result that are equal to those of the first operand
    kept: dict[Key, float] = field(default_factory=dict)
    #: values that need no gradient, made to have one so that their sensitivity is known
    leaves: list[Tensor] = field(default_factory=list)
    #: numbers of graphs that return something, and of those that have a part in what is judged
    returned: set[int] = field(default_factory=set)
    reached: set[int] = field(default_factory=set)
    #: source lines that write to values that have gradients
    writes: dict[str, None] = field(default_factory=dict)
    _shared: dict[Key, Key] = field(default_factory=dict)

    def share(self, key: Key, known: Key) -> Key:
        """The sensitivity at ``key`` is what is found at ``known``; returns where that is added up."""
        self._shared[key] = self.known(known)
        return self._shared[key]

    def known(self, key: Key) -> Key:
        """Where the sensitivity of a key is added up."""
        return self._shared.get(key, key)

    def observe(self, value: Tensor, key: Key, rounding: Rounding | None = None) -> Rounding:
        """Measures what rounding costs here; ``value`` has to be an alias of its own.

        ``rounding``: that of another alias of the value; returns it for the next.
        """
        rounding = self.observe_value(value, key, rounding)
        self.observe_gradient(value, key)
        return rounding

    def observe_value(self, value: Tensor, key: Key, rounding: Rounding | None = None) -> Rounding:
        """Measures what rounding the value costs."""
        if rounding is None:
            largest = max(map(abs, extremes(value.detach()))) if value.numel() else 0.0
            in_low = torch.tensor(largest, device="cpu").to(self.low)
            overflows = math.isfinite(largest) and bool(in_low.isinf())
            rounding = Rounding(*self.rounding(value), overflows)
        self.weigh(value, self.values, key, rounding.error, rounding.stride)
        if rounding.overflows:
            self.values[key] = math.inf
        return rounding

    def observe_gradient(self, value: Tensor, key: Key) -> None:
        """Measures what rounding the gradient of the value costs."""

        def observe(alias: Tensor) -> None:
            self.weigh(alias, self.gradients, key, *self.rounding(alias, self.scale))

        self.with_gradient(value, observe)

    def with_gradient(self, value: Tensor, observe: Callable[[Tensor], object]) -> None:
        """Gives an alias of the gradient of a value to a function, where that can be differentiated again."""

        def hook(gradient: Tensor) -> Tensor | None:
            if self.phase != 1 or not gradient.requires_grad:
                return None
            alias = gradient.view_as(gradient)
            observe(alias)
            return alias

        value.register_hook(hook)

    def weigh(
        self, value: Tensor, table: dict[K, float], key: K, error: Tensor, places: int | Tensor
    ) -> None:
        """Adds up the rounding of a value, see :meth:`add`, when its gradient in the last pass is known."""

        def hook(sensitivity: Tensor | None) -> None:
            # None where nothing depends on what the backward reads
            if self.phase == 2 and sensitivity is not None:
                self.add(table, key, sensitivity, error, places)

        table.setdefault(key, 0.0)
        value.register_hook(hook)

    def rounding(self, value: Tensor, scale: float = 1.0) -> tuple[Tensor, int]:
        """Error of elements at equal steps, infinite where a finite one becomes infinite; and how far a step goes.

        Errors are kept in bf16, whose range is that of fp32: there are many of them.
        """
        stride = sample_stride(value.shape)
        sample = sampled(value.detach(), stride)
        error = (sample * scale).to(self.low).to(sample.dtype).div_(scale).sub_(sample)
        return error.to(torch.bfloat16), stride

    def add(
        self, table: dict[K, float], key: K, sensitivity: Tensor, error: Tensor, places: int | Tensor
    ) -> None:
        """Adds up a rounding, given the gradient of s with respect to what is rounded, and the errors of elements.

        ``places``: these elements by their number, or the step between them if they stand for all.
        """
        if not bool(error.isfinite().all()):
            table[key] = math.inf
            return
        if isinstance(places, int):
            change, each = sampled(sensitivity.detach(), places) * error, places
        else:
            change, each = sensitivity.detach().take(places) * error, 1
        table[key] = table.get(key, 0.0) + torch.dot(change, change).item() * each * self.weight

    def rows(self, graph: int) -> list[CallSensitivity]:
        """The findings in one graph; nothing where it has no part in the results to judge."""
        found: dict[str, CallSensitivity] = {}
        if graph in self.returned - self.reached:
            return []
        for key in {**self.values, **self.gradients, **self._shared}:
            number, name, slot = key
            if number != graph:
                continue
            row, known = found.setdefault(name, CallSensitivity(name)), self.known(key)
            pair = [_finite(table.get(known, 0.0)) for table in (self.values, self.gradients)]
            if slot:
                row.reads[slot] = ReadSensitivity(*pair)
            else:
                row.value, row.gradient = pair
                row.kept = _finite(self.kept.get(key, 0.0))
        for (number, name, role, operand), sensitivity in self.roles.items():
            if number == graph:
                row = found.setdefault(name, CallSensitivity(name))
                row.roles.setdefault(role, {})[operand] = _finite(sensitivity)
        ran = {(number, name) for number, name, *_ in self.tried}
        for call, chosen in self.chosen.items():
            if call[0] != graph or call not in ran:
                continue
            if (added := call_with_result(call)) is None:
                self._add_chosen(found.setdefault(call[1], CallSensitivity(call[1])), call, chosen)
            elif added in ran and (scale := chosen[MEASURED].scale) is not None:
                row = found.setdefault(added[1], CallSensitivity(added[1]))
                row.roles.setdefault(FORWARD, {})[ADDED] = _finite(self.tried[(*call, MEASURED, 0)])
                row.scales[ADDED] = scale
        return list(found.values())

    def _add_chosen(self, row: CallSensitivity, call: tuple[int, str], chosen: Chosen) -> None:
        """Adds to a row what a call costs in integers by the ways that were chosen."""
        ways = self.ways[call]
        places = {kind: ways.index(way) for kind, way in chosen.items()}
        operands = {INPUT: places[INPUT], WEIGHT: places[INPUT], MEASURED: places[MEASURED]}
        if places[MEASURED] != places[INPUT]:
            operands[MEASURED_WEIGHT] = places[MEASURED]
        for operand, at in operands.items():
            key = (*call, WEIGHT if operand == MEASURED_WEIGHT else operand, at)
            if key in self.tried:
                row.roles.setdefault(FORWARD, {})[operand] = _finite(self.tried[key])
        row.equalisation = {kind: way.exponents for kind, way in chosen.items() if way.exponents}
        if (scale := chosen[MEASURED].scale) is not None and (
            *call,
            MEASURED,
            places[MEASURED],
        ) in self.tried:
            row.scales[INPUT] = scale


def _finite(sensitivity: float) -> float | None:
    return sensitivity if math.isfinite(sensitivity) else None
