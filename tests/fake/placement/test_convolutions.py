"""What a convolution takes on this machine decides about its dtype, and is found out once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor import config

import amp_fx
from amp_fx._torch import Convolution, convolution_seconds
from amp_fx.precision.placement import convolutions, devices
from amp_fx.precision.plans.label import ReasonKind
from support.tracing.captured_graphs import rewrite

AMX = devices.cpu_profile(next(row for row in devices.CPUS if row.name == "amx_bf16"), 1)
FORM = Convolution((1, 4, 6, 6), torch.Size((8, 4, 3, 3)), (1, 1), (0, 0), (1, 1), None, 1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.long, self.short = nn.Conv2d(8, 64, 7), nn.Conv2d(64, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.short(self.long(x).relu())


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The forms that are timed: a window of 7 takes a hundred times as long in bf16 as in fp32."""
    found = list[Any]()

    def seconds(form: Convolution, dtype: torch.dtype, threads: int) -> float:
        found.append((form.kernel, dtype))
        return 1.0 if form.kernel[-1] == 7 and dtype is torch.bfloat16 else 0.01

    monkeypatch.setattr(devices, "builtin", lambda device: AMX)
    monkeypatch.setattr(convolutions, "convolution_seconds", seconds)
    monkeypatch.setattr(convolutions, "onednn_packs", lambda _: True)
    return found


def dtypes(x: Tensor, **options: Any) -> list[Any]:
    with torch.no_grad():
        rows = rewrite(Net().eval(), x, options={"profile": "auto", **options}).plan.matmuls
    return [(row.dtype, row.is_because(ReasonKind.SLOWER_LOW)) for row in rows]


def test_a_convolution_that_is_slower_in_bf16_stays_in_fp32_and_says_so(asked: list[Any]) -> None:
    low, wide = (torch.bfloat16, False), (torch.float32, True)
    assert dtypes(torch.randn(4, 8, 40, 40)) == [wide, low]
    # the other one is too short to be timed
    assert {kernel[-1] for kernel, _ in asked} == {7}
    asked.clear()
    # too short, too; a file's profile, or none, is what counts
    assert dtypes(torch.randn(1, 8, 8, 8))[0][1] is False
    assert dtypes(torch.randn(4, 8, 40, 40), profile="off") == [low, low]
    assert not asked


def test_a_dtype_without_kernels_is_not_timed(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "onednn_packs", lambda _: False)
    assert dtypes(torch.randn(4, 8, 40, 40)) == [(torch.bfloat16, False)] * 2
    assert not asked


def test_a_training_times_nothing(asked: list[Any]) -> None:
    rewrite(Net(), torch.randn(4, 8, 40, 40), options={"profile": "auto"})
    assert not asked


def test_no_more_is_timed_than_two_seconds(asked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convolutions, "BUDGET", -1.0)
    assert dtypes(torch.randn(4, 8, 40, 40)) == [(torch.bfloat16, False)] * 2
    assert not asked


def test_times_are_kept_on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    amp_fx.reset()
    found = convolution_seconds(FORM, torch.float32, 1)
    [path] = (tmp_path / "amp_fx").iterdir()
    amp_fx.reset()
    path.write_text("0.25")
    assert (found > 0, convolution_seconds(FORM, torch.float32, 1)) == (True, 0.25)
    amp_fx.reset()
    path.write_text("")
    # a file that was cut off is none
    assert convolution_seconds(FORM, torch.float32, 1) != 0.25
    amp_fx.reset()
    path.write_text("0.25")
    with config.patch(force_disable_caches=True):
        assert convolution_seconds(FORM, torch.float32, 1) != 0.25
