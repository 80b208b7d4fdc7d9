"""Eight tiny models that differ in what amp_fx does to their weights and graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

from support.models.small import Parts

_WIDTH = 32


class Model(Parts):
    """Its layer ``first`` is what rules of the table are about; the optimizer's rate is such that a step shows."""

    def __init__(self, call: Callable[..., Any], rate: float, *row: int, rows: int = 1, **parts: Any) -> None:
        super().__init__(call, **parts)
        self.rate, self._row, self._rows = rate, row or (_WIDTH,), rows

    def batch(self, size: int, seed: int) -> Tensor:
        """An input of so many rows; tokens, where there is an embedding."""
        generator = torch.Generator().manual_seed(seed)
        if hasattr(self, "embedding"):
            return torch.randint(64, (size, 16), generator=generator)
        return torch.randn(size * self._rows, *self._row, generator=generator)


def small() -> Model:
    """Too small to gain: by default it stays fp32 in training."""
    first, last = nn.Linear(_WIDTH, 64), nn.Linear(64, 16)
    return Model(lambda m, x: m.last(F.relu(m.first(x))), 0.4, first=first, last=last)


def large() -> Model:
    """Large enough that low matmuls pay on a CPU that has them."""

    def call(m: Any, x: Tensor) -> Tensor:
        return m.last(F.gelu(m.middle(F.gelu(m.first(x)))))

    parts = {name: nn.Linear(128, 128) for name in ("first", "middle", "last")}
    return Model(call, 16.0, 128, rows=16, **parts)


def convolutions() -> Model:
    """Convolutions with BatchNorm, which inference folds, and a classifier."""

    def call(m: Any, x: Tensor) -> Tensor:
        return m.last(m.second(F.relu(m.norm(m.first(x)))).mean((2, 3)))

    first, norm = nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16)
    second, last = nn.Conv2d(16, 16, 3), nn.Linear(16, 8)
    return Model(call, 0.06, 4, 8, 8, first=first, norm=norm, second=second, last=last)


def attention() -> Model:
    """One transformer layer with a fused qkv."""

    def call(m: Any, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 2, c // 2).transpose(1, 2) for y in m.first(m.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return m.last(x + m.out(attended.transpose(1, 2).reshape(b, t, c)))

    norm, first = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
    out, last = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
    return Model(call, 1.5, 16, _WIDTH, norm=norm, first=first, out=out, last=last)


def tied() -> Model:
    """A head whose weight is the embedding's: a low and an fp32 reader."""
    embedding, first = nn.Embedding(64, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
    head = nn.Linear(_WIDTH, 64, bias=False)
    head.weight = embedding.weight
    parts = {"embedding": embedding, "first": first, "head": head}
    return Model(lambda m, ids: m.head(F.gelu(m.first(m.embedding(ids)))), 0.06, **parts)


def experts() -> Model:
    """Weights with a slice for each expert, mixed by a softmax."""

    def call(m: Any, x: Tensor) -> Tensor:
        shares, (up, down) = m.first(x).softmax(-1), m.own
        found = torch.bmm(F.silu(torch.bmm(x.expand(4, *x.shape), up)), down)
        return torch.einsum("te,etc->tc", shares, found)

    first, up = nn.Linear(_WIDTH, 4), torch.randn(4, _WIDTH, 64) / 6
    return Model(call, 1.0, first=first, own=nn.ParameterList([up, torch.randn(4, 64, _WIDTH) / 8]))


def graph_break() -> Model:
    """Two graphs: Dynamo breaks between them, and both read one weight."""

    def call(m: Any, x: Tensor) -> Tensor:
        x = F.gelu(m.first(x))
        torch._dynamo.graph_break()
        return m.last(F.gelu(m.first(x)))

    return Model(call, 1.5, first=nn.Linear(_WIDTH, _WIDTH), last=nn.Linear(_WIDTH, 16))


def shared() -> Model:
    """One weight with two readers; a rule about one of them makes them differ."""

    def call(m: Any, x: Tensor) -> Tensor:
        return m.last(F.gelu(m.second(F.gelu(m.first(x)))))

    first, second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
    second.weight = first.weight
    return Model(call, 1.5, first=first, second=second, last=nn.Linear(_WIDTH, 16))


#: name -> what makes it
MODELS: dict[str, Callable[[], Model]] = {
    make.__name__.replace("_", " "): make
    for make in (small, large, convolutions, attention, tied, experts, graph_break, shared)
}


def make(name: str) -> Model:
    """A model of :data:`MODELS`, with the same weights each time; statistics of norms are not their defaults."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = MODELS[name]()
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.uniform_(0.5, 1.5)
    return model
