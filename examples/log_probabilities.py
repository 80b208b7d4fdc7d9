"""How far log-probabilities of a training graph are from those of a generation graph, and what brings them together.

    python -m examples.log_probabilities

A small GPT learns sums. It generates one token after the other, with a cache of keys and values and, under policy
``fast``, with residual streams in 16 bits, as servers do; a training graph then computes the log-probabilities of the
same tokens. No kernel of a CPU returns the fp32 result of a low matmul: the head multiplies rounded operands in fp32,
which gives the same numbers up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from examples.gpt import ALPHABET, get_batch, make_corpus

WIDTH, HEADS, LAYERS, LENGTH, BATCH = 64, 4, 2, 48, 32


class Head(nn.Linear):
    """Logits; ``rounds`` gives its operands the values that a matmul in bf16 reads."""

    rounds = False

    def forward(self, x: Tensor) -> Tensor:
        """Logits of hidden states (..., WIDTH)."""
        return F.linear(_rounded(x), _rounded(self.weight)) if self.rounds else super().forward(x)


class Block(nn.Module):
    """Attention and MLP, of a whole sequence or of one more token."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor, cache: Tensor | None = None, at: Tensor | None = None) -> Tensor:
        """Hidden states (batch, tokens, WIDTH); a cache (2, batch, HEADS, LENGTH, size) is written to."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
        mask = None
        if cache is not None and at is not None:
            cache.index_copy_(3, at, torch.stack((k, v)))
            k, v = cache.unbind(0)
            mask = (torch.arange(LENGTH) <= at)[None]
        attended = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Policy(nn.Module):
    """Log-probabilities of all next tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(ALPHABET), WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.lm_head = nn.LayerNorm(WIDTH), Head(WIDTH, len(ALPHABET), bias=False)

    def forward(self, tokens: Tensor, caches: list[Tensor] | None = None, at: Tensor | None = None) -> Tensor:
        """Of tokens (batch, tokens): all of them, or with caches the one ``at`` a position."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]) if at is None else at)
        for number, block in enumerate(self.blocks):
            x = block(x, None if caches is None else caches[number], at)
        return F.log_softmax(self.lm_head(self.norm(x)), -1)


def trained(steps: int = 200) -> tuple[Policy, Tensor]:
    """A policy that has learned sums, and the first tokens of texts."""
    torch.manual_seed(0)
    policy, corpus = Policy(), make_corpus()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3)
    for step in range(steps):
        tokens, targets = get_batch(corpus, step, BATCH, LENGTH)
        optimizer.zero_grad()
        F.nll_loss(policy(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
    optimizer.zero_grad()
    return policy, get_batch(corpus, steps, BATCH, 1)[0]


@torch.no_grad()
def generate(policy: Policy, first: Tensor, options: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Tokens (BATCH, LENGTH), one after the other, and the log-probability of each but the first."""
    step = torch.compile(policy, backend="amp_fx", options=dict(options))
    caches = [torch.zeros(2, BATCH, HEADS, LENGTH, WIDTH // HEADS) for _ in range(LAYERS)]
    draw, tokens, found = torch.Generator().manual_seed(1), [first], []
    for position in range(LENGTH - 1):
        known = step(tokens[-1], caches, torch.tensor([position]))[:, -1]
        tokens.append(torch.multinomial(known.exp(), 1, generator=draw))
        found.append(known.gather(-1, tokens[-1]))
    return torch.cat(tokens, 1), torch.cat(found, 1)


def score(policy: Policy, tokens: Tensor, options: Mapping[str, Any] | None) -> Tensor:
    """The log-probabilities of the same tokens, by the training graph; in fp32 without options."""
    run = policy if options is None else torch.compile(policy, backend="amp_fx", options=dict(options))
    return run(tokens)[:, :-1].gather(-1, tokens[:, 1:, None]).squeeze(-1).detach()


def main() -> None:
    """Prints a row for each way to compute."""
    policy, first = trained()
    with torch.no_grad():
        found = amp_fx.compare(
            policy, get_batch(make_corpus(), 0, BATCH, LENGTH)[0], options={"profile": "off"}
        )
    print(found, end="\n\n")
    worst = [row.module for row in found.worst if row.module != "lm_head"][:2]
    head = {"module": "lm_head", "precision": "fp32"}
    more = [{"module": f"^{module}$", "precision": "fp32"} for module in worst]
    arms: dict[str, tuple[list[dict[str, str]], str]] = {
        "bf16": ([], "bfloat16"),
        "the head's result in fp32": ([head], "bfloat16"),
        "and the two worst in fp32": ([head, *more], "bfloat16"),
        "fp16": ([], "float16"),
    }
    scaler = amp_fx.GradScaler("cpu")
    print(f"{'log-probabilities':28}{'apart':>9}{'at most':>9}{'from fp32: training':>21}{'generation':>12}")
    for name, (rules, dtype) in arms.items():
        policy.lm_head.rounds = head in rules
        torch.compiler.reset()
        options = {"profile": "off", "dtype": dtype}
        tokens, generated = generate(policy, first, {**options, "policy": {"base": "fast", "rules": rules}})
        scaled = {"scaler": scaler.name} if dtype == "float16" else {}
        scored = score(policy, tokens, {**options, **scaled, "policy": {"rules": rules}})
        exact = score(policy, tokens, None)
        apart = (scored - generated).abs()
        errors = [(each - exact).abs().mean().item() for each in (scored, generated)]
        print(f"{name:28}{apart.mean():9.5f}{apart.max():9.5f}{errors[0]:21.5f}{errors[1]:12.5f}", flush=True)


def _rounded(x: Tensor) -> Tensor:
    """To the nearest value of bf16, in a way that no compiler takes for a cast; its derivative is one."""
    bits = x.detach().view(torch.int32)
    nearest = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).view(torch.float32)
    return x + (nearest - x).detach()


if __name__ == "__main__":
    main()
