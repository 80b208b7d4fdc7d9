"""Exports that follow a plan, of ``explain`` or of what was measured, and plans of exports that are followed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from small_models import Beyond


class Attention(nn.Module):
    """Dynamo's graph of it has ``contiguous`` where a program has none."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.out = nn.MultiheadAttention(64, 4, batch_first=True), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.attend(x, x, x, need_weights=False)[0])


def _error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def _dtypes(plan: amp_fx.Plan) -> list[tuple[str, torch.dtype | None]]:
    return [(row.op, row.dtype) for row in plan.nodes if row.op != "contiguous"]


@torch.no_grad()
def test_a_plan_of_the_compiled_model_is_followed_by_its_export() -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 16, 64)
    plan = amp_fx.explain(model, x, options={"profile": "off"}).plan
    program = amp_fx.export(model, (x,), plan=plan)
    followed = amp_fx.Plan.from_json(amp_fx.extra_files(program)["amp_fx.json"])
    assert _dtypes(followed) == _dtypes(plan)
    assert dict(_dtypes(followed))["scaled_dot_product_attention"] is torch.bfloat16
    back = amp_fx.explain(model, x, options={"profile": "off", "plan": (followed,)}).plan
    assert [(row.op, row.dtype) for row in back.nodes] == [(row.op, row.dtype) for row in plan.nodes]
    exact = model.double()(x.double())
    assert _error(program.module()(x), exact) < 4 * torch.finfo(torch.bfloat16).eps


@pytest.mark.usefixtures("op_by_op")
def test_an_export_by_measurement_keeps_in_fp32_what_leaves_the_range_of_fp16() -> None:
    torch.manual_seed(0)
    model = Beyond().eval()
    batches = [(torch.randn(16, 64),) for _ in range(3)]
    plan = amp_fx.calibrate(model, batches, of="outputs", dtype="float16", profile="off").plan(budget=1)
    x = torch.randn(16, 64)
    with torch.no_grad():
        program = amp_fx.export(model, (x,), plan=plan, dtype="float16")
        found, exact = program.module()(x), model.double()(x.double())
    rows = dict(_dtypes(plan.plans[0]))
    assert rows["linear"] is torch.float16
    assert rows["square"] is rows["mean.dim"] is torch.float32
    assert _error(found, exact) < 2 * torch.finfo(torch.float16).eps
