"""What is timed: models at sizes that suit a device, those that matter most first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from benchmarks import workloads
from benchmarks.arms import ARMS, MODES, Arm
from benchmarks.trained.models import MODELS
from benchmarks.workloads import Build, BuildWhole, Workload, build_workload

#: what convolves: the layout of its parameters makes a difference
_CONVOLVING = (workloads.resnet, workloads.gan)

#: what compares bf16 and fp8
_OF_FP8 = ("autocast", "amp_fx", "off", *(name for name in ARMS if name.startswith("fp8")))

#: what compares engines
_OF_ENGINES = (
    "autocast", "freezing", "amp_fx", "fp32_freezing", "amp_fx_cache", "int8", "int8_all", "int8_measured",
    *(arm.name for arm in ARMS.values() if arm.engine),
)  # fmt: skip

#: what compares engines on trained weights, of int8 by the documented call
_OF_TRAINED = (
    "eager_autocast", "autocast", "amp_fx", "package", "int8_calibrated", "package_calibrated", "torchao_dynamic",
    "openvino", "openvino_int8",
)  # fmt: skip

#: one block of Llama-3-8B, of 32 heads and 8 for keys and values, with a small embedding and head
_LLAMA_8B = {"layers": 1, "width": 4096, "hidden": 14336, "head": 128, "groups": 4}

#: inputs and outputs of the linears of Llama-3-8B, and of smaller ones, where bf16 may be faster
_SHAPES = (
    (4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (2048, 2048), (1024, 1024), (1024, 4096), (512, 512),
)  # fmt: skip


Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Case:
    """One model in one mode, with the arguments of ``build`` on a CPU and on a GPU, or None: it is not measured there.

    Attributes:
        family: cases that differ in one size alone share it; otherwise the name.
        arms: if not empty, the only ones that say something here.
    """

    mode: str
    build: Build | BuildWhole
    cpu: Sizes | None = None
    cuda: Sizes | None = None
    family: str = ""
    arms: tuple[str, ...] = ()
    name: str = ""

    @property
    def sizes(self) -> dict[str, Sizes]:
        """By device."""
        return {
            device: sizes for device, sizes in (("cpu", self.cpu), ("cuda", self.cuda)) if sizes is not None
        }

    def takes(self, arm: Arm) -> bool:
        """Whether an arm says something here."""
        if (self.arms or arm.named_only) and arm.name not in self.arms:
            return False
        return not arm.channels_last or self.build in _CONVOLVING

    def workload(self, device: str) -> Workload:
        """Builds it; the same weights each time."""
        return build_workload(self.name, self.build, **self.sizes[device])


_TRAINING, _INFERENCE = MODES
_LLAMA_GPU = {"hidden": 2752, "vocab": 32000, "layers": 16, "width": 1024}
_LLAMA_CPU = {"hidden": 1376, "vocab": 4096, "layers": 4, "width": 512, "batch": 1}
_DEPTH = {"batch": 1, "length": 32, "width": 64, "vocab": 64}
_DEPTH_GPU = {"batch": 4, "length": 512, "width": 512, "vocab": 1024}
_RESNET = {"width": 64, "stages": 4}

_TRAINED = {
    "gpt2": Case(
        _TRAINING,
        workloads.gpt2,
        {"batch": 4, "length": 256, "layers": 4, "width": 256, "vocab": 1024},
        {"batch": 16, "length": 1024, "layers": 12, "width": 768, "vocab": 50304},
    ),
    "mlp": Case(_TRAINING, workloads.mlp, {"batch": 256, "width": 1024}, {"batch": 512, "width": 4096}),
    "resnet18": Case(
        _TRAINING,
        workloads.resnet,
        {"batch": 8, "image": 96, **_RESNET},
        {"batch": 256, "image": 224, **_RESNET},
    ),
    "llama": Case(
        _TRAINING,
        workloads.llama_512,
        {"batch": 4, "length": 256},
        {"batch": 8, "length": 2048, **_LLAMA_GPU},
    ),
}
_SERVED = {
    **{
        f"linears_batch{batch}": Case(
            _INFERENCE,
            workloads.linears,
            {"batch": batch, "width": 2048},
            {"batch": batch, "width": 4096},
            family="linears",
        )
        for batch in (1, 16, 128)
    },
    "llama_decode": Case(
        _INFERENCE,
        workloads.llama_decode,
        {"context": 128, **_LLAMA_CPU},
        {"batch": 1, "context": 1024, "layers": 16, "width": 2048, "hidden": 5504, "vocab": 32000},
    ),
    "llama_prefill": Case(_INFERENCE, workloads.llama_512, {"length": 128, **_LLAMA_CPU}),
}
_MORE_TRAINED = {
    "bert": Case(
        _TRAINING,
        workloads.bert,
        {"batch": 8, "length": 128, "layers": 4},
        {"batch": 32, "length": 512, "layers": 12, "width": 768, "vocab": 30528},
    ),
    "vit": Case(
        _TRAINING,
        workloads.vit,
        {"batch": 8, "image": 128, "layers": 4},
        {"batch": 64, "image": 224, "patch": 16, "layers": 12, "width": 768},
    ),
    "t5": Case(
        _TRAINING,
        workloads.t5,
        {"batch": 4, "length": 128},
        {"batch": 16, "length": 512, "layers": 6, "width": 512, "vocab": 32128},
    ),
}
_BOTH = {**_TRAINED, **_MORE_TRAINED}
_REST = {
    **{
        f"{name}_inference": replace(_BOTH[name], mode=_INFERENCE)
        for name in ("resnet18", "gpt2", "llama", "bert", "vit", "t5")
    },
    "gan": Case(_TRAINING, workloads.gan, {"batch": 16, "width": 64}, {"batch": 256, "width": 128}),
    **{
        f"resnet_cifar_batch{batch}": Case(
            _TRAINING, workloads.resnet, {"batch": batch, "image": 32, **_RESNET}, family="resnet_cifar"
        )
        for batch in (4, 16, 64)
    },
    **{
        f"depth_layers{layers}": Case(
            _TRAINING,
            workloads.gpt_512,
            {**_DEPTH, "layers": layers},
            {**_DEPTH_GPU, "layers": layers},
            "depth",
            ("fp32", "autocast", "amp_fx", "off"),
        )
        for layers in (2, 6, 12, 24, 48)
    },
    "llama_8b_block": Case(
        _TRAINING, workloads.llama_512, cuda={"batch": 4, "length": 2048, **_LLAMA_8B}, arms=_OF_FP8
    ),
    **{
        f"llama_8b_block_inference_length{length}": Case(
            _INFERENCE,
            workloads.llama_512,
            cuda={"batch": 1, "length": length, **_LLAMA_8B},
            family="llama_8b_block_inference",
            arms=(*_OF_FP8, "bf16"),
        )
        for length in (16, 2048)
    },
    **{
        f"linear_{inner}x{outer}": Case(
            _TRAINING,
            workloads.linear,
            cuda={"tokens": 8192, "inner": inner, "outer": outer},
            family="linear",
            arms=_OF_FP8,
        )
        for inner, outer in _SHAPES
    },
}

#: beside other engines
_ENGINES = {
    **{f"linears_{batch}": (workloads.linears, {"batch": batch, "width": 2048}) for batch in (1, 16, 128)},
    "bert_1x128": (workloads.served(workloads.bert), {"batch": 1, "length": 128, "layers": 6, "width": 768}),
    "bert_8x64": (workloads.served(workloads.bert), {"batch": 8, "length": 64, "layers": 6, "width": 384}),
    "vit": (
        workloads.served(workloads.vit),
        {"batch": 2, "image": 224, "patch": 16, "layers": 6, "width": 384},
    ),
    "resnet18": (workloads.served(workloads.resnet), {"batch": 4, "image": 160, **_RESNET}),
    "convnext": (workloads.served(workloads.convnext), {"batch": 2, "image": 160, "width": 48}),
    "llama": (
        workloads.llama_decode,
        {"batch": 1, "context": 128, "layers": 4, "width": 1024, "hidden": 2752, "vocab": 4096},
    ),
}
_BESIDE_ENGINES = {
    f"engines_{name}": Case(_INFERENCE, build, sizes, family="engines", arms=_OF_ENGINES)
    for name, (build, sizes) in _ENGINES.items()
}

_OF_PACKAGES = {
    f"trained_{name}": Case(_INFERENCE, build, {}, family="trained", arms=_OF_TRAINED)
    for name, build in MODELS.items()
}

#: those that matter most first
CASES = {
    name: replace(case, name=name, family=case.family or name)
    for name, case in {
        **_TRAINED,
        **_SERVED,
        **_MORE_TRAINED,
        **_REST,
        **_BESIDE_ENGINES,
        **_OF_PACKAGES,
    }.items()
}
