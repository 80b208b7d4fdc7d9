"""Modules, trainers and data for the tests of Lightning, which takes seconds to import."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

import amp_fx
from amp_fx.integrations.lightning import AmpFxFabricPrecision, AmpFxPrecision, MetricsCallback
from support.models.small import UpDown
from support.other_libraries import batches, moved, weights

__all__ = ["OPTIONS", "AmpFxFabricPrecision", "AmpFxPrecision", "Fabric", "LitNet", "MetricsCallback"]
__all__ += ["MixedPrecision", "Watch", "batches", "fp16", "trainer"]

OPTIONS = {"profile": "off"}


class LitNet(LightningModule):
    """Logs its loss, and calls a part of itself instead of itself, as most do."""

    def __init__(self, net: nn.Module | None = None, **optimizer: Any) -> None:
        super().__init__()
        self.net = net or UpDown()
        self._optimizer = {"lr": 0.1, **optimizer}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.net(batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), **self._optimizer)


class Watch(Callback):
    """Notes the weights after each batch."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights.append(weights(pl_module))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self.weights.append(weights(pl_module))

    @property
    def moved(self) -> list[bool]:
        return [moved(*pair) for pair in zip(self.weights, self.weights[1:], strict=False)]


def trainer(folder: Path, *callbacks: Callback, **more: Any) -> Trainer:
    without = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    given = {"accelerator": "cpu", "max_epochs": 1, "default_root_dir": folder, "callbacks": list(callbacks)}
    return Trainer(**{**dict.fromkeys(without, False), **given, **more})


def fp16(**more: Any) -> AmpFxPrecision:
    scaler = amp_fx.GradScaler("cpu", init_scale=128.0)
    return AmpFxPrecision("16-mixed", scaler=scaler, options=OPTIONS, **more)
