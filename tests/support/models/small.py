"""Small models that many tests share.

``Parts`` is any few modules with a function of them, ``UpDown`` two linears. A GPT, and models of fragile arithmetic,
return their loss, for what is about accuracy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


class Parts(nn.Module):
    """Modules and buffers by name, and a function of the module itself and of what it is called with.

    ``Parts(lambda m, x: x + m.up(x), up=nn.Linear(8, 8))``
    """

    def __init__(self, call: Callable[..., Any], **parts: nn.Module | Tensor) -> None:
        super().__init__()
        self._call = call
        for name, part in parts.items():
            if isinstance(part, Tensor):
                self.register_buffer(name, part)
            else:
                self.add_module(name, part)

    def forward(self, *args: Any) -> Any:
        return self._call(self, *args)


class Mixture(nn.Module):
    """Two products of experts behind a linear; ``ends`` are the last rows of each, and one."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.silu) -> None:
        super().__init__()
        self.act = act
        self.first = nn.Linear(16, 16)
        self.up = nn.Parameter(torch.randn(4, 32, 16) / 4)
        self.down = nn.Parameter(torch.randn(4, 16, 32) / 6)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        hidden = self.act(F.grouped_mm(self.first(x), self.up.mT, offs=ends))
        return F.grouped_mm(hidden, self.down.mT, offs=ends)


class UpDown(nn.Module):
    """``down(act(up(x)))``, with a norm after the first linear if that is asked for."""

    def __init__(
        self,
        width: int = 8,
        hidden: int = 8,
        out: int | None = None,
        *,
        norm: bool = False,
        act: Callable[[Tensor], Tensor] = F.relu,
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, out or width)
        self.norm = nn.LayerNorm(hidden) if norm else nn.Identity()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.norm(self.up(x))))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        heads = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4).unbind(0)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder with a tied head; takes tokens and targets."""

    def __init__(
        self, layers: int = 2, width: int = 64, heads: int = 2, vocab: int = 256, length: int = 32
    ) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tok.weight
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Fragile(nn.Module):
    """E[x^2] - E[x]^2, a softmax by hand, rotary angles up to 1024, a long running sum, logs of small probabilities."""

    def __init__(self, width: int = 32, heads: int = 2, vocab: int = 512) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocab, width)
        self.up, self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(5))
        self.f1, self.f2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.decay, self.head = nn.Linear(width, width), nn.Linear(width, vocab, bias=False)
        self.gain, self.shift = nn.Parameter(torch.ones(width)), nn.Parameter(torch.full((width,), 4.0))
        for linear in (self.q, self.k):
            nn.init.normal_(linear.weight, std=0.35)
        nn.init.normal_(self.head.weight, std=0.05)
        size = width // heads
        self.frequency: Tensor
        self.register_buffer("frequency", 1.0 / 10000 ** (torch.arange(0, size, 2).float() / size))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        b, t = ids.shape
        x = self.up(self.embedding(ids)) + self.shift
        mean = x.mean(-1, keepdim=True)
        z = (x - mean) * ((x * x).mean(-1, keepdim=True) - mean * mean + 1e-6).rsqrt() * self.gain
        angles = (torch.arange(t, device=ids.device).float() * 4)[:, None] * self.frequency
        q, k, v = (w(z).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.q, self.k, self.v))
        scores = _rotate(q, angles) @ _rotate(k, angles).transpose(-1, -2) / 4
        e = (scores - scores.amax(-1, keepdim=True)).exp()
        p = e / e.sum(-1, keepdim=True)
        x = x + self.o((p @ v).transpose(1, 2).reshape(b, t, -1))
        sums = torch.cumsum(F.softplus(self.decay(z)) * 1e-2, 1)
        x = x * torch.exp(-(sums - sums[:, -1:].detach()) * 0.05)
        n = x / (x.norm(dim=-1, keepdim=True) + 1e-8)
        x = x + self.f2(F.silu(self.f1(n * 8)))
        p = torch.softmax(self.head(x), -1)
        return -torch.log(p.gather(-1, targets[..., None]) + 1e-9).mean()


def _rotate(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class SpreadNorm(nn.Module):
    """A network whose norm computes its variance as E[x^2] - E[x]^2, of values far from zero, out of a matmul."""

    def __init__(self, width: int = 64, wide: int = 64, classes: int = 16) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(width, width), nn.Linear(wide, classes)
        self.mid = nn.Sequential(nn.Linear(width, wide), nn.Tanh(), nn.Linear(wide, wide))
        nn.init.constant_(self.up.bias, 4.0)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        h = self.up(x)
        mean = h.mean(-1, keepdim=True)
        variance = (h * h).mean(-1, keepdim=True) - mean * mean
        z = (h - mean) * (variance + 1e-6).rsqrt()
        return F.cross_entropy(self.head(torch.tanh(self.mid(z))), targets)


class Beyond(nn.Module):
    """Its squares are beyond fp16's 65504; what is around them is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        size = (h * 3000).square().mean(-1, keepdim=True).sqrt() / 3000
        return self.down(size * h)


def tokens(seed: int, rows: int = 4, length: int = 32, vocab: int = 256) -> Batch:
    """Sequences with a rule to learn: each token follows from the one before, with noise."""
    generator = torch.Generator().manual_seed(seed)
    columns = [torch.randint(vocab, (rows, 1), generator=generator)]
    for _ in range(length):
        columns.append((columns[-1] * 5 + 7 + torch.randint(8, (rows, 1), generator=generator)) % vocab)
    ids = torch.cat(columns, 1)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def train(model: nn.Module, batch: Callable[[int], Batch], steps: int, rate: float = 1e-3) -> nn.Module:
    """Adam in fp32; the model itself, without gradients."""
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(*batch(1000 + step))
        if not math.isfinite(loss.item()):
            raise ValueError(f"loss {loss.item()} at step {step}")
        loss.backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return model


def first(value: Any) -> Tensor:
    """The first of several outputs, or the only one."""
    return value[0] if isinstance(value, tuple) else value


def near_autocast(got: Tensor, model: nn.Module, x: Tensor, most: float = 1.1, least: float = 0.05) -> bool:
    """True for a result in fp32 that is at most, and at least, so many times as far from fp64 as eager autocast's."""
    exact = first(copy.deepcopy(model).double()(x.double() if x.is_floating_point() else x))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        limit = (first(model(x)) - exact).norm()
    return got.dtype is torch.float32 and bool(least * limit <= (got - exact).norm() <= most * limit)


class Recurrent(nn.Module):
    """An LSTM in training, and what is behind it; ``late``: what is before it, too."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late, self.first = late, nn.Linear(8, 8)
        self.cell, self.last = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if self.late:
            x = self.first(x).relu()
        return self.last(self.cell(x)[0])
