"""Architectures that people train, as small as their structure allows: random weights, no dropout, nothing downloaded.

Those of transformers and diffusers are built from their own classes, one layer of each kind; what timm has, and dense
networks, are hand-written (``dense_outputs.py``).
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from amp_fx.instruments.step import plain
from support.models import dense_outputs
from support.models.diffusion import OF_DIFFUSERS, images, signal
from support.models.zoo import CASES, Batch, Case, normal, tokens

ARCHITECTURES: dict[str, Callable[[], Case]] = {}

#: settings by the names that most configurations of transformers have
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make(name: str) -> Case:
    """Builds one; the same weights each time."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # of weight_norm, with which diffusers builds
        warnings.simplefilter("ignore", FutureWarning)
        torch.manual_seed(0)
        return ARCHITECTURES[name]()


def _loss(outputs: Any, batch: Batch) -> Tensor:
    """The model's own where there are labels, else the squared distance of its first result from random numbers."""
    if "labels" in batch:
        return outputs.loss
    tensors = [leaf for leaf in tree_leaves(plain(outputs)) if isinstance(leaf, Tensor)]
    found = next(each for each in tensors if each.is_floating_point() and each.dim())
    target = torch.randn(found.shape, generator=torch.Generator().manual_seed(7))
    return F.mse_loss(found, target.to(found.dtype))


def _without_dropout(config: Any) -> Any:
    for name, value in vars(config).items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def _register(name: str, model: Callable[[], nn.Module], inputs: Callable[[int], Batch], **more: Any) -> None:
    def build() -> Case:
        # weight_norm keeps a product of its parameters, which cannot be copied where it has a gradient
        with torch.no_grad():
            built = model().train()
        for module in built.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            # of the labels of a diffusion model; a field of others, which do not draw
            if hasattr(module, "dropout_prob"):
                vars(module)["dropout_prob"] = 0.0
        # in front of a weight of zeros, nothing would get a gradient
        for parameter in built.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        return Case(built, inputs, _loss, **more)

    ARCHITECTURES[name] = build


# --- transformers ---


