"""Programs that a low dtype spoils, each in one module."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from support.models.small import Parts


def cancelling() -> nn.Module:
    """A variance E[x^2] - E[x]^2, of values far from zero."""

    def normed(_: object, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x * x).mean(-1, keepdim=True) - mean * mean
        return (x - mean) * (variance + 1e-6).rsqrt()

    up = nn.Linear(64, 64)
    nn.init.constant_(up.bias, 16.0)
    layers = {"up": up, "norm": Parts(normed), "tanh": nn.Tanh(), "head": nn.Linear(64, 16)}
    return nn.Sequential(OrderedDict(layers))


def large() -> nn.Module:
    """A norm of activations whose squares leave the range of fp16."""
    up = nn.Linear(64, 64)
    with torch.no_grad():
        up.weight.mul_(800)
    norm = Parts(lambda _, x: x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6))
    return nn.Sequential(OrderedDict(up=up, norm=norm, head=nn.Linear(64, 16)))


def kelvin() -> nn.Module:
    """A softmax of scores with an offset, which it takes away: in bf16, numbers near 290 are 2 apart."""
    score, value = nn.Linear(64, 32), nn.Linear(64, 64)
    nn.init.constant_(score.bias, 290.0)
    with torch.no_grad():
        score.weight.mul_(4)
    attend = Parts(lambda _, scores, values: torch.softmax(scores, -1) @ values)
    parts = {"score": score, "value": value, "attend": attend, "head": nn.Linear(64, 16)}
    return Parts(lambda m, x: m.head(m.attend(m.score(x), m.value(x))), **parts)


OFF = {"profile": "off"}
FP16 = {**OFF, "dtype": "float16"}

#: program -> what makes it, the module to name, the size of its input, and options
SPOILED: dict[str, tuple[Callable[[], nn.Module], str, tuple[int, ...], dict[str, Any]]] = {
    "cancelling": (cancelling, "norm", (128, 64), OFF),
    "large": (large, "norm", (128, 64), FP16),
    "kelvin": (kelvin, "attend", (4, 32, 64), OFF),
}


def mean_square(outputs: Tensor) -> Tensor:
    return outputs.square().mean()
