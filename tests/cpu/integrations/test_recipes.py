"""The recipes of ``examples/`` with the real libraries: timm, diffusers, torchtitan.

timm brings torchvision, which must fit the build of torch, and torchtitan wants other versions of what TRL wants: both
are tested where they are installed.
"""

from __future__ import annotations

import pytest
import torch

import amp_fx
import train_diffusers
import train_timm
import train_torchtitan
from integrations import low, weights


@pytest.mark.slow
def test_the_loop_of_diffusers_trains_a_unet() -> None:
    model = train_diffusers.tiny_unet()
    before = weights(model)
    with amp_fx.record() as recording:
        losses = train_diffusers.train(model, [torch.randn(2, 3, 16, 16)] * 3, cpu=True)
    assert torch.bfloat16 in low(recording)
    assert losses[-1] < losses[0]
    assert not any(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True) if p.dim() > 1)


@pytest.mark.slow
def test_timms_native_scaler_skips_a_bad_step() -> None:
    pytest.importorskip("timm")
    labels = torch.tensor([0, 1])
    good = torch.randn(2, 3, 160, 160), labels
    bad = good[0] * float("inf"), labels
    with amp_fx.record() as recording:
        # "auto" leaves matmuls in fp32 on a CPU, where fp16 is slow
        scaler = train_timm.train([good, bad, good], profile="off")
    assert torch.float16 in low(recording)
    # the first scale, 2**16, may be too large for a good batch
    assert scaler.skipped_steps in (1, 2)
    assert scaler.get_scale() == 2.0 ** (16 - scaler.skipped_steps)


@pytest.mark.slow
def test_torchtitan_compiles_the_blocks() -> None:
    pytest.importorskip("torchtitan")
    with amp_fx.record() as recording:
        losses = train_torchtitan.train()
    assert torch.bfloat16 in low(recording)
    assert losses[-1] < losses[0]
