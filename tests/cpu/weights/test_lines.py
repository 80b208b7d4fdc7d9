"""Convolutions over one dimension are packed as those of a row, which oneDNN's kernels are made for."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import amp_fx
from amp_fx._torch import onednn_computes
from support.checks.below_16_bits import error_of


def norm(channels: int, kind: type[Any] = nn.BatchNorm1d) -> nn.Module:
    made = kind(channels)
    for value in (made.running_mean, made.bias.data):
        value.normal_()
    for value in (made.running_var, made.weight.data):
        value.uniform_(0.5, 2.0)
    return made


#: name -> model, input, and another one of other sizes
CASES: dict[str, tuple[Any, tuple[int, ...], tuple[int, ...]]] = {
    "a signal": (
        lambda: nn.Sequential(
            nn.Conv1d(16, 32, 5, stride=2, padding=2, bias=False), norm(32), nn.ReLU(),
            nn.Conv1d(32, 32, 9, padding=4, groups=32), norm(32), nn.SiLU(), nn.Conv1d(32, 16, 1),
        ),
        (4, 16, 50),
        (3, 16, 41),
    ),
    "a signal, dilated": (
        lambda: nn.Sequential(nn.Conv1d(16, 32, 5, dilation=3), nn.Flatten()), (4, 16, 50), (1, 16, 50)
    ),
    "a column": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 32, (16, 1), stride=(4, 1)), norm(32, nn.BatchNorm2d), nn.ReLU(),
            nn.Conv2d(32, 16, (4, 1), padding=(3, 0)), nn.MaxPool2d((2, 1)), nn.Flatten(2),
        ),
        (4, 1, 120, 1),
        (2, 1, 200, 1),
    ),
}  # fmt: skip


def wide(model: nn.Module, x: Tensor) -> Tensor:
    return copy.deepcopy(model).double()(x.double())


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", CASES)
def test_a_line_is_packed_as_a_row_and_results_lie_as_before(name: str, dynamic: bool | None) -> None:
    torch.manual_seed(0)
    make, *shapes = CASES[name]
    model = make().eval()
    run = torch.compile(model, backend="amp_fx", options={"strict": True}, dynamic=dynamic)
    # in fp32 where the CPU has no bf16, and where the profile says so
    most = 6e-3 if onednn_computes(torch.bfloat16) else 1e-5
    with torch.inference_mode():
        for place, shape in enumerate((*shapes, shapes[0])):
            got, [*code] = run_and_get_code(run, x := torch.randn(shape))
            # of the first call: a second length is compiled for any, and then signals are not packed
            calls = sum("convolution_pointwise" in line for text in code for line in text.splitlines())
            wanted = sum(isinstance(each, (nn.Conv1d, nn.Conv2d)) for each in model)
            assert place or dynamic or calls >= wanted
            assert got.stride() == model(x).stride()
            assert error_of(got, wide(model, x)) < most
        model.get_parameter("0.weight").data.mul_(1.5)
        assert error_of(run(x), wide(model, x)) < most


@pytest.mark.parametrize("name", CASES)
def test_a_package_takes_lines(name: str, tmp_path: Any) -> None:
    torch.manual_seed(0)
    make, shape, _ = CASES[name]
    model, x = make().eval(), torch.randn(shape)
    path = amp_fx.package(amp_fx.export(model, (x,)), tmp_path / "package.pt2")
    with torch.inference_mode():
        got = torch._inductor.aoti_load_package(path)(x)
        with torch.autocast("cpu", torch.bfloat16):
            autocast = error_of(model(x), wide(model, x))
        assert error_of(got, wide(model, x)) < 1.1 * autocast


def test_a_signal_between_two_convolutions_is_written_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(16, 32, 1), nn.GLU(1), nn.Conv1d(16, 16, 9, padding=4, groups=16)).eval()
    x = torch.randn(4, 16, 50)
    with torch.inference_mode():
        run = torch.compile(model, backend="amp_fx", options={"strict": True})
        got, [code] = run_and_get_code(run, x)
        assert error_of(got, wide(model, x)) < (6e-3 if onednn_computes(torch.bfloat16) else 1e-5)
    [call] = re.findall(r"^\s+cpp_fused\w*glu\w*\((.*)\);", code, re.M)
    assert call.count("data_ptr()") == 2, "one buffer is read and one is written"
