"""Models whose weights are stored low compute what they did before, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx import store_low
from examples import hugging_face
from support.checks import below_16_bits
from support.models.small import Parts
from support.programs.target_process import needs_a_target

OPTIONS: dict[str, Any] = {"profile": "off", "strict": True}
INT8 = {**OPTIONS, "policy": "int8"}


def run(model: nn.Module, x: Tensor, mode: Callable[[], Any], options: dict[str, Any]) -> Tensor:
    torch._dynamo.reset()
    with mode():
        return torch.compile(model, backend="amp_fx", options=options)(x).clone()


@pytest.mark.quick_rows("cast")
@pytest.mark.parametrize(
    ("mode", "dtype", "weights"),
    [
        (torch.inference_mode, "bfloat16", "auto"),
        (torch.inference_mode, "float16", "cast"),
        (torch.no_grad, "bfloat16", "cast"),
    ],
    ids=["packed", "in fp16", "cast"],
)
@pytest.mark.usefixtures("op_by_op")
def test_a_stored_model_computes_what_it_did(mode: Callable[[], Any], dtype: str, weights: str) -> None:
    gpt = hugging_face.gpt2(layers=1, width=32, heads=2, vocab=48, length=8)
    model = Parts(lambda m, tokens: m.gpt(tokens).logits, gpt=gpt).eval()
    wide, tokens = copy.deepcopy(model), torch.arange(12).reshape(2, 6)
    options = {**OPTIONS, "dtype": dtype, "weights": weights}
    before = run(model, tokens, mode, options)
    found = store_low(model, tokens, options=options)
    after = run(model, tokens, mode, options)
    assert set(found.stored.values()) == {dtype}
    assert torch.equal(before, after)
    with torch.no_grad():
        assert not torch.equal(after, wide(tokens))


@pytest.mark.usefixtures("op_by_op")
@pytest.mark.parametrize("policy", ["int8", "fp8"])
def test_a_model_below_16_bits_computes_what_it_did(policy: str, tmp_path: Path) -> None:
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).eval(), torch.randn(32, 64)
    # packed in int8
    mode, options = torch.inference_mode, INT8
    if policy == "fp8":
        mode, options = torch.no_grad, below_16_bits.options(tmp_path, weights="cache")
    before = run(model, x, mode, options)
    found = store_low(model, x, options=options)
    below = [name for name, dtype in found.stored.items() if dtype != "bfloat16"]
    assert below == ["0.weight", "1.weight"]
    assert torch.equal(before, run(model, x, mode, options))


@pytest.mark.usefixtures("op_by_op")
def test_weights_that_one_row_and_several_read_in_int8_are_stored_once() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    rows = [torch.randn(1, 32), torch.randn(16, 32)]
    before = [run(model, x, torch.inference_mode, INT8) for x in rows]
    # a single row is multiplied by another kernel, from weights that are quantised alike
    found = store_low(model, [(x,) for x in rows], options=INT8)
    assert [name for name, dtype in found.stored.items() if dtype == "int8"] == ["0.weight", "2.weight"]
    assert all(map(torch.equal, before, [run(model, x, torch.inference_mode, INT8) for x in rows]))


@needs_a_target
@pytest.mark.xdist_group("targets")
def test_for_a_gpu_a_stored_model_has_the_plan_and_the_kernels_that_it_had() -> None:
    model, x = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval(), torch.randn(64, 512)
    wide, options = copy.deepcopy(model), {**OPTIONS, "weights": "cache"}
    store_low(model, x, options=options)
    with torch.no_grad():
        given = {"options": options, "target": "cuda:h100"}
        before, after = (amp_fx.explain(each, x, **given) for each in (wide, model))
    assert before.costs["amp_fx"] == after.costs["amp_fx"]
    rows = [[(row.op, row.dtype, row.reasons) for row in report.plan.nodes] for report in (before, after)]
    assert rows[0] == rows[1]
