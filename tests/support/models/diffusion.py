"""Models of diffusers as small as their structure allows, as settings, and their inputs; built in architectures.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from support.models.zoo import Batch, normal, tokens


def images(size: int, name: str = "pixel_values", channels: int = 3) -> Callable[[int], Batch]:
    return lambda seed: {name: normal(seed, 2, channels, size, size)}


def signal(*shape: int, name: str) -> Callable[[int], Batch]:
    return lambda seed: {name: normal(seed, *shape)}


def _noised(*shape: int, name: str = "sample", **more: tuple[int, ...]) -> Callable[[int], Batch]:
    """Noise, the step that it is at, and what the model is told besides."""

    def inputs(seed: int) -> Batch:
        told = {each: normal(seed + 1 + at, *size) for at, (each, size) in enumerate(more.items())}
        return {name: normal(seed, *shape), "timestep": torch.tensor([3, 500])[: shape[0]], **told}

    return inputs


_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2,
    "block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1, "latent_channels": 4,
}  # fmt: skip
_UNET = {
    "block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 16,
    "in_channels": 4, "out_channels": 4,
}  # fmt: skip
_CONDITIONED = {**_UNET, "cross_attention_dim": 32, "attention_head_dim": 8}
_HEADS = {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 1}
_LATENT = {"sample_size": 8, "patch_size": 2, "in_channels": 4}

#: name -> class, settings, inputs
OF_DIFFUSERS: dict[str, tuple[str, dict[str, Any], Callable[[int], Any]]] = {
    "vae": ("AutoencoderKL", _VAE, images(16, "sample")),
    "vae_vq": ("VQModel", {**_VAE, "num_vq_embeddings": 32}, images(16, "sample")),
    "vae_tiny": (
        "AutoencoderTiny",
        {
            "encoder_block_out_channels": (16, 16), "decoder_block_out_channels": (16, 16),
            "num_encoder_blocks": (1, 1), "num_decoder_blocks": (1, 1),
        },
        images(16, "sample"),
    ),
    "vae_audio": (
        "AutoencoderOobleck",
        {
            "encoder_hidden_size": 8, "downsampling_ratios": [2, 2], "channel_multiples": [1, 2],
            "decoder_channels": 8, "decoder_input_channels": 4, "audio_channels": 1,
        },
        signal(1, 1, 64, name="sample"),
    ),
    "vae_video": (
        "AutoencoderKLTemporalDecoder",
        {"down_block_types": ("DownEncoderBlock2D",) * 2, "block_out_channels": (32, 32), "latent_channels": 4},
        lambda seed: {"sample": normal(seed, 2, 3, 16, 16), "num_frames": 2},
    ),
    "unet": (
        "UNet2DModel",
        {
            **_UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
        _noised(2, 4, 16, 16),
    ),
    "unet_condition": (
        "UNet2DConditionModel",
        {
            **_CONDITIONED, "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        },
        _noised(2, 4, 16, 16, encoder_hidden_states=(2, 6, 32)),
    ),
    "unet_3d": (
        "UNet3DConditionModel",
        {
            **_CONDITIONED, "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
            "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
        },
        _noised(1, 4, 2, 8, 8, encoder_hidden_states=(1, 6, 32)),
    ),
    "dit": (
        "DiTTransformer2DModel", {**_HEADS, **_LATENT, "norm_num_groups": 4, "num_embeds_ada_norm": 1000},
        lambda seed: {**_noised(2, 4, 8, 8, name="hidden_states")(seed), "class_labels": tokens(seed, 2, vocab=9)},
    ),
    "pixart": (
        "PixArtTransformer2DModel",
        {**_HEADS, **_LATENT, "norm_num_groups": 4, "cross_attention_dim": 32, "caption_channels": 24},
        _noised(2, 4, 8, 8, name="hidden_states", encoder_hidden_states=(2, 6, 24)),
    ),
    "sd3": (
        "SD3Transformer2DModel",
        {
            **_HEADS, **_LATENT, "joint_attention_dim": 24, "caption_projection_dim": 32, "pooled_projection_dim": 16,
            "pos_embed_max_size": 8,
        },
        _noised(2, 4, 8, 8, name="hidden_states", encoder_hidden_states=(2, 6, 24), pooled_projections=(2, 16)),
    ),
    "flux": (
        "FluxTransformer2DModel",
        {
            **_HEADS, "num_single_layers": 1, "in_channels": 16, "joint_attention_dim": 24,
            "pooled_projection_dim": 16, "axes_dims_rope": (4, 6, 6), "guidance_embeds": False,
        },
        lambda seed: {
            **_noised(
                2, 16, 16, name="hidden_states", encoder_hidden_states=(2, 6, 24), pooled_projections=(2, 16)
            )(seed),
            "img_ids": torch.arange(48.0).view(16, 3) % 4, "txt_ids": torch.zeros(6, 3),
        },
    ),
}  # fmt: skip
