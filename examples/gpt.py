"""A small character-level GPT and the corpus it learns: shared by the demo and by the training-curve test."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALPHABET = "\n +-=0123456789"


@dataclass(frozen=True)
class GPTConfig:
    vocab: int = len(ALPHABET)
    context: int = 128
    layers: int = 4
    heads: int = 4
    width: int = 256


class Block(nn.Module):
    """Pre-norm attention and MLP, each with its residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Returns the loss: with the loss inside the compiled graph, no fp32 logits cross its boundary."""

    def __init__(self, config: GPTConfig | None = None) -> None:
        super().__init__()
        config = config or GPTConfig()
        self.tokens = nn.Embedding(config.vocab, config.width)
        self.positions = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)
        self.head.weight = self.tokens.weight
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.logits(tokens).flatten(0, 1), targets.flatten())


def large() -> tuple[GPT, tuple[Tensor, Tensor]]:
    """As large as GPT-2, with a batch of 8 x 1024 tokens; without data, for ``amp-fx draw ... --target cuda:h100``."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=50257, context=1024, layers=12, heads=12, width=768))
        tokens = torch.empty((8, 1024), dtype=torch.int64)
    return model, (tokens, tokens)


def make_corpus(lines: int = 20_000, seed: int = 0) -> Tensor:
    """Sums and differences, one a line, as indices into ``ALPHABET``: the same text for the same seed."""
    draw = random.Random(seed)
    text: list[str] = []
    for _ in range(lines):
        a, b = draw.randint(0, 99), draw.randint(0, 99)
        text.append(f"{a} + {b} = {a + b}\n" if draw.random() < 0.5 else f"{a} - {b} = {a - b}\n")
    index = {character: i for i, character in enumerate(ALPHABET)}
    return torch.tensor([index[character] for character in "".join(text)])


def get_batch(corpus: Tensor, step: int, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """The batch of a step, inputs and next-character targets: a function of the step alone."""
    starts = torch.randint(len(corpus) - length, (batch,), generator=torch.Generator().manual_seed(step))
    windows = torch.stack([corpus[start : start + length + 1] for start in starts.tolist()])
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
