"""A regression on sensors that read temperatures in kelvin: large numbers with small differences, which bf16 spoils."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Station(nn.Module):
    """Returns the loss where it is given a target. The same weights each time it is made."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.read, self.norm = nn.Linear(32, 256), nn.BatchNorm1d(256)
            self.mix, self.out = nn.Linear(256, 256), nn.Linear(256, 1)

    def forward(self, kelvin: Tensor, target: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.norm(self.read(kelvin)))
        y = self.out(torch.tanh(self.mix(h))).squeeze(-1)
        return y if target is None else nn.functional.mse_loss(y, target)


def batch(seed: int) -> tuple[Tensor, Tensor]:
    """512 readings of 32 sensors, and what is to be learnt of them."""
    wave = torch.randn(512, 32, generator=torch.Generator().manual_seed(seed))
    return 290 + wave, torch.sin(wave[:, :4].sum(-1))


def train(model: nn.Module, step: Callable[..., Tensor] | None = None, steps: int = 300) -> float:
    """Trains on made batches; the loss on batches that were not trained on.

    Args:
        model: is trained.
        step: what is called: the model, or what ``torch.compile`` made of it.
        steps: how many.
    """
    step = model if step is None else step
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for number in range(steps):
        optimizer.zero_grad()
        step(*batch(number)).backward()
        optimizer.step()
    with torch.no_grad():
        losses = [step(*batch(number)).item() for number in range(10_000, 10_008)]
    return sum(losses) / len(losses)
