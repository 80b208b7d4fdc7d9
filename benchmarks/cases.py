"""What is timed: models at sizes that suit a device, those that matter most first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks import workloads
from benchmarks.arms import ARMS, Arm
from benchmarks.workloads import Build, Workload, build_workload

__all__ = ["CASES", "Case"]

#: what convolves: the layout of its parameters makes a difference
_CONVOLVING = (workloads.resnet, workloads.gan)

#: what compares bf16 and fp8
_OF_FP8 = ("autocast", "amp_fx", "off", *(name for name in ARMS if name.startswith("fp8")))

#: one block of Llama-3-8B, of 32 heads and 8 for keys and values, with a small embedding and head
_LLAMA_8B = {"layers": 1, "width": 4096, "hidden": 14336, "head": 128, "groups": 4}

#: inputs and outputs of the linears of Llama-3-8B, and of smaller ones, where bf16 may be faster
_SHAPES = (
    (4096, 4096), (4096, 1024), (4096, 14336), (14336, 4096), (2048, 2048), (1024, 1024), (1024, 4096), (512, 512),
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One model in one mode.

    Attributes:
        name: the key in ``CASES``.
        family: cases that differ in one size alone share it.
        mode: ``"training"`` or ``"inference"``.
        build: makes the model and its batch.
        sizes: device -> keyword arguments of ``build``; on a device without, it is not measured.
        arms: if not empty, the only ones that say something here.
    """

    name: str
    family: str
    mode: str
    build: Build
    sizes: Mapping[str, Mapping[str, int]]
    arms: tuple[str, ...] = ()

    def takes(self, arm: Arm) -> bool:
        """Whether an arm says something here."""
        if (self.arms or arm.named_only) and arm.name not in self.arms:
            return False
        return not arm.channels_last or self.build in _CONVOLVING

    def workload(self, device: str) -> Workload:
        """Builds it; the same weights each time."""
        return build_workload(self.name, self.build, **self.sizes[device])


CASES: dict[str, Case] = {}


def _case(
    name: str,
    mode: str,
    build: Build,
    sizes: Mapping[str, Mapping[str, int]],
    family: str = "",
    arms: tuple[str, ...] = (),
) -> None:
    CASES[name] = Case(name, family or name, mode, build, sizes, arms)


_case(
    "gpt2",
    "training",
    workloads.gpt2,
    {
        "cpu": {"batch": 4, "length": 256, "layers": 4, "width": 256, "vocab": 1024},
        "cuda": {"batch": 16, "length": 1024, "layers": 12, "width": 768, "vocab": 50304},
    },
)
_case(
    "mlp",
    "training",
    workloads.mlp,
    {"cpu": {"batch": 256, "width": 1024}, "cuda": {"batch": 512, "width": 4096}},
)
_case(
    "resnet18",
    "training",
    workloads.resnet,
    {
        "cpu": {"batch": 8, "image": 96, "width": 64, "stages": 4},
        "cuda": {"batch": 256, "image": 224, "width": 64, "stages": 4},
    },
)
_case(
    "llama",
    "training",
    workloads.llama_512,
    {
        "cpu": {"batch": 4, "length": 256},
        "cuda": {"batch": 8, "length": 2048, "layers": 16, "width": 1024, "hidden": 2752, "vocab": 32000},
    },
)
for _batch in (1, 16, 128):
    _case(
        f"linears_batch{_batch}",
        "inference",
        workloads.linears,
        {"cpu": {"batch": _batch, "width": 2048}, "cuda": {"batch": _batch, "width": 4096}},
        family="linears",
    )
_case(
    "llama_decode",
    "inference",
    workloads.llama_decode,
    {
        "cpu": {"batch": 1, "context": 128, "layers": 4, "width": 512, "hidden": 1376, "vocab": 4096},
        "cuda": {"batch": 1, "context": 1024, "layers": 16, "width": 2048, "hidden": 5504, "vocab": 32000},
    },
)
_case(
    "llama_prefill",
    "inference",
    workloads.llama_512,
    {"cpu": {"batch": 1, "length": 128, "layers": 4, "width": 512, "hidden": 1376, "vocab": 4096}},
)
_case(
    "bert",
    "training",
    workloads.bert,
    {
        "cpu": {"batch": 8, "length": 128, "layers": 4},
        "cuda": {"batch": 32, "length": 512, "layers": 12, "width": 768, "vocab": 30528},
    },
)
_case(
    "vit",
    "training",
    workloads.vit,
    {
        "cpu": {"batch": 8, "image": 128, "layers": 4},
        "cuda": {"batch": 64, "image": 224, "patch": 16, "layers": 12, "width": 768},
    },
)
_case(
    "t5",
    "training",
    workloads.t5,
    {
        "cpu": {"batch": 4, "length": 128},
        "cuda": {"batch": 16, "length": 512, "layers": 6, "width": 512, "vocab": 32128},
    },
)
for _name in ("resnet18", "gpt2", "llama", "bert", "vit", "t5"):
    _case(f"{_name}_inference", "inference", CASES[_name].build, CASES[_name].sizes)
_case(
    "gan",
    "training",
    workloads.gan,
    {"cpu": {"batch": 16, "width": 64}, "cuda": {"batch": 256, "width": 128}},
)
for _batch in (4, 16, 64):
    _case(
        f"resnet_cifar_batch{_batch}",
        "training",
        workloads.resnet,
        {"cpu": {"batch": _batch, "image": 32, "width": 64, "stages": 4}},
        family="resnet_cifar",
    )
for _layers in (2, 6, 12, 24, 48):
    _case(
        f"depth_layers{_layers}",
        "training",
        workloads.gpt_512,
        {
            "cpu": {"batch": 1, "length": 32, "width": 64, "vocab": 64, "layers": _layers},
            "cuda": {"batch": 4, "length": 512, "width": 512, "vocab": 1024, "layers": _layers},
        },
        family="depth",
        arms=("fp32", "autocast", "amp_fx", "off"),
    )
_case(
    "llama_8b_block",
    "training",
    workloads.llama_512,
    {"cuda": {"batch": 4, "length": 2048, **_LLAMA_8B}},
    arms=_OF_FP8,
)
for _length in (16, 2048):
    _case(
        f"llama_8b_block_inference_length{_length}",
        "inference",
        workloads.llama_512,
        {"cuda": {"batch": 1, "length": _length, **_LLAMA_8B}},
        family="llama_8b_block_inference",
        arms=(*_OF_FP8, "bf16"),
    )
for _inner, _outer in _SHAPES:
    _case(
        f"linear_{_inner}x{_outer}",
        "training",
        workloads.linear,
        {"cuda": {"tokens": 8192, "inner": _inner, "outer": _outer}},
        family="linear",
        arms=_OF_FP8,
    )
