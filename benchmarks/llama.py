"""A Llama of our own: RMS norms, rotary positions, grouped queries, SwiGLU; a decode step of the same model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """The norm as Hugging Face writes it: it widens its input itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = heads, kv_heads, width // heads
        self.norm1 = RMSNorm(width)
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, kv_heads * self.size, bias=False)
        self.v = nn.Linear(width, kv_heads * self.size, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = RMSNorm(width)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: Sequence[Tensor] = ()) -> Tensor:
        batch, length, width = x.shape
        h = self.norm1(x)
        q = _rotate(self.q(h).view(batch, length, self.heads, self.size).transpose(1, 2), cos, sin)
        k = _rotate(self.k(h).view(batch, length, self.kv_heads, self.size).transpose(1, 2), cos, sin)
        v = self.v(h).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        if past:
            k, v = torch.cat((past[0], k), dim=2), torch.cat((past[1], v), dim=2)
        groups = self.heads // self.kv_heads
        k, v = (
            t[:, :, None].expand(-1, -1, groups, -1, -1).reshape(batch, self.heads, t.shape[2], self.size)
            for t in (k, v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=len(past) == 0)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Returns the loss of ``tokens`` and ``targets``, both ``[batch, length]``."""

    def __init__(self, vocab: int, layers: int, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.blocks = nn.ModuleList(_Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.size = width // heads

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())

    def logits(self, tokens: Tensor, past: Sequence[Sequence[Tensor]] = ()) -> Tensor:
        """Logits after each token; ``past`` has the keys and values of earlier ones, layer by layer."""
        x = self.tokens(tokens)
        start = past[0][0].shape[2] if past else 0
        # as Hugging Face does: angles in fp32, their cosines in the dtype of the stream
        inverse = 10000.0 ** (-torch.arange(0, self.size, 2, device=tokens.device).float() / self.size)
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        angles = positions.float()[:, None] * inverse
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for index, block in enumerate(self.blocks):
            x = block(x, cos, sin, past[index] if past else ())
        return self.head(self.norm(x))


class LlamaDecoder(Llama):
    """One token after a context: what generation does over and over."""

    def forward(self, tokens: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        # as Hugging Face's generate does before it draws
        past = [(keys[layer], values[layer]) for layer in range(len(self.blocks))]
        return self.logits(tokens, past).float()


class RMSNormBlock(nn.Module):
    """A residual stream whose norms feed several linears each."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.norm2 = nn.RMSNorm(width)
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        x = x + F.silu(self.q(h)) * self.k(h) + self.v(h)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))
