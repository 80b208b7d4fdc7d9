"""Lightning and Fabric, the real ones: our precision plugins train, skip, clip, save and log."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx.integrations.metrics import ScalerMetrics
from support.models.small import UpDown
from support.other_libraries import low, moved, weights

pytestmark = [
    # Lightning's advice
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


@pytest.fixture
def lit() -> Any:
    """What the tests share, imported when they run."""
    return importlib.import_module("support.models.lightning_modules")


# ---- the Trainer ----


def test_bf16_training_and_validation_need_the_plugin_alone(lit: Any, tmp_path: Path) -> None:
    model = lit.LitNet()
    own = lit.trainer(tmp_path, plugins=[lit.AmpFxPrecision("bf16-mixed", options=lit.OPTIONS)])
    with amp_fx.record() as recording:
        own.fit(model, lit.batches(), lit.batches())
    assert low(recording) == {torch.bfloat16}
    assert {"loss", "val_loss"} <= own.callback_metrics.keys()
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert model.state_dict().keys() == lit.LitNet().state_dict().keys()


@pytest.mark.parametrize("fused", [False, True])
def test_a_bad_step_is_skipped_and_gradients_are_clipped(lit: Any, tmp_path: Path, fused: bool) -> None:
    plugin, watch, rows = lit.fp16(), lit.Watch(), []
    metrics = lit.MetricsCallback(ScalerMetrics(plugin.scaler, rows.append))
    own = lit.trainer(tmp_path, watch, metrics, plugins=[plugin], gradient_clip_val=0.1)
    with amp_fx.record() as recording:
        own.fit(lit.LitNet(fused=fused), lit.batches(1))
    assert low(recording) == {torch.float16}
    assert watch.moved == [True, False, True, True]
    assert [row["amp_fx/loss_scale"] for row in rows] == [128.0, 64.0, 64.0, 64.0]
    assert rows[1]["amp_fx/first_nonfinite"].endswith("down.bias")


def test_training_follows_fp32(lit: Any, tmp_path: Path) -> None:
    net = UpDown()
    plain = copy.deepcopy(net)
    batches = lit.batches()
    lit.trainer(tmp_path, plugins=[lit.fp16()], gradient_clip_val=0.1).fit(lit.LitNet(net), batches)
    lit.trainer(tmp_path, gradient_clip_val=0.1).fit(lit.LitNet(plain), batches)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=1e-2)


def test_one_bad_micro_batch_spoils_the_step_that_it_is_part_of(lit: Any, tmp_path: Path) -> None:
    plugin, watch = lit.fp16(), lit.Watch()
    own = lit.trainer(tmp_path, watch, plugins=[plugin], accumulate_grad_batches=2)
    own.fit(lit.LitNet(), lit.batches(0))
    assert watch.moved == [False, False, False, True]


def test_checkpoints_have_clean_keys_and_the_state_of_the_scaler(lit: Any, tmp_path: Path) -> None:
    first = lit.trainer(tmp_path, plugins=[lit.fp16()])
    model = lit.LitNet()
    first.fit(model, lit.batches(0, 1))
    first.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == lit.LitNet().state_dict().keys()

    again = lit.fp16()
    second = lit.trainer(tmp_path, plugins=[again], max_epochs=2)
    second.fit(lit.LitNet(), lit.batches(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert again.scaler.get_scale() == 32.0


def test_a_module_that_is_compiled_already_stays_as_it_is(lit: Any, tmp_path: Path) -> None:
    plugin = lit.fp16()
    inside = lit.LitNet()
    inside.net.compile(backend="amp_fx", options=plugin.options)
    step = inside.training_step
    lit.trainer(tmp_path, plugins=[plugin]).fit(inside, lit.batches(0))
    assert inside.training_step == step
    assert plugin.scaler.get_scale() == 64.0


#: what a module calls in a step: itself, its parts of torch's own (``nn.Sequential(...).compile()`` compiles nothing),
#: and one in a list; its part ``net``, and how many graphs
CALLED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], nn.Module], int]] = {
    "itself": (lambda m, x: m(x), UpDown, 1),
    "of torch": (lambda m, x: m.head(m.net(x)), lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()), 2),
    "in a list": (lambda m, x: m.net[0](x), lambda: nn.ModuleList([UpDown()]), 1),
}


@pytest.mark.parametrize("called", CALLED)
def test_what_a_step_calls_is_compiled_and_is_in_no_checkpoint(lit: Any, tmp_path: Path, called: str) -> None:
    step, make, graphs = CALLED[called]

    class Net(lit.LitNet):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return step(self, batch).square().mean()

    model, plugin = Net(make()), lit.fp16()
    if called == "of torch":
        model.head = nn.Linear(8, 8)
    keys = list(model.state_dict())
    with amp_fx.record() as recording:
        lit.trainer(tmp_path, plugins=[plugin]).fit(model, lit.batches(0))
    assert len(recording.plans) == graphs
    assert plugin.scaler.get_scale() == 64.0
    assert list(copy.deepcopy(model).state_dict()) == keys


def test_the_default_scaler_is_ours(lit: Any) -> None:
    plugin = lit.AmpFxPrecision("16-mixed", "cpu")
    assert isinstance(plugin, lit.MixedPrecision)
    assert isinstance(plugin.scaler, amp_fx.GradScaler)
    assert plugin.options == {"dtype": "float16", "scaler": "default"}
    assert lit.AmpFxPrecision("bf16-mixed").scaler is None


@pytest.mark.parametrize("plugin", ["AmpFxPrecision", "AmpFxFabricPrecision"])
def test_bad_arguments_are_errors(lit: Any, plugin: str) -> None:
    make = getattr(lit, plugin)
    with pytest.raises(amp_fx.OptionsError, match="'16-mixed'"):
        make("16-mix")
    for wrong in ({"scaler": amp_fx.GradScaler("cpu")}, {"options": {"dtype": "float16"}}):
        with pytest.raises(amp_fx.OptionsError, match="float16"):
            make("bf16-mixed", **wrong)


# ---- Fabric ----


def fabric_steps(lit: Any, plugin: Any, model: nn.Module, *bad: int, **optimizer: Any) -> list[bool]:
    """Trains four steps with clipping; which of them moved the weights."""
    fabric = lit.Fabric(accelerator="cpu", plugins=[plugin])
    net: Any
    net, opt = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1, **optimizer))
    taken = []
    for x in lit.batches(*bad):
        before = weights(model)
        out = net(x)
        assert out.dtype is torch.float32
        fabric.backward(out.square().mean())
        fabric.clip_gradients(net, opt, max_norm=0.1, error_if_nonfinite=False)
        opt.step()
        opt.zero_grad()
        taken.append(moved(before, weights(model)))
    return taken


@pytest.mark.parametrize("of_torch", [False, True])
def test_fabric_trains_in_bf16(lit: Any, of_torch: bool) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU()) if of_torch else UpDown()
    keys = list(model.state_dict())
    with amp_fx.record() as recording:
        plugin = lit.AmpFxFabricPrecision("bf16-mixed", options=lit.OPTIONS)
        assert fabric_steps(lit, plugin, model) == [True] * 4
    assert low(recording) == {torch.bfloat16}
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("fused", [False, True])
def test_fabric_skips_a_bad_step(lit: Any, fused: bool) -> None:
    scaler = amp_fx.GradScaler("cpu", init_scale=128.0)
    plugin = lit.AmpFxFabricPrecision("16-mixed", scaler=scaler, options=lit.OPTIONS)
    with amp_fx.record() as recording:
        assert fabric_steps(lit, plugin, UpDown(), 1, fused=fused) == [True, False, True, True]
    assert low(recording) == {torch.float16}
    assert plugin.state_dict() == scaler.state_dict()
    assert scaler.get_scale() == 64.0
