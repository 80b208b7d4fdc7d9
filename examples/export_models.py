"""Models of transformers in their published sizes, with random weights, for ``python -m amp_fx export``.

cd examples && python -m amp_fx export export_models:gpt2 -o gpt2.pt2 --dynamic-batch
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

Example = tuple[nn.Module, tuple[Tensor]]


class Logits(nn.Module):
    """The one output that inference needs."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x).logits


def gpt2() -> Example:
    return Logits(GPT2LMHeadModel(GPT2Config(use_cache=False))), (_tokens(50257),)


def bert() -> Example:
    return Logits(BertForSequenceClassification(BertConfig())), (_tokens(30522),)


def resnet() -> Example:
    return Logits(ResNetForImageClassification(ResNetConfig())), (_images(),)


def vit() -> Example:
    return Logits(ViTForImageClassification(ViTConfig())), (_images(),)


def _tokens(vocabulary: int) -> Tensor:
    return torch.randint(vocabulary, (2, 128))


def _images() -> Tensor:
    return torch.randn(2, 3, 224, 224)
