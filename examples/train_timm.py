"""timm's training step with amp_fx: its NativeScaler keeps its loop, and steps with amp_fx.GradScaler.

    pip install amp_fx timm
    python examples/train_timm.py

In timm's own train.py the two lines go after ``loss_scaler = NativeScaler(device=...)``, with ``--amp`` left out and
``--torchcompile amp_fx`` given; the options of the backend need the call of torch.compile that is below.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import amp_fx


def train(batches: Iterable[tuple[Tensor, Tensor]], device: str = "cpu", **options: Any) -> amp_fx.GradScaler:
    """Trains a small vision transformer in float16.

    Args:
        batches: images, fp32, (batch, 3, 160, 160), and classes, int64, below 4.
        device: device type.
        options: more of the backend's.

    Returns:
        The scaler, which knows what was skipped.
    """
    import timm  # pyright: ignore[reportMissingImports]
    from timm.utils import NativeScaler  # pyright: ignore[reportMissingImports]

    model = timm.create_model("test_vit", num_classes=4).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    scaler = amp_fx.GradScaler(device)
    loss_scaler = NativeScaler(device=device)
    loss_scaler._scaler = scaler
    options = {"dtype": "float16", "scaler": scaler.name, **options}
    compiled = torch.compile(model, backend="amp_fx", options=options)

    for step, (images, labels) in enumerate(batches):
        loss = F.cross_entropy(compiled(images), labels)
        loss_scaler(loss, optimizer, clip_grad=1.0, parameters=model.parameters())
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item():.3f}, scale {scaler.get_scale():g}")
    return scaler


def main() -> int:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    images, labels = torch.randn(8, 3, 160, 160, device=device), torch.randint(4, (8,), device=device)
    train([(images, labels)] * 5, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
