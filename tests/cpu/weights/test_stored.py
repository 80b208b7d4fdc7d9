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
import levels
from amp_fx import store_low
from examples import hugging_face
from targets import needs_a_target, one_process

TOKENS = torch.arange(12).reshape(2, 6)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return hugging_face.gpt2(layers=1, width=32, heads=2, vocab=48, length=8).eval()


def call(model: nn.Module, mode: Callable[[], Any], **options: Any) -> Tensor:
    torch._dynamo.reset()
    with mode():
        return torch.compile(model, backend="amp_fx", options={"strict": True, **options})(
            TOKENS
        ).logits.clone()


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
    options = {"profile": "off", "dtype": dtype, "weights": weights}
    model = gpt()
    wide = copy.deepcopy(model)
    before = call(model, mode, **options)
    found = store_low(model, TOKENS, options=options)
    after = call(model, mode, **options)
    assert set(found.stored.values()) == {dtype}
    assert torch.equal(before, after)
    with torch.no_grad():
        assert not torch.equal(after, wide(TOKENS).logits)


@needs_a_target
@pytest.mark.xdist_group("targets")
def test_for_a_gpu_a_stored_model_has_the_plan_and_the_kernels_that_it_had() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)).eval(), torch.randn(64, 512)
    wide, options = copy.deepcopy(model), {"profile": "off", "strict": True, "weights": "cache"}
    store_low(model, x, options=options)
    with torch.no_grad(), one_process():
        before, after = (
            amp_fx.explain(each, x, options=options, target="cuda:h100") for each in (wide, model)
        )
    assert before.costs["amp_fx"] == after.costs["amp_fx"]
    rows = [[(row.op, row.dtype, row.reasons) for row in report.plan.nodes] for report in (before, after)]
    assert rows[0] == rows[1]


def stored_below(options: dict[str, Any], mode: Callable[[], Any]) -> tuple[Tensor, Tensor, list[str]]:
    """What three linears give before and after they are stored, and the names of what is stored below 16 bits."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3))).eval(), torch.randn(32, 64)

    def run() -> Tensor:
        torch._dynamo.reset()
        with mode():
            return torch.compile(model, backend="amp_fx", options=options)(x)

    before = run()
    found = store_low(model, x, options=options)
    return before, run(), [name for name, dtype in found.stored.items() if dtype != "bfloat16"]


@pytest.mark.usefixtures("op_by_op")
def test_a_model_in_int8_computes_what_it_did_with_packed_weights() -> None:
    options = {"profile": "off", "strict": True, "policy": "int8"}
    before, after, stored = stored_below(options, torch.inference_mode)
    assert stored == ["0.weight", "1.weight"]
    assert torch.equal(before, after)


@pytest.mark.usefixtures("op_by_op")
def test_weights_that_one_row_and_several_read_in_int8_are_stored_once() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 8)).eval()
    options = {"profile": "off", "strict": True, "policy": "int8"}
    rows = [torch.randn(1, 32), torch.randn(16, 32)]

    def run() -> list[Tensor]:
        torch._dynamo.reset()
        with torch.inference_mode():
            return [torch.compile(model, backend="amp_fx", options=options)(x) for x in rows]

    before = run()
    # a single row is multiplied by another kernel, from weights that are quantised alike
    found = store_low(model, [(x,) for x in rows], options=options)
    assert [name for name, dtype in found.stored.items() if dtype == "int8"] == ["0.weight", "2.weight"]
    assert all(torch.equal(was, now) for was, now in zip(before, run(), strict=True))


@pytest.mark.usefixtures("op_by_op")
def test_a_model_in_fp8_computes_what_it_did(tmp_path: Path) -> None:
    before, after, stored = stored_below(levels.options(tmp_path, weights="cache"), torch.no_grad)
    assert stored == ["0.weight", "1.weight"]
    assert torch.equal(before, after)
