"""The option ``activation_memory`` in the loops of trainers: less is saved for the backward, and the model trains."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import amp_fx
from support.models.small import UpDown
from support.other_libraries import QUIET

ROWS, STEPS = 64, 3


class Net(UpDown):
    """As models of transformers: its result has the loss."""

    def forward(self, x: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return {"loss": super().forward(x).square().mean()}


def rows() -> list[dict[str, Tensor]]:
    drawn = torch.randn(STEPS * ROWS, 64, generator=torch.Generator().manual_seed(1))
    return [{"x": row} for row in drawn]


def by_transformers(model: nn.Module, folder: Path, options: dict[str, Any]) -> None:
    from transformers import Trainer, TrainingArguments

    from amp_fx.integrations.transformers import AmpFxCallback

    own = {**QUIET, "per_device_train_batch_size": ROWS, "optim": "sgd", "learning_rate": 0.5}
    args = TrainingArguments(str(folder), num_train_epochs=1, train_sampling_strategy="sequential", **own)
    Trainer(model, args, train_dataset=rows(), callbacks=[AmpFxCallback(options)]).train()  # pyright: ignore[reportArgumentType]


def by_accelerate(model: nn.Module, folder: Path, options: dict[str, Any]) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from amp_fx.integrations.accelerate import AmpFxPlugin

    # the second Accelerator of a process has the plugin of the first
    AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = Accelerator(cpu=True, dynamo_plugin=AmpFxPlugin(options=options))
    loader: Any = DataLoader(rows(), ROWS)  # pyright: ignore[reportArgumentType]
    model, optimizer, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5), loader)
    for batch in loader:
        accelerator.backward(model(**batch)["loss"])
        optimizer.step()
        optimizer.zero_grad()


def by_lightning(model: nn.Module, folder: Path, options: dict[str, Any]) -> None:
    lit = importlib.import_module("support.models.lightning_modules")

    class Lit(lit.LitNet):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return self.net(**batch)["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.5)

    trainer = lit.trainer(folder, plugins=[lit.AmpFxPrecision("bf16-mixed", options=options)])
    trainer.fit(Lit(model), DataLoader(rows(), ROWS))  # pyright: ignore[reportArgumentType]


@pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers")
@pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
@pytest.mark.parametrize("train", [by_transformers, by_accelerate, by_lightning])
def test_less_is_saved_and_the_weights_err_little_more(
    train: Callable[[nn.Module, Path, dict[str, Any]], None], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    start = Net(64, 128)
    exact = copy.deepcopy(start).double()
    optimizer = torch.optim.SGD(exact.parameters(), lr=0.5)
    for batch in DataLoader(rows(), ROWS):  # pyright: ignore[reportArgumentType]
        exact(batch["x"].double())["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    errors: list[list[float]] = []
    for options in ({"profile": "off"}, {"profile": "off", "activation_memory": "int8"}):
        torch._dynamo.reset()
        model = copy.deepcopy(start)
        with amp_fx.record() as recording:
            train(model, tmp_path, options)
        assert recording.plans
        assert not any(plan.fallback for plan in recording.plans)
        saved = [plan.saved for plan in recording.plans if plan.saved]
        assert bool(saved) is ("activation_memory" in options)
        assert all(each["after"] < 0.6 * each["before"] for each in saved)
        weights = zip(start.parameters(), exact.parameters(), model.parameters(), strict=True)
        errors.append([((q - r).norm() / (q - p).norm()).item() for p, q, r in weights])
    assert all(0 < other < 2.5 * own for own, other in zip(*errors, strict=True))
