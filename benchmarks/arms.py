"""The ways to run a model that are compared: amp_fx, and what a user would pick instead."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx._torch import stock_inductor
from amp_fx.compiler.backend import amp_fx
from amp_fx.errors import OptionsError
from amp_fx.instruments.targets.tracing import InnerCompile, Tracer, compile_graph
from amp_fx.precision.policy.levels import levels_of
from benchmarks import engines
from benchmarks.workloads import Batch, Workload

MODES = ("training", "inference")


@dataclass(frozen=True)
class Arm:
    """One way to run a model.

    Attributes:
        backend: as in ``torch.compile``; None runs eagerly.
        whole: convert the model and its floating inputs to ``dtype`` first.
        scaler: train with a loss scaler, amp_fx's with its backend, else ``torch.amp.GradScaler``.
        channels_last: lay out the model's parameters channels last first; for models that convolve.
        env: environment variables of its process.
        modes: where it makes sense, as ``devices``.
        named_only: only cases that name it run it.
        torchao: the configuration of ``torchao.quantization`` that the model is quantized with.
        calibrated: a function in :mod:`benchmarks.engines` that makes the plan from the batches for calibration.
        engine: a function in :mod:`benchmarks.engines` that runs the model instead of ``torch.compile``.
        needs: libraries without which it is left out.
    """

    name: str
    backend: str | Callable[..., Any] | None = "inductor"
    options: Mapping[str, Any] | None = None
    autocast: bool = False
    whole: bool = False
    dtype: torch.dtype = torch.bfloat16
    scaler: bool = False
    channels_last: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    modes: tuple[str, ...] = MODES
    devices: tuple[str, ...] = ("cpu", "cuda")
    named_only: bool = False
    torchao: str = ""
    calibrated: str = ""
    engine: str = ""
    needs: tuple[str, ...] = ()


_FP16 = torch.float16
_TRAINING, _INFERENCE = ("training",), ("inference",)
# fp16 matmuls on CPU are loops
_GPU, _CPU = ("cuda",), ("cpu",)
# Inductor reads this setting when Dynamo traces, so it is the process's, not the call's
_FREEZING = {"TORCHINDUCTOR_FREEZING": "1"}
_FP8 = {"policy": "fp8", "profile": "off"}
_OURS_FP16 = {"dtype": "float16", "profile": "off"}


def _ours(name: str, options: Mapping[str, Any], **others: Any) -> Arm:
    return Arm(name, "amp_fx", options, **others)


def _torchao(name: str, config: str) -> Arm:
    return Arm(
        f"torchao_{name}",
        env=_FREEZING,
        modes=_INFERENCE,
        devices=_CPU,
        torchao=config,
        needs=("torchao",),
    )


def _engine(name: str, *needs: str, **others: Any) -> Arm:
    return Arm(name, engine=name, needs=needs, modes=_INFERENCE, devices=_CPU, named_only=True, **others)


_ALL = (
    Arm("fp32"),
    Arm("eager_autocast", None, autocast=True),
    Arm("autocast", autocast=True),
    Arm("bf16", whole=True),
    Arm("freezing", autocast=True, env=_FREEZING, modes=_INFERENCE),
    _ours("amp_fx", {}),
    Arm("autocast_channels_last", autocast=True, channels_last=True),
    _ours("amp_fx_channels_last", {}, channels_last=True),
    _ours("off", {"profile": "off"}),
    _ours("fast", {"policy": "fast", "profile": "off"}),
    _ours("activations_int8", {"activation_memory": "int8"}, modes=_TRAINING, named_only=True),
    # low on every device, for what a model learns
    _ours("saved_int8", {"profile": "off", "activation_memory": "int8"}, modes=_TRAINING, named_only=True),
    _ours("int8", {"policy": "int8"}, modes=_INFERENCE, devices=_CPU),
    _ours("int8_all", {"policy": engines.ALL_INT8}, modes=_INFERENCE, devices=_CPU),
    # for CPUs without bf16
    Arm("fp32_freezing", env=_FREEZING, modes=_INFERENCE, devices=_CPU, named_only=True),
    _ours("amp_fx_cache", {"weights": "cache"}, modes=_INFERENCE, devices=_CPU, named_only=True),
    _ours("int8_measured", {}, modes=_INFERENCE, devices=_CPU, calibrated="measured_plan", named_only=True),
    _ours(
        "int8_calibrated", {}, modes=_INFERENCE, devices=_CPU, calibrated="documented_plan", named_only=True
    ),
    _torchao("dynamic", "Int8DynamicActivationInt8WeightConfig"),
    _torchao("weights", "Int8WeightOnlyConfig"),
    _engine("package"),
    _engine("package_int8"),
    _engine("package_calibrated"),
    _engine("openvino", "openvino"),
    _engine("openvino_int8", "openvino", "nncf"),
    _engine("onnxruntime_int8", "onnx", "onnxruntime"),
    _engine("x86_int8", "torchao", env=_FREEZING),
    _ours("fp8", _FP8, devices=_GPU),
    _ours("fp8_by_cost", {"policy": "fp8"}, devices=_GPU, named_only=True),
    *(
        _ours(f"fp8_{recipe}", {**_FP8, "fp8": recipe}, devices=_GPU, named_only=True)
        for recipe in levels_of("fp8")
    ),
    # on a CPU, weights are folded and packed by default
    _ours("freeze", {"weights": "freeze"}, modes=_INFERENCE, devices=_GPU),
    Arm("fp16", whole=True, dtype=_FP16, modes=_INFERENCE, devices=_GPU),
    Arm("autocast_fp16", autocast=True, dtype=_FP16, devices=_GPU),
    _ours("amp_fx_fp16", _OURS_FP16, dtype=_FP16, modes=_INFERENCE, devices=_GPU),
    Arm("autocast_scaler", autocast=True, dtype=_FP16, scaler=True, modes=_TRAINING, devices=_GPU),
    _ours(
        "amp_fx_scaler",
        {**_OURS_FP16, "scaler": "default"},
        dtype=_FP16,
        scaler=True,
        modes=_TRAINING,
        devices=_GPU,
    ),
)
ARMS = {arm.name: arm for arm in _ALL}


def arms_for(mode: str, device: str) -> list[str]:
    """Names of the arms that make sense in a mode on a device, and whose libraries are installed."""
    there = [arm for arm in ARMS.values() if all(map(importlib.util.find_spec, arm.needs))]
    return [arm.name for arm in there if mode in arm.modes and device in arm.devices]


@dataclass(frozen=True)
class Prepared:
    """A copy of a workload's model and batch, on the device and in the arm's dtype, and their loss, compiled."""

    arm: Arm
    mode: str
    device: str
    model: nn.Module
    batch: Batch
    loss: Callable[[nn.Module, Batch], Tensor]

    def forward(self, batch: Batch | None = None) -> Tensor:
        """The loss, or what the model returns that has none; gradients and autocast as the arm has them.

        ``batch`` is another one than the workload's, in fp32.
        """
        arm = self.arm
        with (
            torch.inference_mode(self.mode == "inference"),
            torch.autocast(self.device, arm.dtype if arm.autocast else None, enabled=arm.autocast),
        ):
            return self.loss(self.model, self.batch if batch is None else _of_arm(arm, batch))


def _of_arm(arm: Arm, batch: Batch) -> Batch:
    dtype = arm.dtype if arm.whole else None
    return {
        name: value.to(dtype) if dtype and value.is_floating_point() else value
        for name, value in batch.items()
    }


def prepare(workload: Workload, arm: Arm, mode: str, device: str = "cpu") -> Prepared:
    """Copies a workload's model and batch and compiles them, lazily, as the arm does.

    Forgets what Dynamo has compiled: it shares code between instances of one class, so that an arm might run
    another's.
    """
    torch._dynamo.reset()
    model = copy.deepcopy(workload.model).to(device).train(mode == "training")
    batch = {name: value.to(device) for name, value in workload.batch.items()}
    if arm.whole:
        model = model.to(arm.dtype)
        batch = _of_arm(arm, batch)
    if arm.torchao:
        quantization = importlib.import_module("torchao.quantization")
        quantization.quantize_(model, getattr(quantization, arm.torchao)())
    if arm.channels_last:
        model = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  # not in the stubs

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        output = model(**batch)
        return output if isinstance(output, Tensor) else output.loss

    if arm.engine:
        run = getattr(engines, arm.engine)(model, batch, *workload.calibration)
        return Prepared(arm, mode, device, model, batch, lambda _, batch: run(batch))
    if arm.backend is None:
        return Prepared(arm, mode, device, model, batch, loss)
    options: dict[str, Any] | None = None if arm.options is None else dict(arm.options)
    if arm.calibrated:
        options = {"plan": getattr(engines, arm.calibrated)(model, *workload.calibration or (batch,))}
    # a graph break would cost every arm something else
    whole = workload.is_whole
    compiled = torch.compile(loss, backend=arm.backend, options=options, dynamic=False, fullgraph=whole)
    return Prepared(arm, mode, device, model, batch, compiled)


def compile_for_target(workload: Workload, arm: Arm, mode: str, inner_compile: InnerCompile) -> None:
    """Compiles a workload as an arm does, for this process's target, as far as ``inner_compile`` goes."""
    if arm.backend is None or arm.env or arm.engine:
        raise OptionsError(f"arm {arm.name!r} needs a device.")
    tracer = Tracer()
    prepare(workload, replace(arm, backend=tracer, options=None, autocast=False), mode).forward()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if arm.backend == "amp_fx":
            return amp_fx(gm, inputs, options=arm.options)
        with torch.autocast("cuda", arm.dtype, enabled=arm.autocast):
            return stock_inductor(gm, inputs)

    for graph in tracer.graphs:
        compile_graph(graph, backend, inner_compile)
