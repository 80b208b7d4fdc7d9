"""A small model in fp16 with an ``amp_fx.GradScaler``, and how its tests look at it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from amp_fx import GradScaler
from support.models.small import UpDown
from support.tracing.captured_graphs import DEFAULTS

OPTIONS = {**DEFAULTS, "dtype": "float16", "scaler": "default"}
INF, NAN = float("inf"), float("nan")


class Loop:
    """A model that is compiled for a scaler of its own, and the usual loop with an optimizer."""

    def __init__(
        self,
        model: Any = None,
        optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer] | None = None,
        name: str = "default",
        **scaler: Any,
    ) -> None:
        self.model = UpDown() if model is None else model
        self.scaler = new_scaler(name=name, **scaler)
        self.run = compiled(self.model, scaler=name)
        self.optimizer = (optimizer or torch.optim.SGD)(self.model.parameters())

    def loss(self, bad: bool = False) -> Tensor:
        return loss_of(self.run, batch(bad))

    def backward(self, loss: Tensor | None = None, *, bad: bool = False) -> None:
        self.scaler.scale(self.loss(bad) if loss is None else loss).backward()

    def step(self, loss: Tensor | None = None, *, bad: bool = False) -> bool:
        """From the loss to the update; whether the step was taken."""
        self.backward(loss, bad=bad)
        return self.end()

    def end(self) -> bool:
        """The same from the step of the optimizer on."""
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return self.scaler.step_taken(self.optimizer)


def step(scaler: Any, optimizer: torch.optim.Optimizer, run: Callable[..., Tensor]) -> None:
    optimizer.zero_grad()
    scaler.scale(loss_of(run, batch())).backward()
    scaler.step(optimizer)
    scaler.update()


def compiled(program: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(program, backend="amp_fx", options={**OPTIONS, **options})


def new_scaler(**arguments: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": 128.0, **arguments})


def loss_of(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def batch(bad: bool = False) -> Tensor:
    x = torch.randn(8, 8)
    return x * INF if bad else x


def gradient(p: Tensor) -> Tensor:
    assert p.grad is not None
    return p.grad


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(model: nn.Module, before: list[Tensor]) -> bool:
    return all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))


def close(model: nn.Module, exact: nn.Module, error: float = 1e-3) -> bool:
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return all(torch.allclose(p, q, atol=error, rtol=1e-3) for p, q in pairs)


def fp32_gradients(model: nn.Module, loss: Callable[[Any], Tensor]) -> list[Tensor]:
    own = copy.deepcopy(model)
    return list(torch.autograd.grad(loss(own), list(own.parameters())))


def gradients_are(model: nn.Module, of: Tensor | Callable[[Any], Tensor], error: float = 5e-3) -> bool:
    """True where a model's gradients are those in fp32 of a loss, or of an input's :func:`loss_of`."""
    exact = fp32_gradients(model, (lambda m: loss_of(m, of)) if isinstance(of, Tensor) else of)
    return all(
        p.grad is not None and (p.grad - value).norm() <= error * value.norm()
        for p, value in zip(model.parameters(), exact, strict=True)
    )
