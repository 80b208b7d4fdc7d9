"""Zeros around a value are padding of the packed convolution that reads them, where that is the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from amp_fx._torch import onednn_computes
from support.checks.below_16_bits import error_of
from support.models.small import Parts

#: name -> what is called, sizes of the input, whether zeros are written
CASES: dict[str, tuple[Any, tuple[int, ...], bool]] = {
    "alike on both sides": (lambda m, x: m.image(F.pad(x, (1, 1, 2, 2))), (2, 8, 9, 9), False),
    "beside its own": (lambda m, x: m.padded(F.pad(x, (1, 1, 1, 1))), (2, 8, 9, 9), False),
    "of the columns alone": (lambda m, x: m.image(F.pad(x, (2, 2))), (2, 8, 9, 9), False),
    "of a signal": (lambda m, x: m.signal(F.pad(x, (2, 2))), (2, 8, 30), False),
    "more behind, by channel": (lambda m, x: m.channels(F.pad(x, (0, 1, 0, 1))), (2, 8, 10, 10), False),
    "more before, dilated": (lambda m, x: m.apart(F.pad(x, (4, 2, 1, 1))), (2, 8, 9, 9), False),
    "more on one side than the dilation divides": (lambda m, x: m.apart(F.pad(x, (3, 2, 1, 1))), (2, 8, 9, 9), True),
    "more behind a signal": (lambda m, x: m.channel(F.pad(x, (1, 2))), (2, 8, 30), False),
    "more on one side, and too many channels": (lambda m, x: m.image(F.pad(x, (0, 1, 0, 1))), (2, 8, 9, 9), True),
    "around channels, too": (lambda m, x: m.image(F.pad(x, (0, 0, 0, 0, 2, 2))), (2, 4, 9, 9), True),
    "of another number": (lambda m, x: m.image(F.pad(x, (1, 1, 1, 1), value=1.0)), (2, 8, 9, 9), True),
    "reflected": (lambda m, x: m.image(F.pad(x, (1, 1, 1, 1), mode="reflect")), (2, 8, 9, 9), False),
    "cut off": (lambda m, x: m.image(F.pad(x, (-1, -1))), (2, 8, 9, 9), True),
    "read twice": (lambda m, x: m.image(y := F.pad(x, (1, 1, 1, 1))).sum() + y.sum(), (2, 8, 9, 9), True),
    "written to": (lambda m, x: (m.image(y := F.pad(x, (1, 1, 1, 1))), y.add_(1))[0] , (2, 8, 9, 9), True),
}  # fmt: skip


@pytest.mark.quick_rows("alike on both sides", "of a signal", "more behind, by channel", "read twice")
@pytest.mark.parametrize("name", CASES)
def test_zeros_are_padding_where_the_result_is_the_same(name: str) -> None:
    torch.manual_seed(0)
    call, shape, is_written = CASES[name]
    layers: dict[str, nn.Module] = {
        "image": nn.Conv2d(8, 16, 3), "padded": nn.Conv2d(8, 16, 3, padding=1), "signal": nn.Conv1d(8, 16, 3),
        "channels": nn.Conv2d(8, 8, 3, stride=2, groups=8), "channel": nn.Conv1d(8, 8, 4, stride=3, groups=8),
        "apart": nn.Conv2d(8, 8, 3, dilation=2, padding=(0, 1), groups=8),
    }  # fmt: skip
    model, x = Parts(call, **layers).eval(), torch.randn(shape)
    run = torch.compile(model, backend="amp_fx", options={"strict": True})
    with torch.inference_mode():
        got, [*code] = run_and_get_code(run, x)
        exact: Tensor = copy.deepcopy(model).double()(x.double())
        assert error_of(got, exact) < (6e-3 if onednn_computes(torch.bfloat16) else 1e-5)
        assert got.shape == exact.shape
    assert ("constant_pad_nd" in "".join(code)) is is_written
