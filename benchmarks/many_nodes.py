"""Models of transformers whose graphs have many small nodes, for the time that capture and passes take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["MODELS"]


def _image(size: int) -> dict[str, Any]:
    return {"pixel_values": torch.randn(1, 3, size, size)}


def _tokens(length: int) -> dict[str, Any]:
    return {"input_ids": torch.randint(100, (1, length))}


def levit() -> tuple[nn.Module, dict[str, Any]]:
    """Stages of attention behind convolutions, in the size of its paper."""
    from transformers import LevitConfig, LevitModel

    return LevitModel(LevitConfig()), _image(224)


def rwkv() -> tuple[nn.Module, dict[str, Any]]:
    """A recurrence that is written out: one step for each token."""
    from transformers import RwkvConfig, RwkvModel

    config = RwkvConfig(
        vocab_size=100, hidden_size=64, attention_hidden_size=64, num_hidden_layers=4, context_length=16
    )
    return RwkvModel(config), _tokens(16)


def segformer() -> tuple[nn.Module, dict[str, Any]]:
    """Its smallest size."""
    from transformers import SegformerConfig, SegformerModel

    return SegformerModel(SegformerConfig()), _image(128)


def sam() -> tuple[nn.Module, dict[str, Any]]:
    """Twelve layers with windows and relative positions."""
    from transformers import SamVisionConfig, SamVisionModel

    config = SamVisionConfig(
        hidden_size=64, mlp_dim=128, num_attention_heads=4, output_channels=16, image_size=128, window_size=4
    )
    return SamVisionModel(config), _image(128)


def t5gemma() -> tuple[nn.Module, dict[str, Any]]:
    """Six layers of encoder and six of decoder."""
    from transformers import T5GemmaConfig, T5GemmaModel

    part = {
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    model = T5GemmaModel(T5GemmaConfig(encoder=part, decoder=part))
    return model, {**_tokens(8), "decoder_input_ids": torch.randint(100, (1, 8))}


#: name -> model with random weights, and its keyword arguments
MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    build.__name__: build for build in (levit, rwkv, segformer, sam, t5gemma)
}
