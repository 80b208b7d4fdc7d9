"""Accelerate, the real one: its Accelerator compiles with amp_fx, steps with our scaler, and knows what was skipped."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from torch import nn

import amp_fx
from amp_fx.integrations.accelerate import AmpFxPlugin, GradScaler
from support.models.small import UpDown
from support.other_libraries import batches, low, moved, weights

FP16 = {"dtype": "float16", "scaler": "default", "profile": "off"}


def fp16(**arguments: Any) -> Any:
    accelerator = Accelerator(cpu=True, dynamo_plugin=AmpFxPlugin(options=FP16), **arguments)
    accelerator.scaler = GradScaler("cpu", init_scale=128.0)
    return accelerator


def prepared(accelerator: Any, *bad: int) -> tuple[UpDown, tuple[Any, Any, Any]]:
    """A model, and what the accelerator makes of it, of an optimizer and of batches, some of them infinite."""
    own = UpDown()
    return own, accelerator.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1), batches(*bad))


def fit(accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> list[bool]:
    """The usual loop; which batches moved the weights."""
    taken = []
    for x in loader:
        before = weights(model)
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            optimizer.step()
            optimizer.zero_grad()
        taken.append(moved(before, weights(model)))
    return taken


# ---- the plugin ----


def test_the_plugin_compiles_with_amp_fx_for_which_accelerate_has_no_name() -> None:
    # when this fails, dynamo_backend="amp_fx" may work by itself
    with pytest.raises(ValueError, match="AMP_FX"):
        Accelerator(cpu=True, dynamo_backend="amp_fx")
    given = {"options": {"policy": "fast"}, "dynamic": True, "fullgraph": True}
    plugin = AmpFxPlugin(**given)
    assert isinstance(plugin, TorchDynamoPlugin)
    assert plugin.backend is DynamoBackend.INDUCTOR
    assert plugin.to_kwargs() == {"backend": "amp_fx", **given}


@pytest.mark.parametrize("by_environment", [False, True])
def test_a_mode_becomes_options(by_environment: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if by_environment:
        monkeypatch.setenv("ACCELERATE_DYNAMO_MODE", "max-autotune")
        monkeypatch.setenv("ACCELERATE_DYNAMO_USE_DYNAMIC", "True")
    mode: Any = {} if by_environment else {"mode": "max-autotune"}
    plugin = AmpFxPlugin(options={"policy": "fast"}, **mode)
    kwargs = plugin.to_kwargs()
    assert kwargs.pop("dynamic", None) is (True if by_environment else None)
    assert kwargs.keys() == {"backend", "options"}
    assert {"policy": "fast", "max_autotune": True}.items() <= kwargs["options"].items()
    torch.compile(UpDown(), **kwargs)


def test_the_plugin_is_plain_data_and_bad_options_are_errors_before_anything_is_compiled() -> None:
    plugin = AmpFxPlugin(options=FP16, dynamic=True)
    for twin in (copy.deepcopy(plugin), pickle.loads(pickle.dumps(plugin))):
        assert twin.to_kwargs() == plugin.to_kwargs()
    with pytest.raises(amp_fx.OptionsError, match=r"'polcy'.*'policy'"):
        AmpFxPlugin(options={"polcy": "fast"})


def test_regional_compilation_compiles_the_repeated_blocks() -> None:
    plugin = AmpFxPlugin(use_regional_compilation=True, options={"profile": "off"})
    accelerator = Accelerator(cpu=True, dynamo_plugin=plugin)
    model: Any = accelerator.prepare(nn.Sequential(nn.Linear(8, 8), nn.ModuleList([UpDown(), UpDown()])))
    blocks = model[1]
    assert all(isinstance(block, torch._dynamo.OptimizedModule) for block in blocks)
    with amp_fx.record() as recording:
        blocks[0](torch.randn(4, 8)).square().mean().backward()
        blocks[1](torch.randn(4, 8)).square().mean().backward()
    assert len(recording.plans) == 1


# ---- training ----


def test_bf16_training_needs_the_plugin_alone() -> None:
    accelerator = Accelerator(cpu=True, dynamo_plugin=AmpFxPlugin(options={"profile": "off"}))
    own, trained = prepared(accelerator)
    with amp_fx.record() as recording:
        assert all(fit(accelerator, *trained))
    assert low(recording) == {torch.bfloat16}
    assert all(p.dtype is torch.float32 for p in own.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_a_bad_step_is_skipped_and_accelerate_knows(fused: bool) -> None:
    accelerator = fp16()
    own = UpDown()
    optimizer = torch.optim.AdamW(own.parameters(), lr=0.1, fused=fused)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    model, optimizer, loader, scheduler = accelerator.prepare(own, optimizer, batches(1), scheduler)
    skipped, rates = [], []
    for x in loader:
        before = weights(own)
        accelerator.backward(model(x).square().mean())
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        skipped.append(accelerator.optimizer_step_was_skipped)
        assert skipped[-1] != moved(before, weights(own))
        rates.append(scheduler.get_last_lr()[0])
        optimizer.zero_grad()
    assert skipped == [False, True, False, False]
    assert rates == [0.05, 0.05, 0.025, 0.0125]
    assert accelerator.scaler.get_scale() == 64.0
    assert accelerator.scaler.skipped_steps == 1


def test_gradients_are_true_to_scale_and_clipped_as_in_fp32() -> None:
    accelerator = fp16()
    own = UpDown()
    plain = copy.deepcopy(own)
    model: Any = accelerator.prepare(own)
    x = torch.randn(4, 8)
    assert accelerator.unwrap_model(model, keep_torch_compile=False) is own
    accelerator.backward(model(x).square().mean())
    norm = accelerator.clip_grad_norm_(model.parameters(), 0.01)
    plain(x).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01)
    torch.testing.assert_close(norm, expected, rtol=1e-2, atol=0)
    for p, q in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=2e-2, atol=1e-5)


def test_one_bad_micro_batch_spoils_the_step_that_it_is_part_of() -> None:
    accelerator = fp16(gradient_accumulation_steps=2)
    assert fit(accelerator, *prepared(accelerator, 0)[1]) == [False, False, False, True]
    assert accelerator.scaler.get_scale() == 64.0


def test_state_is_saved_and_loaded(tmp_path: Path) -> None:
    accelerator = fp16()
    own, trained = prepared(accelerator, 0, 1)
    fit(accelerator, *trained)
    saved, state = weights(own), accelerator.scaler.state_dict()
    assert state["scale"] == 32.0
    accelerator.save_state(str(tmp_path))

    again = fp16()
    other, (model, optimizer, _) = prepared(again)
    again.load_state(str(tmp_path))
    assert not moved(saved, weights(other))
    again.backward(model(torch.randn(4, 8)).square().mean())
    assert again.scaler.state_dict() == state
    optimizer.step()
    assert not again.optimizer_step_was_skipped
