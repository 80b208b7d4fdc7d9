"""One training step of a model, to be run in several ways."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
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
        seed: of the random numbers that model and loss draw.
    """

    program: nn.Module
    batch: Any
    loss: Callable[[Any], torch.Tensor] | None
    seed: int = 0

    @contextlib.contextmanager
    def untouched(self) -> Iterator[Callable[[Callable[..., Any]], torch.Tensor]]:
        """Yields a function from what is called, such as the compiled model, to its loss; nothing has changed after."""
        with self._repeatable(self.program, call_of(self.batch)) as (given, named):
            yield lambda program: loss_of(program(*given, **named), self.loss)

    def gradients(self, program: Callable[..., Any], scale: float = 1.0) -> Gradients:
        """Gradients of the parameters by name, in fp64.

        Args:
            program: the model, or what ``torch.compile`` made of it.
            scale: loss scale; taken out again.
        """
        with self.untouched() as run:
            return _gradients(run(program), self.program, scale)

    def exact_gradients(self) -> Gradients | None:
        """The same of a copy of the model in fp64; None where it draws random numbers, which are others in fp64."""
        wide = copy.deepcopy(self.program).double()
        with self._repeatable(wide, tree_map(_double, call_of(self.batch))) as (given, named):
            before = _drawn()
            gradients = _gradients(loss_of(wide(*given, **named), self.loss), wide, 1.0)
            return gradients if _drawn() == before else None

    @contextlib.contextmanager
    def _repeatable(
        self, program: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Copies of the arguments; inside, random numbers are those of every run of this step."""
        with untouched(program, *call) as given, torch.enable_grad():
            torch.default_generator.manual_seed(self.seed)
            if torch.cuda.is_available():
                torch.cuda.manual_seed(self.seed)
            random.seed(self.seed)
            np.random.seed(self.seed % 2**32)
            yield given


def distance(gradients: Gradients, reference: Gradients) -> float:
    """Relative L2 distance over all parameters; infinite where something is not finite."""
    far = sum((gradients[name] - exact).square().sum().item() for name, exact in reference.items())
    norm = sum(exact.square().sum().item() for exact in reference.values())
    ratio = (far / norm) ** 0.5 if norm else float("inf")
    return ratio if ratio == ratio else float("inf")


def _drawn() -> list[Any]:
    """Where the generators of random numbers are that a program has by default."""
    states = [torch.default_generator.get_state()]
    if torch.cuda.is_available():
        states.append(torch.cuda.get_rng_state())
    return [*(state.tolist() for state in states), random.getstate(), repr(np.random.get_state(legacy=False))]


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
