"""Models of Hugging Face transformers at any size, with random weights and without dropout; nothing is downloaded.

Tests, benchmarks and examples build theirs here. transformers is imported on use: it takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn


def _config(config_class: Callable[..., Any], **settings: Any) -> Any:
    """Builds a config; its signature does not show the settings that it takes for its base class."""
    return config_class(**settings)


def padding_mask(batch: int, length: int) -> Tensor:
    """The last rows are shorter than the first, as in a padded batch."""
    lengths = torch.linspace(length, length // 2, batch).round().long()
    return (torch.arange(length) < lengths[:, None]).long()


def bert(
    *, layers: int, width: int, heads: int, hidden: int, vocab: int, length: int, attention: str = "sdpa"
) -> nn.Module:
    """Encoder that classifies sequences into 4 classes."""
    from transformers import BertConfig, BertForSequenceClassification

    config = _config(
        BertConfig,
        vocab_size=vocab,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=hidden,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=4,
        attn_implementation=attention,
    )
    return BertForSequenceClassification(config)


def gpt2(*, layers: int, width: int, heads: int, vocab: int, length: int) -> nn.Module:
    """Decoder whose linears are ``addmm`` (Conv1D) and whose head is tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = _config(
        GPT2Config,
        vocab_size=vocab,
        n_positions=length,
        n_embd=width,
        n_layer=layers,
        n_head=heads,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(config)
    # otherwise transformers logs a warning that it guesses the loss, and that breaks the graph before the loss
    model.loss_type = "ForCausalLM"
    return model


def llama(
    *,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocab: int,
    length: int,
    attention: str = "sdpa",
) -> nn.Module:
    """Decoder with RMS norms, rotary positions and grouped-query attention."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = _config(
        LlamaConfig,
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
        attn_implementation=attention,
    )
    return LlamaForCausalLM(config)


def mistral(
    *, layers: int, width: int, heads: int, kv_heads: int, hidden: int, vocab: int, length: int
) -> nn.Module:
    """Decoder as :func:`llama`'s whose attention sees a window of the tokens before, here all of them."""
    from transformers import MistralConfig, MistralForCausalLM

    config = _config(
        MistralConfig,
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=length,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    return MistralForCausalLM(config)


def opt(*, layers: int, width: int, heads: int, hidden: int, vocab: int, length: int) -> nn.Module:
    """Decoder with learned positions and ReLU."""
    from transformers import OPTConfig, OPTForCausalLM

    config = _config(
        OPTConfig,
        vocab_size=vocab,
        hidden_size=width,
        word_embed_proj_dim=width,
        ffn_dim=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=length,
        dropout=0.0,
        attention_dropout=0.0,
        use_cache=False,
        pad_token_id=1,
        bos_token_id=0,
        eos_token_id=0,
    )
    return OPTForCausalLM(config)


def t5(*, layers: int, width: int, heads: int, head_size: int, hidden: int, vocab: int) -> nn.Module:
    """Encoder, decoder with cross attention, relative position bias, norms that widen to fp32 themselves."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = _config(
        T5Config,
        vocab_size=vocab,
        d_model=width,
        d_kv=head_size,
        d_ff=hidden,
        num_layers=layers,
        num_decoder_layers=layers,
        num_heads=heads,
        dropout_rate=0.0,
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def resnet(*, width: int, hidden: Sequence[int], depths: Sequence[int]) -> nn.Module:
    """Residual convolutions with BatchNorm, 4 classes."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = _config(
        ResNetConfig,
        embedding_size=width,
        hidden_sizes=list(hidden),
        depths=list(depths),
        layer_type="basic",
        num_labels=4,
    )
    return ResNetForImageClassification(config)


def convnext(*, hidden: Sequence[int], depths: Sequence[int]) -> nn.Module:
    """Depthwise convolutions, each with two linears over the channels, 4 classes."""
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = _config(ConvNextConfig, hidden_sizes=list(hidden), depths=list(depths), num_labels=4)
    return ConvNextForImageClassification(config)


def vit(*, layers: int, width: int, heads: int, hidden: int, image: int, patch: int) -> nn.Module:
    """Patches by convolution, then an encoder, 4 classes."""
    from transformers import ViTConfig, ViTForImageClassification

    config = _config(
        ViTConfig,
        image_size=image,
        patch_size=patch,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=hidden,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=4,
    )
    return ViTForImageClassification(config)
