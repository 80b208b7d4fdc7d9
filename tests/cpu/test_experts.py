"""Products of experts with generated code: in the dtype that Inductor has seen, and as its kernels lay rows out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import amp_fx
from support.models.small import Mixture
from support.tracing.captured_graphs import DEFAULTS

RULE = {"policy": {"rules": [{"op": "_grouped_mm", "precision": "fp32"}]}}


def one_by_one(model: Mixture, x: Tensor, ends: list[int]) -> Tensor:
    rows = model.first(x).tensor_split(ends[:-1])
    return torch.cat(
        [(r @ u.mT).sigmoid() @ d.mT for r, u, d in zip(rows, model.up, model.down, strict=True)]
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "dtype"), [({}, torch.bfloat16), (RULE, torch.float32)], ids=["low", "fp32"]
)
def test_a_mixture_is_trained_as_accurately_as_its_products_one_by_one(
    options: dict[str, Any], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, x, ends = Mixture(act=torch.sigmoid), torch.randn(24, 16), [5, 5, 16, 24]
    wide = copy.deepcopy(model).double()
    one_by_one(wide, x.double(), ends).square().mean().backward()
    theirs = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        one_by_one(theirs, x, ends).square().mean().backward()
    with amp_fx.record() as recording:
        compiled = torch.compile(model, backend="amp_fx", options={**DEFAULTS, **options}, fullgraph=True)
        compiled(x, torch.tensor(ends, dtype=torch.int32)).square().mean().backward()
    (plan,) = recording.plans
    assert [row.dtype for row in plan.nodes if row.op == "_grouped_mm"] == [dtype] * 2
    for exact, their, our in zip(wide.parameters(), theirs.parameters(), model.parameters(), strict=True):
        far, beside = ((each.grad - exact.grad).norm() for each in (our, their))  # type: ignore[operator]
        assert far <= (1.05 if dtype is torch.bfloat16 else 1.0) * beside
