"""One training step of a model, to be run in several ways."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from amp_fx.reports.histograms import call_of, loss_of
from amp_fx.reports.untouched import untouched

__all__ = ["Gradients", "Step", "distance"]

Gradients = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """A model, a batch and the way to a loss.

    Attributes:
        program: the model as it is.
        batch: as the user gave it.
        loss: what the model returns -> 0-d tensor, or None.
    """

    program: nn.Module
    batch: Any
    loss: Callable[[Any], torch.Tensor] | None

    @contextlib.contextmanager
    def untouched(self) -> Iterator[Callable[[Callable[..., Any]], torch.Tensor]]:
        """Yields a function from what is called, such as the compiled model, to its loss; nothing has changed after."""
        args, kwargs = call_of(self.batch)
        with untouched(self.program, args, kwargs) as (given, named), torch.enable_grad():
            yield lambda program: loss_of(program(*given, **named), self.loss)

    def gradients(self, program: Callable[..., Any], scale: float = 1.0) -> Gradients:
        """Gradients of the parameters by name, in fp64.

        Args:
            program: the model, or what ``torch.compile`` made of it.
            scale: loss scale; taken out again.
        """
        with self.untouched() as run:
            return _gradients(run(program), self.program, scale)

    def exact_gradients(self) -> Gradients:
        """The same of a copy of the model in fp64."""
        wide = copy.deepcopy(self.program).double()
        args, kwargs = tree_map(_double, call_of(self.batch))
        with untouched(wide, args, kwargs) as (given, named), torch.enable_grad():
            return _gradients(loss_of(wide(*given, **named), self.loss), wide, 1.0)


def distance(gradients: Gradients, reference: Gradients) -> float:
    """Relative L2 distance over all parameters; infinite where something is not finite."""
    far = sum((gradients[name] - exact).square().sum().item() for name, exact in reference.items())
    norm = sum(exact.square().sum().item() for exact in reference.values())
    ratio = (far / norm) ** 0.5 if norm else float("inf")
    return ratio if ratio == ratio else float("inf")


def _gradients(loss: torch.Tensor, program: nn.Module, scale: float) -> Gradients:
    named = {name: p for name, p in program.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss * scale, list(named.values()), allow_unused=True)
    return {
        name: gradient.double() / scale
        for name, gradient in zip(named, found, strict=True)
        if gradient is not None
    }


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
