"""Lightning and Fabric, the real ones: our precision plugins train, skip, clip, save and log."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

import amp_fx
from amp_fx.integrations.lightning import AmpFxFabricPrecision, AmpFxPrecision, MetricsCallback
from amp_fx.integrations.metrics import ScalerMetrics

OPTIONS = {"profile": "off"}
INF = float("inf")

pytestmark = [
    # Lightning asks torch's pytree in a way that torch is about to drop
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning"),
    # Lightning's advice
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


class LitNet(LightningModule):
    """Logs its loss, and calls a part of itself instead of itself, as most do."""

    def __init__(self, net: nn.Module | None = None, **optimizer: Any) -> None:
        super().__init__()
        self.net = net or Net()
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
        self._note(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        self._note(pl_module)

    def _note(self, module: LightningModule) -> None:
        self.weights.append([p.detach().clone() for p in module.parameters()])

    @property
    def moved(self) -> list[bool]:
        return [
            not all(torch.equal(p, q) for p, q in zip(before, after, strict=True))
            for before, after in zip(self.weights, self.weights[1:], strict=False)
        ]


def data(*bad: int, count: int = 4) -> DataLoader[Any]:
    batches = [torch.randn(4, 8) for _ in range(count)]
    for step in bad:
        batches[step] *= INF
    return DataLoader(batches, batch_size=None)  # pyright: ignore[reportArgumentType]


def trainer(folder: Path, *callbacks: Callback, **more: Any) -> Trainer:
    return Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            "callbacks": list(callbacks),
            **more,
        }
    )


def fp16(**more: Any) -> AmpFxPrecision:
    return AmpFxPrecision(
        "16-mixed", scaler=amp_fx.GradScaler("cpu", init_scale=128.0), options=OPTIONS, **more
    )


def low(recording: amp_fx.Recording) -> set[torch.dtype | None]:
    return {node.dtype for plan in recording.plans for node in plan.nodes} - {torch.float32}


# ---- the Trainer ----


def test_bf16_training_and_validation_need_the_plugin_alone(tmp_path: Path) -> None:
    model = LitNet()
    own = trainer(tmp_path, plugins=[AmpFxPrecision("bf16-mixed", options=OPTIONS)])
    with amp_fx.record() as recording:
        own.fit(model, data(), data())
    assert low(recording) == {torch.bfloat16}
    assert {"loss", "val_loss"} <= own.callback_metrics.keys()
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert model.state_dict().keys() == LitNet().state_dict().keys()


@pytest.mark.parametrize("fused", [False, True])
def test_a_bad_step_is_skipped_and_gradients_are_clipped(tmp_path: Path, fused: bool) -> None:
    plugin, watch, rows = fp16(), Watch(), []
    assert isinstance(plugin.scaler, amp_fx.GradScaler)
    metrics = MetricsCallback(ScalerMetrics(plugin.scaler, rows.append))
    own = trainer(tmp_path, watch, metrics, plugins=[plugin], gradient_clip_val=0.1)
    with amp_fx.record() as recording:
        own.fit(LitNet(fused=fused), data(1))
    assert low(recording) == {torch.float16}
    assert watch.moved == [True, False, True, True]
    assert [row["amp_fx/loss_scale"] for row in rows] == [128.0, 64.0, 64.0, 64.0]
    assert rows[1]["amp_fx/first_nonfinite"].endswith("down.bias")


def test_training_follows_fp32(tmp_path: Path) -> None:
    net = Net()
    plain = copy.deepcopy(net)
    batches = data()
    trainer(tmp_path, plugins=[fp16()], gradient_clip_val=0.1).fit(LitNet(net), batches)
    trainer(tmp_path, gradient_clip_val=0.1).fit(LitNet(plain), batches)
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=2e-2, atol=1e-2)


def test_one_bad_micro_batch_spoils_the_step_that_it_is_part_of(tmp_path: Path) -> None:
    plugin, watch = fp16(), Watch()
    trainer(tmp_path, watch, plugins=[plugin], accumulate_grad_batches=2).fit(LitNet(), data(0))
    assert watch.moved == [False, False, False, True]


def test_checkpoints_have_clean_keys_and_the_state_of_the_scaler(tmp_path: Path) -> None:
    first = trainer(tmp_path, plugins=[fp16()])
    model = LitNet()
    first.fit(model, data(0, 1))
    first.save_checkpoint(tmp_path / "last.ckpt")
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    assert saved["state_dict"].keys() == LitNet().state_dict().keys()

    again = fp16()
    second = trainer(tmp_path, plugins=[again], max_epochs=2)
    second.fit(LitNet(), data(), ckpt_path=str(tmp_path / "last.ckpt"))
    assert again.scaler is not None
    assert again.scaler.get_scale() == 32.0


def test_a_module_that_is_compiled_already_stays_as_it_is(tmp_path: Path) -> None:
    plugin = fp16()
    inside = LitNet()
    inside.net.compile(backend="amp_fx", options=plugin.options)
    step = inside.training_step
    trainer(tmp_path, plugins=[plugin]).fit(inside, data(0))
    assert inside.training_step == step
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 64.0


def test_what_calls_itself_is_one_graph_and_stays_out_of_checkpoints(tmp_path: Path) -> None:
    class CallsItself(LitNet):
        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self(batch).square().mean()

    model, plugin = CallsItself(), fp16()
    with amp_fx.record() as recording:
        trainer(tmp_path, plugins=[plugin]).fit(model, data(0))
    assert len(recording.plans) == 1
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 64.0


def test_modules_of_torch_itself_are_compiled(tmp_path: Path) -> None:
    # Dynamo skips functions of torch: nn.Sequential(...).compile() compiles nothing
    class OfTorch(LitNet):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
            self.head = nn.Linear(8, 8)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.head(self.net(batch)).square().mean()

    model, plugin = OfTorch(), fp16()
    with amp_fx.record() as recording:
        trainer(tmp_path, plugins=[plugin]).fit(model, data(0))
    assert len(recording.plans) == 2
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 64.0
    assert list(copy.deepcopy(model).state_dict()) == [
        "net.0.weight",
        "net.0.bias",
        "head.weight",
        "head.bias",
    ]


def test_modules_in_lists_are_compiled(tmp_path: Path) -> None:
    class InList(LitNet):
        def __init__(self) -> None:
            super().__init__()
            self.nets = nn.ModuleList([self.net])
            del self.net

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.nets[0](batch).square().mean()

    plugin = fp16()
    trainer(tmp_path, plugins=[plugin]).fit(InList(), data(0))
    assert plugin.scaler is not None
    assert plugin.scaler.get_scale() == 64.0


def test_the_default_scaler_is_ours() -> None:
    plugin = AmpFxPrecision("16-mixed", "cpu")
    assert isinstance(plugin, MixedPrecision)
    assert isinstance(plugin.scaler, amp_fx.GradScaler)
    assert plugin.options == {"dtype": "float16", "scaler": "default"}
    assert AmpFxPrecision("bf16-mixed").scaler is None


@pytest.mark.parametrize("plugin", [AmpFxPrecision, AmpFxFabricPrecision])
def test_bad_arguments_are_errors(plugin: Any) -> None:
    with pytest.raises(amp_fx.OptionsError, match="'16-mixed'"):
        plugin("16-mix")
    with pytest.raises(amp_fx.OptionsError, match="float16"):
        plugin("bf16-mixed", scaler=amp_fx.GradScaler("cpu"))
    with pytest.raises(amp_fx.OptionsError, match="float16"):
        plugin("bf16-mixed", options={"dtype": "float16"})


# ---- Fabric ----


def fabric_steps(plugin: AmpFxFabricPrecision, model: nn.Module, *bad: int, **optimizer: Any) -> list[bool]:
    """Trains four steps with clipping; which of them moved the weights."""
    fabric = Fabric(accelerator="cpu", plugins=[plugin])
    net: Any
    net, opt = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1, **optimizer))
    moved = []
    for x in data(*bad):
        before = [p.detach().clone() for p in model.parameters()]
        out = net(x)
        assert out.dtype is torch.float32
        fabric.backward(out.square().mean())
        fabric.clip_gradients(net, opt, max_norm=0.1, error_if_nonfinite=False)
        opt.step()
        opt.zero_grad()
        moved.append(not all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)))
    return moved


def test_fabric_trains_in_bf16() -> None:
    model = Net()
    with amp_fx.record() as recording:
        assert fabric_steps(AmpFxFabricPrecision("bf16-mixed", options=OPTIONS), model) == [True] * 4
    assert low(recording) == {torch.bfloat16}
    assert model.state_dict().keys() == Net().state_dict().keys()


def test_fabric_compiles_modules_of_torch_itself() -> None:
    plugin = AmpFxFabricPrecision("bf16-mixed", options=OPTIONS)
    with amp_fx.record() as recording:
        assert fabric_steps(plugin, nn.Sequential(nn.Linear(8, 8), nn.ReLU())) == [True] * 4
    assert low(recording) == {torch.bfloat16}


@pytest.mark.parametrize("fused", [False, True])
def test_fabric_skips_a_bad_step(fused: bool) -> None:
    scaler = amp_fx.GradScaler("cpu", init_scale=128.0)
    plugin = AmpFxFabricPrecision("16-mixed", scaler=scaler, options=OPTIONS)
    with amp_fx.record() as recording:
        assert fabric_steps(plugin, Net(), 1, fused=fused) == [True, False, True, True]
    assert low(recording) == {torch.float16}
    assert plugin.state_dict() == scaler.state_dict()
    assert scaler.get_scale() == 64.0
