"""Programs of which Dynamo leaves a part to eager, or only cuts them in two."""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor, nn


class Between(nn.Module):
    """A linear on either side of one of the methods below, which each multiply by other weights."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part
        self.first, self.inner, self.last = (nn.Linear(8, 8) for _ in range(3))
        self.lstm, self.gru = nn.LSTM(8, 8, batch_first=True), nn.GRU(8, 8, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(getattr(self, self.part)(self.first(x).relu()))

    @torch.compiler.disable
    def disabled(self, x: Tensor) -> Tensor:
        return self.inner(x)

    def recurrent(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]

    def gated(self, x: Tensor) -> Tensor:
        return self.gru(x)[0]

    def loop(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.inner(x)
            torch._dynamo.graph_break()
        return x

    def rows(self, x: Tensor) -> Tensor:
        """As experts of a mixture, row by row, that depend on the data."""
        for row in (x.sum(-1) > -1).nonzero()[:2]:
            x = x + self.inner(x[row[0]])
        return x

    def tried(self, x: Tensor) -> Tensor:
        try:
            torch._dynamo.graph_break()
            return self.inner(x)
        finally:
            self.calls = 1

    def in_context(self, x: Tensor) -> Tensor:
        with contextlib.suppress(ValueError):
            torch._dynamo.graph_break()
            x = self.inner(x)
        return x

    def printed(self, x: Tensor) -> Tensor:
        print("between")
        return self.inner(x)

    def branch(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            x = x + 1
        return self.inner(x)

    def item(self, x: Tensor) -> Tensor:
        return self.inner(x) * x.sum().item()

    def broken(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return self.inner(x)

    def whole(self, x: Tensor) -> Tensor:
        return self.inner(x)


#: parts that run eagerly -> FLOPs of their matmuls, forward and backward, for a batch of 2 x 4
LEFT = {
    "disabled": 3 * 2 * 8 * 8 * 8,
    "recurrent": 3 * 2 * 8 * (32 * 8 + 32 * 8),
    # the first state needs no gradient
    "gated": 3 * 2 * 8 * 24 * 8 + (3 * 4 - 1) * 2 * 2 * 24 * 8,
    "loop": 2 * 3 * 2 * 8 * 8 * 8,
    "rows": 2 * 3 * 2 * 4 * 8 * 8,
    "tried": 3 * 2 * 8 * 8 * 8,
    "in_context": 3 * 2 * 8 * 8 * 8,
}

#: parts that are in graphs, before or behind a break
COMPILED = ("printed", "branch", "item", "broken", "whole")
