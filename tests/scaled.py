"""A small model in fp16 with an ``amp_fx.GradScaler``, and how its tests look at it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from amp_fx import GradScaler
from graphs import DEFAULTS

OPTIONS = {**DEFAULTS, "dtype": "float16", "scaler": "default"}
INF = float("inf")


def compiled(program: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(program, backend="amp_fx", options={**OPTIONS, **options})


def new_scaler(**arguments: Any) -> GradScaler:
    return GradScaler("cpu", **{"init_scale": 128.0, **arguments})


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)


def loss_of(model: Callable[..., Tensor], x: Tensor) -> Tensor:
    return model(x).pow(2).mean()


def batch(bad: bool = False) -> Tensor:
    x = torch.randn(8, 8)
    return x * INF if bad else x


def weights(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(model: nn.Module, before: list[Tensor]) -> bool:
    return all(torch.equal(p, value) for p, value in zip(model.parameters(), before, strict=True))


def close(model: nn.Module, exact: nn.Module, error: float = 1e-3) -> bool:
    pairs = zip(model.parameters(), exact.parameters(), strict=True)
    return all(torch.allclose(p, q, atol=error, rtol=1e-3) for p, q in pairs)


def fp32_gradients(model: nn.Module, loss: Callable[[nn.Module], Tensor]) -> list[Tensor]:
    own = copy.deepcopy(model)
    return list(torch.autograd.grad(loss(own), list(own.parameters())))


def gradients_are(model: nn.Module, exact: list[Tensor], error: float = 5e-3) -> bool:
    return all(
        p.grad is not None and (p.grad - value).norm() <= error * value.norm()
        for p, value in zip(model.parameters(), exact, strict=True)
    )
