"""One training step of a model, or one call of it, to be run in several ways."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import keystr, tree_leaves_with_path, tree_map

from amp_fx.calibration.differentiating import differentiate, differentiate_outputs
from amp_fx.calibration.meter import Meter
from amp_fx.errors import AmpFxError, OptionsError, ScalerError
from amp_fx.graphs.batches import call_of
from amp_fx.reports.histograms import loss_of
from amp_fx.reports.untouched import plain, repeatable
from amp_fx.scaling import find_scaler

__all__ = ["FIRST_SCALE", "OutputStep", "Results", "Step", "loss_scale"]

#: where a scaler starts
FIRST_SCALE = 65536.0

#: what is judged, by name, in fp64
Results = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """A model, a batch and the way to a loss. What is judged are the gradients of the model's parameters.

    Attributes:
        program: the model as it is.
        batch: as the user gave it.
        pick: what the model returns -> what is judged: a loss, a 0-d tensor. None: it returns that itself.
        seed: of the random numbers that model and loss draw.
    """

    program: nn.Module
    batch: Any
    pick: Callable[[Any], Any] | None
    seed: int = 0

    #: True if what is judged are gradients
    differentiates: ClassVar[bool] = True

    def measure(self, meter: Meter, program: Callable[..., Any], seed: int, probes: int) -> None:
        """Runs the step once and adds up what roundings do; nothing has changed after.

        Args:
            meter: of the step.
            program: the model, compiled by a backend that watches each value.
            seed: of the random signs.
            probes: vectors of random signs.
        """
        parameters = [parameter for parameter in self.program.parameters() if parameter.requires_grad]
        with self._repeatable(self.program, call_of(self.program, self.batch)) as (given, named):
            differentiate(
                meter, lambda: loss_of(program(*given, **named), self.pick), parameters, seed, probes
            )

    def results(self, program: Callable[..., Any], scale: float = 1.0) -> Results:
        """What is judged, as a program computes it.

        Args:
            program: the model, or what ``torch.compile`` made of it.
            scale: loss scale; taken out again.
        """
        with self._repeatable(self.program, call_of(self.program, self.batch)) as (given, named):
            return self._judged(program(*given, **named), self.program, scale)

    def exact(self) -> Results | None:
        """The same of a copy of the model in fp64; None where it draws random numbers, which are others in fp64."""
        wide = copy.deepcopy(self.program).double()
        with self._repeatable(wide, tree_map(_double, call_of(self.program, self.batch))) as (given, named):
            before = _drawn()
            found = self._judged(wide(*given, **named), wide, 1.0)
            return found if _drawn() == before else None

    def distance(self, results: Results, reference: Results) -> float:
        """Relative L2 distance over all results together; infinite where something is not finite."""
        far = sum((results[name] - exact).square().sum().item() for name, exact in reference.items())
        norm = sum(exact.square().sum().item() for exact in reference.values())
        return _ratio(far, norm)

    def _judged(self, returned: Any, program: nn.Module, scale: float) -> Results:
        """What is judged, given what a program has returned."""
        return _gradients(loss_of(returned, self.pick), program, scale)

    @contextlib.contextmanager
    def _repeatable(
        self, program: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Copies of the arguments; inside, random numbers are those of every run of this step."""
        with repeatable(program, *call, self.seed) as given, torch.set_grad_enabled(self.differentiates):
            yield given


@dataclass(frozen=True)
class OutputStep(Step):
    """A model and a batch. What is judged are the floating tensors that it returns, each weighing the same.

    Attributes:
        pick: what the model returns -> the tensors that count, in any structure. None: all that are floating.
    """

    differentiates: ClassVar[bool] = False

    def measure(self, meter: Meter, program: Callable[..., Any], seed: int, probes: int) -> None:
        """As in the class above."""
        parameters = [parameter for parameter in self.program.parameters() if parameter.requires_grad]
        with self._repeatable(self.program, call_of(self.program, self.batch)) as (given, named):
            # traced as it is called; the graphs themselves are differentiated
            returned = program(*given, **named)
            with torch.enable_grad():
                differentiate_outputs(meter, [*self._tensors(returned).values()], parameters, seed, probes)

    def distance(self, results: Results, reference: Results) -> float:
        """Root of the mean square of the relative L2 distances of all outputs; infinite where one is not finite."""
        pairs = [(results[name], exact) for name, exact in reference.items()]
        ratios = [
            _ratio((found - exact).square().sum().item(), exact.square().sum().item())
            for found, exact in pairs
        ]
        return _ratio(sum(ratio**2 for ratio in ratios), len(ratios))

    def _judged(self, returned: Any, program: nn.Module, scale: float) -> Results:
        return {name: value.detach().double() for name, value in self._tensors(returned).items()}

    def _tensors(self, returned: Any) -> Results:
        """The floating tensors that count, by their places.

        Raises:
            AmpFxError: there are none.
        """
        chosen = plain(returned) if self.pick is None else self.pick(returned)
        found = {
            keystr(path): leaf
            for path, leaf in tree_leaves_with_path(chosen)
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.numel()
        }
        if not found:
            raise AmpFxError(
                f"the model returned no floating tensor: {type(chosen).__name__}. Give of=function, which picks what "
                "counts of what the model returns."
            )
        return found


def _ratio(far: float, norm: float) -> float:
    if not norm:
        return 0.0 if not far else math.inf
    ratio = math.sqrt(far / norm)
    return math.inf if math.isnan(ratio) else ratio


def _drawn() -> list[Any]:
    """Where the generators of random numbers are that a program has by default."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return [*(state.tolist() for state in states), random.getstate(), repr(np.random.get_state(legacy=False))]


def _gradients(loss: torch.Tensor, program: nn.Module, scale: float) -> Results:
    named = {name: p for name, p in program.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss * scale, list(named.values()), allow_unused=True)
    return {
        name: gradient.double() / scale
        for name, gradient in zip(named, found, strict=True)
        if gradient is not None
    }


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def loss_scale(scale: float | None, low: torch.dtype, name: str = "default") -> float:
    """The loss scale that was given for a low dtype, else that of a scaler, else where such a scaler starts."""
    if low is torch.bfloat16:
        return 1.0
    if scale is None:
        try:
            return float(find_scaler(name).get_scale())
        except ScalerError:
            return FIRST_SCALE
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise OptionsError(f"scale must be a positive number; got {scale!r}.")
    return float(scale)
