"""The Trainer of transformers, the real one: training, evaluation, checkpoints; and generation by compiled models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import amp_fx
from amp_fx.integrations.metrics import ScalerMetrics
from amp_fx.integrations.transformers import AmpFxCallback, AmpFxTrainerMixin, MetricsCallback
from examples import hugging_face
from support.checks.held_memory import Held
from support.models.small import UpDown
from support.other_libraries import INF, QUIET, low, moved, weights

OPTIONS = {"profile": "off"}


class Net(UpDown):
    """As models of transformers: its batch is a dict, its result has the loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits = super().forward(x)
        return {"loss": F.mse_loss(logits, labels), "logits": logits}


def data(*bad: int, count: int = 8) -> Any:
    """Rows; batches have two, in this order."""
    rows = [{"x": torch.randn(8), "labels": torch.randn(8)} for _ in range(count)]
    for row in bad:
        rows[row]["x"] *= INF
    return rows


def arguments(folder: Path, **more: Any) -> TrainingArguments:
    own = {**QUIET, "per_device_eval_batch_size": 2, "num_train_epochs": 1}
    return TrainingArguments(str(folder), **{**own, "train_sampling_strategy": "sequential", **more})


def trainer(folder: Path, *callbacks: TrainerCallback, rows: Any = None, **more: Any) -> Trainer:
    args = arguments(folder, **more)
    return Trainer(Net(), args, train_dataset=rows or data(), callbacks=list(callbacks))


def fp16(**settings: Any) -> AmpFxCallback:
    scaler = amp_fx.GradScaler("cpu", **{"init_scale": 128.0, **settings})
    return AmpFxCallback(OPTIONS, dtype="float16", scaler=scaler)


