"""The training loop of diffusers' examples with amp_fx: noise is added, the UNet is compiled in place and predicts it.

    pip install "amp_fx[accelerate]" diffusers
    python examples/train_diffusers.py

``mixed_precision`` of the Accelerator stays "no".
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def tiny_unet() -> nn.Module:
    """A UNet for 16 x 16 pixels and 3 channels."""
    from diffusers.models.unets.unet_2d import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        layers_per_block=1,
        block_out_channels=(8, 8),
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
        norm_num_groups=4,
        add_attention=False,
    )


def train(model: nn.Module, batches: Iterable[Tensor], **accelerator_arguments: Any) -> list[float]:
    """Trains a UNet in bfloat16.

    Args:
        model: a ``UNet2DModel``.
        batches: images, fp32, (batch, 3, 16, 16).
        accelerator_arguments: of ``accelerate.Accelerator``.

    Returns:
        The loss of each step.
    """
    from accelerate import Accelerator
    from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

    accelerator = Accelerator(**accelerator_arguments)
    noise_scheduler = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    model.compile(backend="amp_fx", options={"dtype": "bfloat16"})
    net, optimizer = accelerator.prepare(model, optimizer)

    losses = []
    for images in batches:
        noise = torch.randn_like(images)
        timesteps = torch.randint(100, (len(images),), device=images.device)
        noisy = noise_scheduler.add_noise(images, noise, timesteps)  # pyright: ignore[reportArgumentType]
        loss = F.mse_loss(net(noisy, timesteps, return_dict=False)[0], noise)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {len(losses)}: loss {losses[-1]:.3f}")
    return losses


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    train(tiny_unet(), [torch.randn(4, 3, 16, 16, device=device)] * 5)
    return 0


if __name__ == "__main__":
    sys.exit(main())
