"""One real compiled step of a plan, against the same step in fp64 or fp32."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from amp_fx.calibration.step import Gradients, Step, distance
from amp_fx.options import Options
from amp_fx.plans.plan import Plan, dtype_name
from amp_fx.scaling import without_scaling

__all__ = ["Verifier"]

#: batches that a plan is checked on; they share one compile
_MOST_STEPS = 4

#: how far a compiled step may miss its budget
_SLACK = 1.3

#: bytes of parameters up to which a copy in fp64 is made
_MOST_FP64 = 2**30


class Verifier:
    """Compiles plans and measures the error of their gradients on batches that were calibrated on.

    Of several states of a model, each a module of its own, the largest error counts.
    """

    def __init__(self, steps: Sequence[Step], opts: Options, scale: float) -> None:
        states: dict[int, list[Step]] = {}
        for step in steps:
            states.setdefault(id(step.program), []).append(step)
        self._states = [_State(found[:_MOST_STEPS], scale) for found in states.values()]
        self._opts = opts
        self._autocast: float | None = None

    def error(self, plans: Sequence[Plan]) -> float:
        """Relative L2 error of the gradient of a step compiled by Inductor with these plans."""
        return self.compiled({"plan": list(plans)})

    def keeps(self, measured: float, limit: float, predicted: float) -> bool:
        """True where a compiled step is within 1.3 times its budget.

        Where predictions are off, as with kinks, autocast is compiled too, and the two are compared with each other.

        Args:
            measured: error of the plan's compiled step.
            limit: the budget.
            predicted: error of torch.autocast.
        """
        if measured <= _SLACK * limit:
            return True
        if self._autocast is None:
            self._autocast = self.compiled({"policy": "autocast", "profile": "off"})
        return predicted > 0 and measured <= _SLACK * limit / predicted * self._autocast

    def compiled(self, options: Mapping[str, object]) -> float:
        """The error with options of the backend: root of the mean square over the batches."""
        low = self._opts.dtype
        given = {"dtype": "auto" if low is None else dtype_name(low), **options}
        return max(state.error(given) for state in self._states)


class _State:
    """A model with the batches that its compiled steps are judged on."""

    def __init__(self, steps: Sequence[Step], scale: float) -> None:
        self._steps = steps
        self._scale = scale
        self._exact: list[Gradients] = []

    def error(self, options: dict[str, Any]) -> float:
        torch.compiler.reset()
        try:
            with without_scaling():
                program = torch.compile(self._steps[0].program, backend="amp_fx", options=options)
                found = [step.gradients(program, self._scale) for step in self._steps]
        finally:
            torch.compiler.reset()
        squares = [distance(*pair) ** 2 for pair in zip(found, self._references(), strict=True)]
        return math.sqrt(sum(squares) / len(squares))

    def _references(self) -> list[Gradients]:
        if not self._exact:
            program = self._steps[0].program
            fits = sum(p.numel() * p.element_size() for p in program.parameters()) <= _MOST_FP64
            self._exact = [
                step.exact_gradients() if fits else step.gradients(program) for step in self._steps
            ]
        return self._exact
