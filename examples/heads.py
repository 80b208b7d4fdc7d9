"""What the result of a language model's head costs on a GPU that need not be there: rounded, in fp32, all in fp32.

    python -m examples.heads

The head of GPT-2 with its loss, 8 x 1024 tokens, forward and backward.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx

#: what a row of the table is called, and its rule
RULES: dict[str, dict[str, Any]] = {
    "low": {"precision": "low"},
    "low, result fp32": {"precision": "low", "result": "fp32"},
    "fp32": {"precision": "fp32"},
}


class Head(nn.Module):
    """Hidden states and labels to a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(768, 50257, bias=False)

    def forward(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """The loss of hidden states (batch, tokens, 768)."""
        return F.cross_entropy(self.lm_head(hidden).flatten(0, 1), labels.flatten())


def main() -> None:
    """Prints a row for each rule."""
    with torch.device("meta"):
        head, hidden = Head(), torch.empty(8, 1024, 768, requires_grad=True)
        labels = torch.empty(8, 1024, dtype=torch.int64)
    for name, rule in RULES.items():
        options = {"policy": {"rules": [{"module": "lm_head", **rule}]}}
        report = amp_fx.explain(head, hidden, labels, options=options, target="cuda:h100")
        forward, backward = report.plans
        logits = next(row.bytes for row in forward.nodes if row.op == "linear")
        kept = sum(given.bytes for given in backward.inputs if not given.parameter)
        moved = report.costs["amp_fx"].moved or 0
        print(f"{name:16} logits {logits / 1e9:.2f} GB, kept {kept / 1e9:.2f} GB, moved {moved / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
