"""Eight tiny models that differ in what amp_fx does to their weights and graphs."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch._dynamo
import torch.nn.functional as F
from torch import Tensor, nn

_WIDTH = 32


class Model(nn.Module):
    """Its layer ``first`` is what rules of the table are about; the optimizer's rate is such that a step shows."""

    rate = 1.0
    #: of one row of its input
    shape: tuple[int, ...] = (_WIDTH,)
    rows = 1

    def batch(self, size: int, seed: int) -> Tensor:
        """An input of so many rows."""
        return torch.randn(size * self.rows, *self.shape, generator=torch.Generator().manual_seed(seed))


class Small(Model):
    """Too small to gain: by default it stays fp32 in training."""

    rate = 0.4

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(_WIDTH, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.first(x)))


class Large(Model):
    """Large enough that low matmuls pay on a CPU that has them."""

    rate, rows, shape = 16.0, 16, (128,)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(128, 128), nn.Linear(128, 128), nn.Linear(128, 128)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.middle(F.gelu(self.first(x)))))


class Convolutions(Model):
    """Convolutions with BatchNorm, which inference folds, and a classifier."""

    rate, shape = 0.06, (4, 8, 8)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.last = nn.Conv2d(16, 16, 3), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(F.relu(self.norm(self.first(x)))).mean((2, 3)))


class Attention(Model):
    """One transformer layer with a fused qkv."""

    rate, shape = 1.5, (16, _WIDTH)

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.first = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out, self.last = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, 2, c // 2).transpose(1, 2) for y in self.first(self.norm(x)).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, t, c))
        return self.last(x)


class Tied(Model):
    """A head whose weight is the embedding's: a low and an fp32 reader."""

    rate = 0.06

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(64, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, 64, bias=False)
        self.head.weight = self.embedding.weight

    def batch(self, size: int, seed: int) -> Tensor:
        return torch.randint(64, (size, 16), generator=torch.Generator().manual_seed(seed))

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(F.gelu(self.first(self.embedding(ids))))


class Experts(Model):
    """Weights with a slice for each expert, mixed by a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, 4)
        self.up = nn.Parameter(torch.randn(4, _WIDTH, 64) / 6)
        self.down = nn.Parameter(torch.randn(4, 64, _WIDTH) / 8)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.first(x).softmax(-1)
        found = torch.bmm(F.silu(torch.bmm(x.expand(4, *x.shape), self.up)), self.down)
        return torch.einsum("te,etc->tc", shares, found)


class Broken(Model):
    """Two graphs: Dynamo breaks between them, and both read one weight."""

    rate = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.first(x))
        torch._dynamo.graph_break()
        return self.last(F.gelu(self.first(x)))


class Shared(Model):
    """One weight with two readers; a rule about one of them makes them differ."""

    rate = 1.5

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.second.weight = self.first.weight
        self.last = nn.Linear(_WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.second(F.gelu(self.first(x)))))


#: name -> class
MODELS: dict[str, Callable[[], Model]] = {
    "small": Small,
    "large": Large,
    "convolutions": Convolutions,
    "attention": Attention,
    "tied": Tied,
    "experts": Experts,
    "graph break": Broken,
    "shared": Shared,
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
