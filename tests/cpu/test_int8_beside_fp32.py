"""int8 on a CPU that multiplies no faster in 16 bits: everything beside its products is in fp32."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

import amp_fx
from amp_fx.passes import PassContext
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.viz.words import summary
from support.checks.below_16_bits import INT8_CPU
from support.models.calibrated import calibrated, convnet, images, wrong
from support.tracing.captured_graphs import op_by_op

#: flags of a CPU with VNNI and without instructions for bf16
FLAGS = {"avx2": True, "avx512_bw": True, "avx512_vnni": True}


@pytest.fixture(autouse=True)
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: FLAGS)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Linear(512, 1024), nn.GELU(), nn.Linear(1024, 512), nn.LayerNorm(512), nn.Linear(512, 16)
    return nn.Sequential(*layers).eval()


def compiled(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    torch._dynamo.reset()
    return torch.compile(model, backend="amp_fx", options={"policy": "int8", "strict": True, **options})


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ({}, ["int8_packed", "int8_packed", None]),
        ({"dtype": "float16"}, ["int8_packed", "int8_packed", None]),
        ({"weights": "cast"}, ["int8_signed", "int8_signed", None]),
        ({"policy": {"base": "int8", "rules": [{"module": "4", "precision": "int8"}]}}, ["int8_packed"] * 3),
        ({"policy": {"base": "int8", "rules": [{"module": "0", "precision": "fp32"}]}}, [None, "int8_packed", None]),
    ],
    ids=str,
)  # fmt: skip
def test_products_in_int8_read_and_return_fp32(options: dict[str, Any], ways: list[str | None]) -> None:
    model, x = network(), torch.randn(64, 512)
    with op_by_op(), torch.inference_mode(), amp_fx.record() as recording:
        error = wrong(compiled(model, **options)(x), model, x)
    # below this nothing was rounded to bytes, and above not to those alone
    assert 5e-3 < error < 0.025
    [plan] = recording.plans
    assert not plan.casts
    rows = [row for row in plan.nodes if row.flops]
    assert {row.dtype for row in rows} == {torch.float32}
    found = [[r.values["level"] for r in row.reasons if r.kind is ReasonKind.LEVEL] for row in rows]
    assert [each[0] if each else None for each in found] == ways
    assert [row.levels_below != {} for row in rows] == [way is not None for way in ways]
    assert summary(plan).startswith(f"{sum(way is not None for way in ways)} of 3 matmuls in int8")


def test_other_policies_and_cpus_without_a_rate_stay_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = network(), torch.randn(64, 512)
    for policy, flags in (("autocast", FLAGS), ("int8", {"avx2": True})):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda flags=flags: flags)
        with op_by_op(), torch.inference_mode():
            assert wrong(compiled(model, policy=policy)(x), model, x) < 1e-5


def test_advice_about_matmuls_in_fp32_leaves_out_those_in_int8() -> None:
    with torch.no_grad():
        report = amp_fx.explain(
            network(), torch.randn(64, 512), options={"policy": "int8", "weights": "cache"}
        )
    [text] = [advice.text for advice in report.advice if advice.kind == "small"]
    assert text.startswith("1 matmul")


def test_stored_weights_give_the_same_bits() -> None:
    model, x = network(), torch.randn(64, 512)
    with op_by_op(), torch.inference_mode():
        before = compiled(model)(x)
    stored = amp_fx.store_low(model, x, options={"policy": "int8"})
    assert stored.stored == {"0.weight": "int8", "2.weight": "int8"}
    with op_by_op(), torch.inference_mode():
        assert torch.equal(compiled(model)(x), before)


def test_a_plan_has_what_the_budget_allows_in_int8_and_predicts_its_error() -> None:
    model, x = network(), torch.randn(64, 512)
    cal = amp_fx.calibrate(model, [torch.randn(64, 512) for _ in range(2)], of="outputs", policy="int8")
    known = {point.name: point for point in cal.frontier()}
    # neither bf16 nor fp32 is as fast by the profile
    times = [known[name].time or 0 for name in ("int8", "fp32", "autocast")]
    assert times == sorted(times)
    for limit, count in ((1e-3, 0), (0.1, 2)):
        plan = cal.plan(error=limit, verify=False)
        assert [bool(row.levels_below) for row in plan.plans[0].nodes if row.flops].count(True) == count
        with op_by_op(), torch.inference_mode():
            error = wrong(compiled(model, plan=plan)(x), model, x)
        assert error < 1.3 * plan.point.error + 1e-5
        assert error > 0.7 * plan.point.error


@pytest.mark.parametrize("bits", [7, pytest.param(8, marks=pytest.mark.int8)])
def test_a_network_by_measured_scales_is_calls_of_onednn_that_read_and_write_bytes(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, path = convnet(), images(), str(tmp_path / "profile.json")
    # of 7 bits sums are exact without VNNI, too
    monkeypatch.setattr(
        "amp_fx.compiler.rewriting.PassContext", functools.partial(PassContext, weight_bits=bits)
    )
    monkeypatch.setattr("amp_fx.compiler.compiling.multiplies_int8", lambda: True)
    INT8_CPU.save(path)
    plan = calibrated(model, [images() for _ in range(4)], profile=INT8_CPU).plan(budget=1000, verify=False)
    with torch.inference_mode():
        run = compiled(model, plan=plan, profile=path, cpp_wrapper=False)
        got, [code] = run_and_get_code(run, x)
    assert wrong(got, model, x) < (2.2 if bits == 7 else 1.3) * plan.point.error
    # what the next product alone reads is written in bytes, with the activation
    returned = re.findall(r"onednn\.(?:qconv|qlinear)\w*\.\w+\(.*?torch\.(\w+)", code)
    assert returned == ["uint8", "uint8", "float32", "uint8", "float32"]
    assert "bfloat16" not in code
