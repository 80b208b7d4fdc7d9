"""torchtitan's compile section with amp_fx: each block of the transformer is compiled, as a full graph.

    python examples/train_torchtitan.py

In a configuration of torchtitan, this is all::

    compile = CompileConfig(enable=True, backend="amp_fx")
    training = TrainingConfig(mixed_precision_param="float32", ...)

so that FSDP2 leaves the parameters in float32, and amp_fx decides the precision inside the blocks. On the command line:
``--compile.enable --compile.backend amp_fx --training.mixed_precision_param float32``. Here, torchtitan's own function
compiles a small GPT.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from gpt import GPT, GPTConfig


class Blocks(nn.Module):
    """A GPT whose blocks have the name that torchtitan's models give them."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.gpt = gpt
        self.layers = gpt.blocks

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.gpt(tokens, targets)


def train(steps: int = 3, device: str = "cpu") -> list[float]:
    """Trains a small GPT; returns the losses."""
    from torchtitan.config.configs import CompileConfig  # pyright: ignore[reportMissingImports]
    from torchtitan.distributed import ParallelDims  # pyright: ignore[reportMissingImports]
    from torchtitan.distributed.compile import apply_compile  # pyright: ignore[reportMissingImports]

    config = GPTConfig(vocab=64, context=32, layers=2, width=32)
    model = Blocks(GPT(config)).to(device)
    alone: Any = ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, world_size=1)
    apply_compile(model, compile_config=CompileConfig(enable=True, backend="amp_fx"), parallel_dims=alone)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(config.vocab, (4, config.context + 1), device=device)
    losses = []
    for step in range(steps):
        loss = model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.3f}")
    return losses


def main() -> int:
    torch.manual_seed(0)
    train(device="cuda" if torch.cuda.is_available() else "cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main())
