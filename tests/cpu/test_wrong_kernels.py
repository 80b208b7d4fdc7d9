"""What oneDNN computes wrongly in 16 bits with AMX runs in fp32; no other CPU has these kernels."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx._torch import Convolution, computes_wrongly
from amp_fx.precision.plans.label import ReasonKind
from support.checks.below_16_bits import error_of
from support.tracing.captured_graphs import DEFAULTS, rewrite

amx = pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="a CPU with AMX")

#: name -> convolution, sizes of its input, whether torch.autocast is wrong in each run
CASES: dict[str, tuple[Any, tuple[int, ...], bool]] = {
    "a result of one column, with a stride": (lambda: nn.Conv2d(16, 64, 3, stride=(1, 2)), (2, 16, 9, 4), False),
    "of one column, over three dimensions": (
        lambda: nn.Conv3d(16, 64, (2, 3, 3), stride=(1, 3, 2)), (2, 16, 4, 9, 4), False
    ),
    "of a column, with a stride for both": (lambda: nn.Conv2d(16, 64, (3, 1), stride=2), (2, 16, 32, 1), False),
    "a stride passes over rows": (lambda: nn.Conv3d(32, 16, (1, 1, 3), stride=(4, 4, 1)), (1, 32, 9, 9, 9), False),
    "long windows of many channels": (lambda: nn.Conv1d(1024, 64, 33), (2, 1024, 100), True),
    "long windows of one sample": (lambda: nn.Conv1d(1024, 64, 33), (1024, 100), True),
    "long windows in groups": (lambda: nn.Conv1d(2048, 64, 33, groups=2), (2, 2048, 200), True),
    "wide windows of a few channels": (lambda: nn.Conv2d(8, 32, 8), (2, 8, 64, 64), True),
    "wide windows of a signal": (lambda: nn.Conv1d(8, 48, 16), (2, 8, 64), True),
    "patches of a few channels": (lambda: nn.Conv2d(16, 64, 4, stride=4), (2, 16, 32, 32), True),
}  # fmt: skip
FINE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "many columns": (lambda: nn.Conv2d(16, 64, 3, stride=(1, 2)), (2, 16, 9, 8)),
    "one column, no stride": (lambda: nn.Conv2d(16, 64, 3), (2, 16, 9, 3)),
    "short windows of many channels": (lambda: nn.Conv1d(1024, 32, 8), (2, 1024, 64)),
    "long windows of few channels": (lambda: nn.Conv1d(64, 32, 33), (2, 64, 64)),
    "patches of an image": (lambda: nn.Conv2d(3, 64, 16, stride=16), (2, 3, 64, 64)),
    "every other pixel": (lambda: nn.Conv2d(64, 128, 1, stride=2), (2, 64, 14, 14)),
}


def wide(model: nn.Module, x: Tensor) -> Tensor:
    return copy.deepcopy(model).double()(x.double())


@amx
@pytest.mark.parametrize("name", CASES)
def test_a_convolution_that_is_wrong_in_bf16_runs_in_fp32(name: str) -> None:
    torch.manual_seed(0)
    make, shape, always = CASES[name]
    model, x = make(), torch.randn(shape)
    for options in ({}, {"numerics": "eager"}):
        [row] = rewrite(model, x, options=options).plan.matmuls
        assert (row.dtype, row.is_because(ReasonKind.NO_KERNEL)) == (torch.float32, True)
    if always:
        with torch.autocast("cpu", torch.bfloat16):
            # fails as soon as oneDNN is right
            assert error_of(model(x), wide(model, x)) > 1
    for is_trained in (False, True):
        run = torch.compile(copy.deepcopy(model), backend="amp_fx", options=dict(DEFAULTS))
        with torch.set_grad_enabled(is_trained):
            assert error_of(run(x), wide(model, x)) < 1e-5


@amx
@pytest.mark.parametrize("name", CASES)
def test_sizes_that_are_not_known_count_as_traced(name: str) -> None:
    make, shape, _ = CASES[name]
    model, x = make(), torch.randn(shape)
    [row] = rewrite(model, x, dynamic=True).plan.matmuls
    assert row.dtype is torch.float32


@amx
@pytest.mark.parametrize("name", FINE)
def test_others_run_in_bf16(name: str) -> None:
    make, shape = FINE[name]
    model, x = make(), torch.randn(shape)
    [row] = rewrite(model, x).plan.matmuls
    assert row.dtype is torch.bfloat16
    with torch.no_grad():
        run = torch.compile(model, backend="amp_fx", options=dict(DEFAULTS))
        assert error_of(run(x), wide(model, x)) < 4e-3


@amx
def test_what_a_transposed_convolution_gives_its_value_counts() -> None:
    # the gradient is a convolution of 8 channels by windows of 16
    model, x = nn.ConvTranspose2d(32, 8, 16), torch.randn(2, 32, 16, 16)
    [row] = rewrite(model, x).plan.matmuls
    assert row.dtype is torch.float32
    [row] = rewrite(nn.ConvTranspose2d(32, 32, 4, stride=2), x).plan.matmuls
    assert row.dtype is torch.bfloat16


@amx
@pytest.mark.parametrize(("window", "is_wrong"), [(33, True), (3, False)])
def test_int8_is_tried_as_well(window: int, is_wrong: bool) -> None:
    sizes, kernel = (2, 2048, 1, 67 + window), torch.Size((64, 2048, 1, window))
    form = Convolution(sizes, kernel, (1, 1), (0, 0), (1, 1), None, 1)
    assert computes_wrongly(form, torch.int8) is is_wrong


@amx
def test_an_exported_program_has_it_in_fp32_too() -> None:
    make, shape, _ = CASES["long windows of many channels"]
    model, x = make(), torch.randn(shape)
    assert error_of(amp_fx.export(model, (x,)).module()(x), wide(model, x)) < 1e-5


def test_without_amx_none_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: False)
    for make, shape, always in CASES.values():
        if always:
            [row] = rewrite(make(), torch.randn(shape)).plan.matmuls
            assert row.dtype is torch.bfloat16
