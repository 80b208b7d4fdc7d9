"""One real compiled step or call of a plan, against the same in fp64 or fp32."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import torch

from amp_fx.compiler.notices import only_looking
from amp_fx.compiler.settings import Options
from amp_fx.instruments.step import Results, Step, apart
from amp_fx.precision.plans.plan import Plan, dtype_name

logger = logging.getLogger(__name__)

#: batches that a plan is checked on; they share one compile
_MOST_STEPS = 4
#: how far a compiled step may miss its budget
SLACK = 1.3
#: share of a budget that gradients of equal steps may be apart
_APART = 0.3
#: what fp32 rounds, in gradients
_ROUNDING = 1e-5
#: times what fp32 rounds that compiled code, which adds up in another order, may be from fp64
_ROUNDED_OTHERWISE = 3.0
#: times what fp32 rounds in one batch, from which on the errors of others need no fp64
_ROUNDED_AWAY = 30.0
#: bytes of parameters up to which a copy in fp64 is made
_MOST_FP64 = 2**30


@dataclass
class _Judged:
    """A step with what it gives in fp32, whether it draws random numbers, and how far an equal step is apart."""

    step: Step
    plain: Results
    draws: bool
    apart: float

    @functools.cached_property
    def exact(self) -> Results | None:
        """The results in fp64, where a copy of the model has room and runs, and draws nothing."""
        size = sum(p.numel() * p.element_size() for p in self.step.model.parameters())
        if not self.draws and size <= _MOST_FP64:
            try:
                return self.step.exact()
            except RuntimeError as error:
                # the program makes tensors of fp32 itself
                logger.debug("the model does not run in float64: %s", error)
        return None

    @property
    def rounded(self) -> float:
        """The error of fp32, 0 where that is not known."""
        return 0.0 if self.exact is None else self.step.error(self.plain, self.exact)

    def error(self, found: Results, rounded: float) -> float:
        """The error of results; fp64 takes only time where that of fp32 is known, and counts for nothing."""
        if rounded and (error := self.step.error(found, self.plain)) > _ROUNDED_AWAY * rounded:
            return error
        return self.step.error(found, self.exact or self.plain)


class Verifier:
    """Compiles plans and measures the error of what is judged on batches that were calibrated on.

    Of several states of a model, each a module of its own, the largest error counts.
    """

    def __init__(self, steps: Sequence[Step], opts: Options, scale: float) -> None:
        self._steps, self._scale = steps, scale
        self._options: dict[str, Any] = {"dtype": "auto" if opts.dtype is None else dtype_name(opts.dtype)}
        if steps[0].of_outputs:
            # the copies of weights that plans are about live across calls
            self._options["weights"] = "cache"

    def error(self, plans: Sequence[Plan]) -> float:
        """Relative L2 error of a step compiled by Inductor with these plans."""
        return self.compiled({"plan": list(plans)})

    def compiled(self, options: Mapping[str, object]) -> float:
        """The error with options of the backend: root of the mean square over the batches."""
        return max(self.state_error(rows, {**self._options, **options}) for rows in self.states)

    def state_error(self, rows: Sequence[_Judged], options: dict[str, Any]) -> float:
        """The error over the steps of one state."""
        # late: it listens to Dynamo as soon as it is loaded. By its name, the program would seem to have asked for it
        from amp_fx.compiler.backend import amp_fx

        if rows[0].exact is None or any(row.draws for row in rows):
            # numbers may be drawn: as in code that is not compiled. Without, the program finds this code in the cache
            options = {**options, "fallback_random": True}
        with apart(), only_looking():
            program = torch.compile(rows[0].step.model, backend=amp_fx, options=options)
            found = [row.step.results(program, self._scale) for row in rows]
        (first, *others), rounded = zip(rows, found, strict=True), rows[0].rounded
        errors = [first[0].error(first[1], 0.0), *(row.error(each, rounded) for row, each in others)]
        return math.sqrt(fmean(error**2 for error in errors))

    @functools.cached_property
    def states(self) -> list[list[_Judged]]:
        """The steps that are run, by state."""
        states: dict[int, list[_Judged]] = {}
        for step in self._steps:
            rows = states.setdefault(id(step.model), [])
            if len(rows) < _MOST_STEPS:
                plain, draws = step.drawn_results()
                # what differs from call to call differs in the first
                apart = 0.0 if rows else step.error(step.results(), plain)
                rows.append(_Judged(step, plain, draws, apart))
        return list(states.values())

    def keeps(self, measured: float, limit: float, predicted: float) -> bool:
        """True where a compiled step is within 1.3 times its budget.

        Where predictions are off, as with kinks, autocast is compiled too, and its error says by how much.
        """
        if measured <= SLACK * limit:
            return True
        return predicted > 0 and measured <= SLACK * limit / predicted * self._autocast

    @functools.cached_property
    def _autocast(self) -> float:
        return self.compiled({"policy": "autocast", "profile": "off"})

    @functools.cached_property
    def _fp32(self) -> float:
        rules = [{"module": ".*", "precision": "fp32"}]
        return self.compiled({"policy": {"rules": rules}, "profile": "off"})

    def doubt(self, limit: float) -> str:
        """Why no compiled step would say whether a plan keeps a limit, or an empty string.

        Two equal steps are run. Random numbers of torch, Python and NumPy are the same in both.
        """
        apart = max(row.apart for rows in self.states for row in rows)
        return _said(f"two equal steps in float32 have results that are {apart:.1e} apart", apart, limit)

    def doubt_compiled(self, limit: float) -> str:
        """A doubt from a step that is compiled in float32, whose distance is held against float32's own rounding."""
        rounded = max(row.rounded for rows in self.states for row in rows)
        apart = self._fp32
        if apart <= _ROUNDED_OTHERWISE * rounded:
            return ""
        return _said(
            f"a step that is compiled in float32 is {apart:.1e} from the uncompiled one", apart, limit
        )


def _said(what: str, apart: float, limit: float) -> str:
    if apart <= _APART * max(limit, _ROUNDING):
        return ""
    said = f"{what}. Model and loss should give the same twice: seed what they draw, keep no state outside the model"
    logger.warning("plans are not checked: %s", said)
    return said
