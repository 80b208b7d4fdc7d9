"""One real compiled step of a plan, against the same step in fp64 or fp32."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from amp_fx.calibration.step import Gradients, Step, distance
from amp_fx.options import Options
from amp_fx.plans.plan import Plan, dtype_name
from amp_fx.scaling import without_scaling

__all__ = ["Verifier"]

#: how far a compiled step may miss its budget
_SLACK = 1.3

#: bytes of parameters up to which a copy in fp64 is made
_MOST_FP64 = 2**30


class Verifier:
    """Compiles plans and measures the error of their gradients on the batch that was calibrated on."""

    def __init__(self, step: Step, opts: Options, scale: float) -> None:
        self._step = step
        self._opts = opts
        self._scale = scale
        self._reference: Gradients | None = None
        self._autocast: float | None = None

    def error(self, plans: Sequence[Plan]) -> float:
        """Relative L2 error of the gradient of a step compiled by Inductor with these plans."""
        return self._compiled({"plan": list(plans)})

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
            self._autocast = self._compiled({"policy": "autocast", "profile": "off"})
        return predicted > 0 and measured <= _SLACK * limit / predicted * self._autocast

    def _compiled(self, options: dict[str, object]) -> float:
        low = self._opts.dtype
        given = {"dtype": "auto" if low is None else dtype_name(low), **options}
        torch.compiler.reset()
        try:
            with without_scaling():
                gradients = self._step.gradients(
                    lambda program: torch.compile(program, backend="amp_fx", options=given), self._scale
                )
        finally:
            torch.compiler.reset()
        return distance(gradients, self._exact)

    @property
    def _exact(self) -> Gradients:
        if self._reference is None:
            size = sum(p.numel() * p.element_size() for p in self._step.program.parameters())
            fits = size <= _MOST_FP64
            self._reference = (
                self._step.exact_gradients() if fits else self._step.gradients(lambda program: program)
            )
        return self._reference
