"""A small GPT-2 of Hugging Face with random weights, for the command line: ``amp-fx explain examples.gpt2:build``."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from examples import hugging_face


def build() -> tuple[nn.Module, tuple[()], dict[str, Any]]:
    """The model and one batch of 4 x 64 tokens, with labels: it returns its loss."""
    torch.manual_seed(0)
    model = hugging_face.gpt2(layers=2, width=128, heads=4, vocab=1000, length=64)
    tokens = torch.randint(1000, (4, 64))
    return model, (), {"input_ids": tokens, "labels": tokens}
