"""Programs that a low dtype spoils, each in one module, and a healthy one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["Cancelling", "Kelvin", "Large", "llama", "mean_square", "next_token"]


class _Variance(nn.Module):
    """E[x^2] - E[x]^2."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * (variance + 1e-6).rsqrt()


class Cancelling(nn.Module):
    """A variance by cancellation, of values far from zero."""

    culprit = "norm"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(64, 64), _Variance(), nn.Linear(64, 16)
        nn.init.constant_(self.up.bias, 16.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.up(x))))


class _MeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class Large(nn.Module):
    """A norm of activations whose squares leave the range of fp16."""

    culprit = "norm"

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(64, 64), _MeanSquare(), nn.Linear(64, 16)
        with torch.no_grad():
            self.up.weight.mul_(800)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.up(x)))


class _Attend(nn.Module):
    def forward(self, scores: Tensor, values: Tensor) -> Tensor:
        return torch.softmax(scores, -1) @ values


class Kelvin(nn.Module):
    """A softmax of scores with an offset, which it takes away: in bf16, numbers near 290 are 2 apart."""

    culprit = "attend"

    def __init__(self) -> None:
        super().__init__()
        self.score, self.value, self.attend = nn.Linear(64, 32), nn.Linear(64, 64), _Attend()
        self.head = nn.Linear(64, 16)
        nn.init.constant_(self.score.bias, 290.0)
        with torch.no_grad():
            self.score.weight.mul_(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.attend(self.score(x), self.value(x)))


def llama() -> nn.Module:
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    )


def mean_square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def next_token(ids: Tensor, logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
