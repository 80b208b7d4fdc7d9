"""Measure sensitivity: forward, backward and double backward of graphs whose values are watched."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence

import torch

from amp_fx.calibration.meter import Meter
from amp_fx.errors import AmpFxError

__all__ = ["differentiate", "differentiate_outputs"]

logger = logging.getLogger(__name__)


def differentiate(
    meter: Meter,
    run: Callable[[], torch.Tensor],
    parameters: Sequence[torch.Tensor],
    seed: int,
    probes: int = 1,
) -> None:
    """One step: the loss, its gradient, and the gradient of what rounding does to that.

    Args:
        meter: of the step; ``run_measured`` was given the same one.
        run: computes the loss.
        parameters: whose gradients count.
        seed: of the random signs.
        probes: vectors of random signs; what they find is averaged.

    Raises:
        AmpFxError: the loss or its gradient is not finite, or the model cannot be differentiated twice.
    """
    with _differentiable():
        meter.phase = 0
        loss = run()
        meter.phase = 1
        gradients = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
        used = [gradient for gradient in gradients if gradient is not None and gradient.requires_grad]
        norm = math.sqrt(sum(gradient.detach().double().square().sum().item() for gradient in used))
        if not used or not 0 < norm < math.inf:
            raise AmpFxError(
                f"the gradient of the loss has norm {norm}: calibrate on a step whose gradient is finite and not zero."
            )
        _probe(meter, used, norm, parameters, seed, probes)


def differentiate_outputs(
    meter: Meter,
    outputs: Sequence[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    seed: int,
    probes: int = 1,
) -> None:
    """What rounding does to what one call has returned.

    Args:
        meter: of the call; ``run_measured`` was given the same one.
        outputs: those that count, all floating; each weighs the same.
        parameters: those that require a gradient.
        seed: of the random signs.
        probes: vectors of random signs; what they find is averaged.

    Raises:
        AmpFxError: an output is not finite, or all are zero or come out of no graph, or an op has no derivative.
    """
    outputs = [output for output in outputs if output.requires_grad]
    norms = [output.detach().double().norm().item() for output in outputs]
    if not any(norms) or not all(map(math.isfinite, norms)):
        raise AmpFxError(
            f"the outputs have norms {norms}: calibrate on a batch whose outputs are finite and not all zero."
        )
    units = [output.float() / norm for output, norm in zip(outputs, norms, strict=True) if norm]
    with _differentiable():
        _probe(meter, units, math.sqrt(len(units)), parameters, seed, probes)
    for graph in meter.returned - meter.reached:
        logger.warning(
            "what graph number %d of the program returns reaches no output by code that is traced: what it rounds is "
            "not known, and it is planned as torch.autocast has it",
            graph,
        )


def _probe(
    meter: Meter,
    used: Sequence[torch.Tensor],
    norm: float,
    parameters: Sequence[torch.Tensor],
    seed: int,
    probes: int,
) -> None:
    """Gradients of what is judged, along itself and along random signs across it.

    Args:
        meter: adds up what they find.
        used: what is judged.
        norm: of all of it.
        parameters: those that require a gradient.
        seed: of the signs.
        probes: vectors of them.
    """
    inputs = [*parameters, *meter.leaves]
    meter.phase = 2
    own = [value.detach() / norm for value in used]
    torch.autograd.grad(_along(used, own) / norm, inputs, allow_unused=True, retain_graph=True)
    generator = torch.Generator().manual_seed(seed)
    meter.weight = 1 / probes
    for probe in range(probes):
        signs = [_signs(value, generator) for value in used]
        share = _along(signs, own)
        across = [sign.sub_(share.to(sign.device) * unit) for sign, unit in zip(signs, own, strict=True)]
        total = _along(used, across) / norm
        torch.autograd.grad(total, inputs, allow_unused=True, retain_graph=probe + 1 < probes)


def _along(values: Sequence[torch.Tensor], direction: Sequence[torch.Tensor]) -> torch.Tensor:
    """The inner product of two vectors in pieces."""
    pieces = [(value * unit).sum() for value, unit in zip(values, direction, strict=True)]
    return torch.stack([piece.to(pieces[0].device) for piece in pieces]).sum()


def _signs(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    signs = torch.empty(like.shape).bernoulli_(0.5, generator=generator).mul_(2).sub_(1)
    return signs.to(like.device)


@contextlib.contextmanager
def _differentiable() -> Iterator[None]:
    """Names the cause where an op has no derivative, or no second one."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Using backward\\(\\) with create_graph=True")
            yield
    except RuntimeError as error:
        if "not implemented" in str(error) or "does not support" in str(error):
            raise AmpFxError(
                f"the model cannot be differentiated as often as calibrate needs: {error}"
            ) from error
        raise
