"""A small GPT-2 of Hugging Face with random weights, for the command line: ``amp-fx explain examples.gpt2:build``."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def build() -> tuple[GPT2LMHeadModel, tuple[()], dict[str, Any]]:
    """The model and one batch of 4 x 64 tokens, with labels: it returns its loss."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=2,
        n_embd=128,
        n_head=4,
        vocab_size=1000,
        n_positions=64,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config)
    # otherwise transformers warns that it guesses the loss, and the warning breaks the graph
    model.loss_type = "ForCausalLM"
    tokens = torch.randint(config.vocab_size, (4, 64))
    return model, (), {"input_ids": tokens, "labels": tokens}