class Watch(TrainerCallback):
    """Notes the weights and the learning rate after each step."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []
        self.rates: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.weights.append(weights(kwargs["model"]))
        self.rates.append(kwargs["lr_scheduler"].get_last_lr()[0])

    on_train_begin = on_step_end

    @property
    def moved(self) -> list[bool]:
        return [moved(*pair) for pair in zip(self.weights, self.weights[1:], strict=False)]


# ---- training ----


def test_bf16_training_evaluation_and_prediction_are_compiled(tmp_path: Path) -> None:
    own = trainer(tmp_path, AmpFxCallback(OPTIONS, dtype="bfloat16"))
    with amp_fx.record() as evaluation:
        metrics = own.evaluate(data())
    assert low(evaluation) == {torch.bfloat16}
    assert metrics["eval_loss"] > 0
    with amp_fx.record() as training:
        own.train()
    assert low(training) == {torch.bfloat16}
    predictions: Any = own.predict(data()).predictions
    assert predictions.shape == (8, 8)


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused"])
def test_a_bad_step_is_skipped_and_the_learning_rate_waits(tmp_path: Path, optim: str) -> None:
    callback, watch, rows = fp16(), Watch(), []
    assert callback.scaler is not None
    metrics = MetricsCallback(ScalerMetrics(callback.scaler, rows.append))
    settings: dict[str, Any] = {"optim": optim, "lr_scheduler_type": "linear"}
    trainer(tmp_path, callback, watch, metrics, rows=data(2), **settings).train()
    assert watch.moved == [True, False, True, True]
    assert watch.rates == pytest.approx([0.1, 0.075, 0.075, 0.05, 0.025])
    assert [row["amp_fx/loss_scale"] for row in rows] == [128.0, 64.0, 64.0, 64.0]
    assert [row["amp_fx/skipped_steps"] for row in rows] == [0, 1, 1, 1]
    assert [row.get("amp_fx/first_nonfinite") for row in rows] == [None, "down.bias", None, None]


def test_accumulated_micro_batches_are_judged_together(tmp_path: Path) -> None:
    callback, watch = fp16(), Watch()
    trainer(tmp_path, callback, watch, rows=data(0), gradient_accumulation_steps=2, optim="sgd").train()
    assert watch.moved == [False, True]
    assert callback.scaler_state["scale"] == 64.0


# ---- checkpoints ----


def test_a_checkpoint_has_clean_keys_and_the_scale_and_is_resumed(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "optim": "sgd"}
    trainer(tmp_path, fp16(), rows=data(2), **settings).train()
    checkpoint = tmp_path / "checkpoint-2"
    assert load_file(checkpoint / "model.safetensors").keys() == Net().state_dict().keys()

    resumed = fp16(init_scale=2.0**16, name="again")
    trainer(tmp_path, resumed, **settings).train(resume_from_checkpoint=str(checkpoint))
    assert resumed.scaler_state["scale"] == 64.0


def test_a_callback_that_the_trainer_restores_finds_its_scaler(tmp_path: Path) -> None:
    scaler = amp_fx.GradScaler("cpu", init_scale=128.0)
    callback = AmpFxCallback(OPTIONS, dtype=torch.float16, scaler=scaler)
    saved = callback.state()
    scaler.load_state_dict({**scaler.state_dict(), "scale": 2.0})
    twin = AmpFxCallback.from_state(saved)
    assert twin.scaler is scaler
    assert twin.options == {**OPTIONS, "dtype": "torch.float16", "scaler": "default"}
    assert scaler.state_dict()["scale"] == 128.0


# ---- errors ----


def test_contradictions_and_two_scalers_are_errors(tmp_path: Path) -> None:
    with pytest.raises(amp_fx.OptionsError, match=r"'float16'.*'bfloat16'"):
        AmpFxCallback({"dtype": "bfloat16"}, dtype="float16")
    with pytest.raises(amp_fx.ScalerError, match="nobody"):
        AmpFxCallback(dtype="float16", scaler="nobody")
    own = trainer(tmp_path, fp16())
    own.accelerator.scaler = torch.amp.GradScaler("cpu")
    with pytest.raises(amp_fx.ScalerError, match="fp16=False"):
        own.train()


# ---- a Trainer of one's own ----


def test_a_trainer_of_ones_own_compiles_through_accelerate(tmp_path: Path) -> None:
    class Own(AmpFxTrainerMixin, Trainer):
        amp_fx_options: ClassVar[Any] = {"dtype": "bfloat16", **OPTIONS}

    model = Net()
    own = Own(model, arguments(tmp_path), train_dataset=data())
    with amp_fx.record() as recording:
        own.train()
    assert low(recording) == {torch.bfloat16}
    own.save_model(str(tmp_path / "saved"))
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == model.state_dict().keys()


# ---- generate ----


def llama(layers: int = 1) -> Any:
    # in sizes that oneDNN does not pad
    sizes: Any = {"width": 64, "heads": 4, "kv_heads": 2, "hidden": 256, "vocab": 128, "length": 64}
    return hugging_face.llama(layers=layers, **sizes).eval()


def compiled(layers: int = 1) -> Any:
    model = llama(layers)
    model.forward = torch.compile(model.forward, backend="amp_fx", options={**OPTIONS, "dtype": "bfloat16"})
    return model


def low_bytes(models: Sequence[nn.Module]) -> int:
    layers = [each for model in models for each in model.modules() if isinstance(each, nn.Linear)]
    return sum(2 * layer.weight.numel() for layer in layers)


def prompt(length: int) -> torch.Tensor:
    return torch.randint(1, 32, (1, length), generator=torch.Generator().manual_seed(length))


def greedy(new: int, **settings: Any) -> dict[str, Any]:
    return {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0, **settings}


@pytest.mark.slow
def test_generation_is_low_and_the_second_call_compiles_nothing() -> None:
    model, settings = llama(), greedy(6, use_cache=True)
    eager = model.generate(prompt(4), **settings)
    model.compile(backend="amp_fx", options={**OPTIONS, "dtype": "bfloat16"})
    with amp_fx.record() as recording:
        first = model.generate(prompt(4), **settings)
        plans = len(recording.plans)
        again = model.generate(prompt(4), **settings)
    assert first.shape == eager.shape == (1, 10)
    assert torch.equal(first, again)
    assert torch.bfloat16 in {node.dtype for plan in recording.plans for node in plan.nodes}
    # prefill, the first decode step, and one for all lengths
    assert plans <= 3
    assert len(recording.plans) == plans


@pytest.mark.slow
def test_with_a_static_cache_prefill_and_decoding_of_any_length_share_low_weights() -> None:
    held, model = Held(), compiled()
    with torch.inference_mode(), amp_fx.record() as recording:
        for length in (7, 9, 12):
            found = model.generate(prompt(length), **greedy(6, cache_implementation="static", use_cache=True))
            assert found.shape == (1, length + 6)
    # as stock Inductor: prefill and decoding for one length, and both for any
    assert len(recording.plans) <= 4
    assert low_bytes([model]) <= held.bytes() <= 1.1 * low_bytes([model])


@pytest.mark.slow
def test_speculative_decoding_has_low_weights_of_both_models_once() -> None:
    held, model, assistant = Held(), compiled(2), compiled(1)
    settings = greedy(8, assistant_model=assistant, use_cache=True)
    with torch.inference_mode(), amp_fx.record() as recording:
        found = model.generate(prompt(6), **settings)
        plans = len(recording.plans)
        assert torch.equal(model.generate(prompt(6), **settings), found)
    assert found.shape == (1, 14)
    assert len(recording.plans) == plans
    once = low_bytes([model, assistant])
    assert once <= held.bytes() <= 1.1 * once