def of_transformers(kind: str, head: str, settings: Mapping[str, Any], name: str = "") -> nn.Module:
    """A model by the name of its configuration, which is its own unless ``name`` is."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(**settings)
    model = getattr(transformers, f"{name or kind}{head}")(_without_dropout(config))
    # else it warns that it guesses its loss
    if head == "ForCausalLM":
        model.loss_type = "ForCausalLM"
    return model


def _text(seed: int) -> Batch:
    given = tokens(seed, 4, 16, vocab=125) + 3
    return {"input_ids": given, "labels": given}


def _pairs(seed: int) -> Batch:
    return {"input_ids": tokens(seed, 4, 16, vocab=125) + 3, "labels": tokens(seed + 1, 4, 12, vocab=125) + 3}


def _plain_text(seed: int) -> Batch:
    return {"input_ids": tokens(seed, 4, 16, vocab=125) + 3}


GROUPED = {"num_key_value_heads": 1, "head_dim": 32}

#: decoders of text
_DECODERS: dict[str, dict[str, Any]] = {
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "StableLm": {"num_key_value_heads": 1},
    "Phi": {},
    "Mistral": {**GROUPED, "sliding_window": 8},
    "Qwen3": GROUPED,
    "Gemma2": {**GROUPED, "sliding_window": 8, "num_hidden_layers": 2},
    "Olmo2": GROUPED,
    "Cohere": {"num_key_value_heads": 1},
    "DiffLlama": {"num_key_value_heads": 2},
    "Mixtral": {**GROUPED, "num_local_experts": 4, "experts_implementation": "batched_mm"},
    "DeepseekV3": {
        "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16, "v_head_dim": 32, "first_k_dense_replace": 1,
    },
}  # fmt: skip
for _kind, _more in _DECODERS.items():
    _register(
        _kind.lower(),
        functools.partial(of_transformers, _kind, "ForCausalLM", {**SIZES, "use_cache": False, **_more}),
        _text,
    )

#: encoders of text
_ENCODERS: dict[str, dict[str, Any]] = {
    "Roberta": {},
    "Albert": {"embedding_size": 32},
    "DistilBert": {"dim": 64, "n_layers": 1, "n_heads": 2, "hidden_dim": 128},
    "DebertaV2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
    "ModernBert": {
        "num_hidden_layers": 2,
        "global_attn_every_n_layers": 2,
        "local_attention": 8,
        "cls_token_id": 1,
        "sep_token_id": 2,
    },
    "MPNet": {},
}
for _kind, _more in _ENCODERS.items():
    _register(
        _kind.lower(), functools.partial(of_transformers, _kind, "ForMaskedLM", {**SIZES, **_more}), _text
    )

_SEQ2SEQ = {
    "d_model": 64, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "use_cache": False,
    "decoder_start_token_id": 2, "forced_eos_token_id": None,
}  # fmt: skip
_T5 = {
    "d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 2,
    "feed_forward_proj": "gated-gelu", "use_cache": False, "decoder_start_token_id": 0,
}  # fmt: skip
_WHISPER = {
    "num_mel_bins": 16,
    "max_source_positions": 16,
    "max_target_positions": 32,
    "suppress_tokens": None,
}
_PATCHES = {"image_size": 32, "patch_size": 8}
_STAGES = {"depths": [1, 1], "hidden_sizes": [16, 32]}
_SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [4, 1], "hidden_sizes": [16, 32], "patch_sizes": [7, 3],
    "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 32,
}  # fmt: skip
_DPT = {
    **SIZES, **_PATCHES, "num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3], "head_in_index": -1,
    "neck_hidden_sizes": [16, 16, 16, 16], "fusion_hidden_size": 16, "reassemble_factors": [4, 2, 1, 0.5],
}  # fmt: skip
_WAV2VEC2 = {
    **SIZES, "conv_dim": [32, 32], "conv_kernel": [10, 3], "conv_stride": [5, 2], "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
    "mask_time_prob": 0.0, "layerdrop": 0.0,
}  # fmt: skip
_SPEECH = {
    "model_in_dim": 16, "upsample_initial_channel": 32, "upsample_rates": [2, 2], "upsample_kernel_sizes": [4, 4],
    "resblock_kernel_sizes": [3], "resblock_dilation_sizes": [[1, 3]],
}  # fmt: skip
_DAC = {
    "encoder_hidden_size": 16, "downsampling_ratios": [2, 2], "decoder_hidden_size": 32, "upsampling_ratios": [2, 2],
    "n_codebooks": 2, "codebook_size": 32, "codebook_dim": 4,
}  # fmt: skip
_SERIES = {
    "num_input_channels": 2, "context_length": 32, "patch_length": 8, "patch_stride": 8, "prediction_length": 8,
    "d_model": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "ffn_dim": 64, "num_layers": 1,
}  # fmt: skip
_CLIP = {"text_config": SIZES, "vision_config": {**SIZES, **_PATCHES}, "projection_dim": 32}

#: name -> configuration class, head, settings, inputs
_OTHERS: dict[str, tuple[str, str, dict[str, Any], Callable[[int], Batch]]] = {
    "bart": ("Bart", "ForConditionalGeneration", {**SIZES, **_SEQ2SEQ}, _pairs),
    "flan_t5": ("T5", "ForConditionalGeneration", {**SIZES, **_T5}, _pairs),
    "whisper": (
        "Whisper", "ForConditionalGeneration", {**SIZES, **_SEQ2SEQ, **_WHISPER},
        lambda seed: {
            "input_features": normal(seed, 2, 16, 32), "decoder_input_ids": tokens(seed, 2, 12, vocab=125) + 3,
        },
    ),
    "wav2vec2": ("Wav2Vec2", "Model", _WAV2VEC2, signal(2, 400, name="input_values")),
    "spectrogram": (
        "AST", "ForAudioClassification",
        {**SIZES, "patch_size": 8, "num_mel_bins": 16, "max_length": 32, "frequency_stride": 8, "time_stride": 8},
        signal(2, 32, 16, name="input_values"),
    ),
    "hifigan": ("SpeechT5HifiGan", "", _SPEECH, signal(2, 16, 16, name="spectrogram")),
    "dac": ("Dac", "Model", _DAC, signal(1, 1, 64, name="input_values")),
    "beit": ("Beit", "ForImageClassification", {**SIZES, **_PATCHES, "use_relative_position_bias": True}, images(32)),
    "dinov2": ("Dinov2", "ForImageClassification", {**SIZES, **_PATCHES}, images(32)),
    "swin": (
        "Swin", "ForImageClassification",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [1, 2], "window_size": 4},
        images(32),
    ),
    "convnext": ("ConvNextV2", "ForImageClassification", {**_STAGES, "num_stages": 2}, images(32)),
    "regnet": (
        "RegNet", "ForImageClassification",
        {**_STAGES, "embedding_size": 16, "groups_width": 8, "layer_type": "y"}, images(32),
    ),
    "mobilenet_v2": ("MobileNetV2", "ForImageClassification", {"depth_multiplier": 0.25, "image_size": 32}, images(32)),
    "efficientnet": (
        "EfficientNet", "ForImageClassification",
        {
            "width_coefficient": 0.25, "in_channels": [32, 16], "out_channels": [16, 24], "kernel_sizes": [3, 3],
            "strides": [1, 2], "num_block_repeats": [1, 1], "expand_ratios": [1, 6], "hidden_dim": 320,
            "depthwise_padding": [], "image_size": 32,
        },
        images(32),
    ),
    "poolformer": (
        "PoolFormer", "ForImageClassification",
        {
            **_STAGES, "num_encoder_blocks": 2, "patch_sizes": [7, 3], "strides": [4, 2], "padding": [2, 1],
            "mlp_ratio": 2.0,
        },
        images(32),
    ),
    "segformer": ("Segformer", "ForSemanticSegmentation", _SEGFORMER, images(32)),
    "glpn": ("GLPN", "ForDepthEstimation", _SEGFORMER, images(32)),
    "dpt": ("DPT", "ForDepthEstimation", _DPT, images(32)),
    "swin2sr": (
        "Swin2SR", "ForImageSuperResolution",
        {"image_size": 16, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4, "upscale": 2},
        images(16),
    ),
    "clip": (
        "CLIP", "Model", _CLIP,
        lambda seed: {"input_ids": tokens(seed, 3, 16, vocab=125) + 3, "pixel_values": normal(seed, 3, 3, 32, 32)},
    ),
    "patchtst": ("PatchTST", "ForPrediction", _SERIES, signal(2, 32, 2, name="past_values")),
    "patchtsmixer": ("PatchTSMixer", "ForPrediction", _SERIES, signal(2, 32, 2, name="past_values")),
}  # fmt: skip
for _name, (_kind, _head, _settings, _inputs) in _OTHERS.items():
    _register(_name, functools.partial(of_transformers, _kind, _head, _settings), _inputs)


# --- diffusers ---


def _of_diffusers(kind: str, settings: Mapping[str, Any]) -> nn.Module:
    import diffusers

    return getattr(diffusers, kind)(**settings)


class _Coded(nn.Module):
    """As a tiny autoencoder is trained: without the bytes between its halves, which have no gradient."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, sample: Tensor) -> Tensor:
        return self.net.decode(self.net.encode(sample).latents).sample


for _name, (_kind, _settings, _inputs) in OF_DIFFUSERS.items():
    _register(_name, functools.partial(_of_diffusers, _kind, _settings), _inputs)
_register(
    "vae_tiny", lambda: _Coded(_of_diffusers(*OF_DIFFUSERS["vae_tiny"][:2])), OF_DIFFUSERS["vae_tiny"][2]
)


# --- hand-written ---


for _block in ("dense", "squeeze_excite", "shuffle", "inception", "conv_mixer", "channel_attention", "mixer"):
    _register(f"timm_{_block}", functools.partial(dense_outputs.classifier, _block), images(32, "x"))

_DENSE = "decoder decoder_bilinear u_net segmentation depth super_resolution pyramid volume waveform"
ARCHITECTURES |= {name: CASES[name] for name in _DENSE.split()}
