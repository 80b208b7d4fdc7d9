"""Programs that a low dtype spoils, each in one module, and a healthy one."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from small_models import Parts

__all__ = ["cancelling", "kelvin", "large", "llama", "mean_square", "next_token"]


def variance(_: nn.Module, x: Tensor) -> Tensor:
    """E[x^2] - E[x]^2."""
    mean = x.mean(-1, keepdim=True)
    return (x - mean) * ((x * x).mean(-1, keepdim=True) - mean * mean + 1e-6).rsqrt()


def mean_square_norm(_: nn.Module, x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


def attend(_: nn.Module, scores: Tensor, values: Tensor) -> Tensor:
    return torch.softmax(scores, -1) @ values


def cancelling() -> nn.Module:
    """A variance by cancellation, of values far from zero, in ``norm``."""
    up, norm, head = nn.Linear(64, 64), Parts(variance), nn.Linear(64, 16)
    nn.init.constant_(up.bias, 16.0)
    return Parts(lambda m, x: m.head(torch.tanh(m.norm(m.up(x)))), up=up, norm=norm, head=head)


def large() -> nn.Module:
    """A ``norm`` of activations whose squares leave the range of fp16."""
    up, norm, head = nn.Linear(64, 64), Parts(mean_square_norm), nn.Linear(64, 16)
    with torch.no_grad():
        up.weight.mul_(800)
    return Parts(lambda m, x: m.head(m.norm(m.up(x))), up=up, norm=norm, head=head)


def kelvin() -> nn.Module:
    """A softmax of scores with an offset, which it takes away: in bf16, numbers near 290 are 2 apart."""
    parts = {"score": nn.Linear(64, 32), "value": nn.Linear(64, 64), "attend": Parts(attend)}
    nn.init.constant_(parts["score"].bias, 290.0)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        parts["score"].weight.mul_(4)  # pyright: ignore
    return Parts(lambda m, x: m.head(m.attend(m.score(x), m.value(x))), **parts, head=nn.Linear(64, 16))


def llama() -> nn.Module:
    """A small Llama with random weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
    }
    heads: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def mean_square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()


def next_token(ids: Tensor, logits: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
