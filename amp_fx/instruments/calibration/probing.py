"""A step that is differentiated as often as a meter needs, and errors that name what cannot be."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from amp_fx.errors import AmpFxError
from amp_fx.instruments.calibration.meter import Meter
from amp_fx.instruments.progress import progress
from amp_fx.instruments.reports.advice import FUSED_LAYER, UNFUSED
from amp_fx.instruments.step import Step, loss_of

#: what torch says where an op has no derivative, or that has none; the last where another library registered the op
_NO_DERIVATIVE = "not implemented", "does not support", "no autograd formula was registered"

#: what torch says of a view that code without gradients has made and written to
_VIEW_WRITTEN = "view was created in no_grad mode"


class CutOffError(AmpFxError):
    """Code that runs without gradients is between the graphs and the outputs."""


def measure(step: Step, meter: Meter, program: Callable[..., Any], probes: int) -> None:
    """Runs a step once: forward, backward and double backward of a program whose graphs ``run_measured`` runs.

    ``probes`` vectors of random signs are drawn from the seed of the step; what they find is averaged. AmpFxError
    for a loss whose gradient is zero or not finite.
    """
    parameters = [*step.parameters.values()]
    with (
        differentiable(meter),
        step.returned(program) as returned,
        torch.enable_grad(),
        progress("backward, and the backward of that"),
    ):
        if step.of_outputs:
            used, norm = _units(step, returned)
        else:
            meter.phase = 1
            loss = loss_of(returned, step.pick)
            found = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
            used = [gradient for gradient in found if gradient is not None and gradient.requires_grad]
            norm = math.sqrt(sum(gradient.detach().double().square().sum().item() for gradient in used))
            if not used or not 0 < norm < math.inf:
                raise AmpFxError(
                    f"the gradient of the loss has norm {norm}: calibrate on a step whose gradient is finite and not "
                    "zero."
                )
        _probe(meter, used, norm, [*parameters, *meter.leaves], step.seed or 0, probes)


def _units(step: Step, returned: Any) -> tuple[list[Tensor], float]:
    """The outputs, each divided by its norm, and the norm of all of that."""
    outputs = [output for output in step.outputs(returned).values() if output.requires_grad]
    if not outputs:
        raise CutOffError(
            "no traced code leads to an output of the model: there is nothing to plan. amp_fx.explain(model, *args) "
            "says what is not compiled, and why."
        )
    norms = [output.detach().double().norm().item() for output in outputs]
    if not any(norms) or not all(map(math.isfinite, norms)):
        raise AmpFxError(
            f"the outputs have norms {norms}: calibrate on a batch whose outputs are finite and not all zero."
        )
    units = [output.float() / norm for output, norm in zip(outputs, norms, strict=True) if norm]
    return units, math.sqrt(len(units))


def _probe(
    meter: Meter, used: Sequence[Tensor], norm: float, inputs: Sequence[Tensor], seed: int, probes: int
) -> None:
    """Gradients of what is judged, ``used`` with its norm, along itself and along random signs across it."""
    meter.phase = 2
    own = [value.detach() / norm for value in used]
    torch.autograd.grad(_along(used, own) / norm, inputs, allow_unused=True, retain_graph=True)
    generator = torch.Generator().manual_seed(seed)
    meter.weight = 1 / probes
    for probe in range(probes):
        drawn = (torch.empty(value.shape, dtype=torch.float32, device="cpu") for value in used)
        signs = [
            each.bernoulli_(0.5, generator=generator).mul_(2).sub_(1).to(value.device)
            for each, value in zip(drawn, used, strict=True)
        ]
        share = _along(signs, own)
        across = [sign.sub_(share.to(sign.device) * unit) for sign, unit in zip(signs, own, strict=True)]
        total = _along(used, across) / norm
        torch.autograd.grad(total, inputs, allow_unused=True, retain_graph=probe + 1 < probes)


def _along(values: Sequence[Tensor], direction: Sequence[Tensor]) -> Tensor:
    """The inner product of two vectors in pieces."""
    pieces = [(value * unit).sum() for value, unit in zip(values, direction, strict=True)]
    return torch.stack([piece.to(pieces[0].device) for piece in pieces]).sum()


@contextlib.contextmanager
def differentiable(meter: Meter) -> Iterator[None]:
    """Names the cause where an op has no derivative, or no second one, or what it reads is written to."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
            yield
    except RuntimeError as error:
        if _VIEW_WRITTEN in str(error):
            raise CutOffError(
                "code that is not traced writes in place to a view of what a graph returns: calibrate cannot "
                "differentiate that. Make a new value there: x = x + y, not x += y."
            ) from error
        if "modified by an inplace operation" in str(error):
            lines = "; ".join(meter.writes) or "code that is not traced"
            raise AmpFxError(
                "calibrate differentiates the model, and one of these writes in place to what its derivatives read: "
                f"{lines}. Make a new value there: x = x + y, not x += y."
            ) from error
        if any(text in str(error) for text in _NO_DERIVATIVE):
            remedy = "" if meter.of_outputs else " of='outputs' needs one derivative less."
            if FUSED_LAYER in str(error):
                remedy = (
                    f" Each nn.TransformerEncoderLayer is one op of torch's when it evaluates. {UNFUSED}."
                )
            raise AmpFxError(
                f"the model cannot be differentiated as often as calibrate needs: {str(error).rstrip('.')}.{remedy}"
            ) from error
        raise
