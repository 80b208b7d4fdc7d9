"""How far what one run has handed out is from what another has."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_fx.comparison.running import Taken

__all__ = ["Distance", "apart", "distances"]


@dataclass(frozen=True)
class Distance:
    """One value of a run beside that of the reference, in the worst call of its graph.

    Attributes:
        error: relative L2 error; infinite where it has inf or nan that the reference has not, or both have nan.
        gradient_error: of its gradient; None where that was not taken.
        lost: share of the gradient's elements that are zero, of those that are not in the reference.
        weight: norm of the value times that of its gradient, in the reference: how much it matters for the loss.
        single: True for one number.
    """

    error: float
    gradient_error: float | None = None
    lost: float = 0.0
    weight: float = 0.0
    single: bool = False

    def worse(self, other: Distance) -> Distance:
        """The worst of both."""
        gradients = [each.gradient_error for each in (self, other) if each.gradient_error is not None]
        return Distance(
            max(self.error, other.error),
            max(gradients, default=None),
            max(self.lost, other.lost),
            max(self.weight, other.weight),
            self.single and other.single,
        )


def distances(run: Taken, reference: Taken) -> dict[tuple[int, str], Distance]:
    """(graph, value) -> how far a run is from the reference, of the values that both have."""
    found: dict[tuple[int, str], Distance] = {}
    for key, exact in reference.values.items():
        if key not in run.values or run.values[key].shape != exact.shape:
            continue
        here = _distance(run, reference, key)
        name = key[:2]
        found[name] = here if name not in found else here.worse(found[name])
    return found


def _distance(run: Taken, reference: Taken, key: tuple[int, str, int]) -> Distance:
    value, exact = run.values[key], reference.values[key]
    error = _relative([value], [exact]) if _is_finite(run.largest[key], reference.largest[key]) else math.inf
    if key not in run.gradients or key not in reference.gradients:
        return Distance(error, single=exact.numel() == 1)
    gradient, true = run.gradients[key], reference.gradients[key]
    is_finite = _is_finite(run.largest_gradients[key], reference.largest_gradients[key])
    some = true != 0
    return Distance(
        error,
        _relative([gradient], [true]) if is_finite else math.inf,
        (some & (gradient == 0)).sum().item() / max(int(some.sum()), 1),
        (exact.norm() * true.norm()).nan_to_num(0.0).item(),
        exact.numel() == 1,
    )


def _is_finite(largest: Tensor, exact: Tensor) -> bool:
    """True for what is finite, or infinite in the reference, too, as the mask of an attention."""
    return math.isfinite(largest) or largest.item() == exact.item()


def apart(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> float:
    """Relative L2 distance of what two runs gave, everything together; see :func:`_relative`."""
    names = [name for name in exact if name in found]
    return _relative([found[name] for name in names], [exact[name] for name in names])


def _relative(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Relative L2 distance over all elements together; infinite where one is not finite, and not the same in both."""
    far = norm = 0.0
    for ours, theirs in zip(found, exact, strict=True):
        same = ours == theirs
        apart = torch.where(same, 0.0, ours.double() - theirs.double())
        far += apart.square().sum().item()
        norm += torch.where(theirs.isinf() & same, 0.0, theirs.double()).square().sum().item()
    if not far:
        return 0.0
    if not norm and math.isfinite(far):
        return 1.0
    ratio = math.sqrt(far / norm) if norm else math.inf
    return math.inf if math.isnan(ratio) else ratio
