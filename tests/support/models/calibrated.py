"""Scales that are measured for int8: a small network, its calibration, and what a plan of it computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import amp_fx
from amp_fx import Calibration
from amp_fx.precision.placement.profile import DeviceProfile
from support.checks.below_16_bits import error, exact
from support.models.small import Parts

#: int8 pays wherever it may run
PROFILE = DeviceProfile(
    "test", "cpu", {"float32": 1e9, "bfloat16": 2e9, "float16": 2e9, "int8": 8e9}, 1e12, 0.0
)


def convnet() -> Any:
    """Convolutions with norms, in-place activations, pooling and a residual addition, then linears."""

    def program(m: Any, x: Tensor) -> Tensor:
        x = m.pool(m.relu(m.norm(m.stem(x))))
        x = (x + m.point(m.relu(m.depth(x)))).flatten(2).mT
        return m.head(m.down(nn.functional.gelu(m.up(x))))

    torch.manual_seed(0)
    parts: dict[str, nn.Module] = {"stem": nn.Conv2d(3, 16, 3, 2, bias=False), "norm": nn.BatchNorm2d(16)}
    parts |= {"depth": nn.Conv2d(16, 16, 3, padding="same", groups=16), "point": nn.Conv2d(16, 16, 1)}
    parts |= {"up": nn.Linear(16, 64), "down": nn.Linear(64, 32), "head": nn.Linear(32, 8)}
    net = Parts(program, **parts, relu=nn.ReLU(inplace=True), pool=nn.MaxPool2d(3, 2, 1))
    net(images(16))
    return net.eval()


def calibrated(model: nn.Module, batches: Any, **given: Any) -> Calibration:
    return amp_fx.calibrate(model, batches, of="outputs", **{"policy": "int8", "profile": PROFILE, **given})


def images(rows: int = 4) -> Tensor:
    return torch.randn(rows, 3, 17, 17)


def wrong(got: Tensor, model: nn.Module, x: Tensor) -> float:
    """Relative distance from fp64."""
    return error([got.detach()], [exact(model, x)])


def compiled(model: nn.Module, plan: Any, **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, backend="amp_fx", options={"plan": plan, "strict": True, **options})
