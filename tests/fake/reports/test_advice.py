"""Advice comes from the data, and a remedy that is pasted back does what it says."""

from __future__ import annotations

import ast
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_fx import Plan
from amp_fx.compiler.settings import Options
from amp_fx.instruments.reports.advice import Advice, advise, layout_advice, scaling_advice, weight_advice
from support.models.small import Parts
from support.tracing.captured_graphs import Rewritten, rewrite


def block(inner: int = 32) -> nn.Module:
    up, down = nn.Linear(16, inner), nn.Linear(inner, 16)
    return Parts(lambda m, x: x + m.down(F.gelu(m.up(x))), up=up, down=down)


def stack(inner: int = 32) -> nn.Module:
    return nn.Sequential(*(block(inner) for _ in range(3)))


X, FP16 = torch.randn(4, 16), {"dtype": "float16"}


def kinds(plan: Plan) -> dict[str, list[Advice]]:
    found: dict[str, list[Advice]] = {}
    for row in advise([plan]):
        found.setdefault(row.kind, []).append(row)
    return found


def pasted(text: str) -> dict[str, Any]:
    """The options behind ``options=`` in a line that a report prints."""
    options = ast.literal_eval(text.partition("options=")[2])
    Options.parse(None, options)
    return options


def dtypes(found: Rewritten, op: str, module: str) -> set[torch.dtype | None]:
    return {row.dtype for row in found.plan.nodes if row.op == op and row.module_path.endswith(module)}


def test_dimensions_that_are_no_multiple_of_8_are_named_once() -> None:
    rows = kinds(rewrite(stack(30), X).plan)["dimensions"]
    for row, name in zip(rows, ("up", "down"), strict=True):
        assert all(each in row.text for each in (f"*.{name} linear x3", "30", "8"))
    assert not {"dimensions", "torch.func"} & kinds(rewrite(stack(), torch.randn(5, 16)).plan).keys()
    # of convolutions, channels count
    (row,) = kinds(rewrite(nn.Sequential(nn.Conv1d(8, 12, 3)), torch.randn(2, 8, 9)).plan)["dimensions"]
    assert all(each in row.text for each in ("12", "16"))


@torch.library.custom_op("amp_fx_tests::multiplied", mutates_args=())
def multiplied(x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight


multiplied.register_fake(lambda x, weight: x @ weight)


def test_ops_of_other_libraries_are_named_since_flops_leave_them_out() -> None:
    model = Parts(lambda m, x: multiplied(m.up(x), m.up.weight), up=nn.Linear(16, 16))
    (row,) = kinds(rewrite(model, X).plan)["uncounted"]
    assert row.text.endswith("1 x amp_fx_tests::multiplied in float32")
    rule = {"policy": {"rules": [{"op": "amp_fx_tests::multiplied", "precision": "low"}]}}
    (row,) = kinds(rewrite(model, X, options=rule).plan)["uncounted"]
    assert row.text.endswith("in bfloat16")
    assert "uncounted" not in kinds(rewrite(block(), X).plan)


def test_an_fp32_island_goes_low_with_its_remedy() -> None:
    model, x = nn.Sequential(nn.Linear(16, 512), nn.Softmax(-1), nn.Linear(512, 16)), torch.randn(512, 16)
    before = rewrite(model, x, device="cuda")
    (row,) = kinds(before.plan)["island"]
    # one cast before it and one behind it, of 512 x 512 x 6 bytes each
    assert all(each in row.text for each in ("softmax.int x1", "3.1 MB"))
    after = rewrite(model, x, device="cuda", options=pasted(str(row)))
    assert dtypes(after, "softmax.int", "") == {torch.bfloat16}
    assert len(after.plan.casts) < len(before.plan.casts)
    assert "island" not in kinds(after.plan)


def test_layers_too_small_to_gain_go_low_with_their_remedy() -> None:
    model, auto = stack(), {"profile": "auto"}
    before = rewrite(model, X, options=auto)
    assert dtypes(before, "linear", "") == {torch.float32}
    (row,) = kinds(before.plan)["small"]
    assert all(each in row.text for each in ("6 matmuls", "0.up"))
    after = rewrite(model, X, options={**auto, **pasted(str(row))})
    assert dtypes(after, "linear", "") == {torch.bfloat16}


@pytest.mark.parametrize(("value", "shown"), [(7e4, "7e+04"), (math.inf, "inf"), (math.nan, "nan")])
def test_a_weight_beyond_fp16_stays_fp32_with_its_remedy(value: float, shown: str) -> None:
    model = block()
    weights = dict(model.named_parameters())
    weights["up.weight"].data[0, 0] = value
    (row,) = weight_advice([rewrite(model, X, options=FP16).plan], weights)
    assert all(each in row.text for each in ("up.weight", shown, "65504"))
    after = rewrite(model, X, options={**FP16, **pasted(str(row))})
    assert dtypes(after, "linear", "up") == {torch.float32}
    assert dtypes(after, "linear", "down") == {torch.float16}
    assert weight_advice([rewrite(model, X).plan], weights) == []


def test_weights_that_become_zero_are_counted() -> None:
    model = block()
    weight = model.get_parameter("up.weight")
    weight.data.fill_(1.0)[0] = 2.0**-25
    plan = rewrite(model, X, options=FP16).plan
    others = {"empty": torch.ones(0), "ids": torch.ones(3).long()}
    (row,) = weight_advice([plan], {"up.weight": weight, **others})
    assert f"{float((weight.half() == 0).float().mean()):.1%} of up.weight" in row.text


def test_convolutions_that_are_trained_want_weights_that_are_channels_last() -> None:
    net, x = nn.Sequential(nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1)), torch.randn(2, 8, 8, 8)
    plan, weights = rewrite(net, x).plan, dict(net.named_parameters())
    assert not layout_advice([plan], weights)
    plan.training = True
    # a kernel of one element has no layout
    assert "(1, 0.0 MB)" in str(layout_advice([plan], weights)[0])
    laid_out = {name: w.to(memory_format=torch.channels_last) for name, w in weights.items() if w.ndim == 4}
    assert not layout_advice([plan], laid_out)


def test_training_in_fp16_wants_a_scaler() -> None:
    plan = rewrite(stack(), X, options=FP16).plan
    assert scaling_advice([plan]) == []
    plan.training = True
    (row,) = scaling_advice([plan])
    assert pasted(str(row)) == {**FP16, "scaler": "default"}
    assert scaling_advice([rewrite(stack(), X).plan]) == []


@pytest.mark.slow
def test_fallbacks_graph_breaks_and_what_vmap_leaves_are_told() -> None:
    rows = advise([Plan("0/0", fallback="no trace"), Plan("1/0", graph_break="print [a.py:1]")])
    assert [(row.kind, row.options) for row in rows] == [("fallback", {}), ("graph break", {})]
    assert "no trace" in rows[0].text
    assert "print [a.py:1]" in rows[1].text

    def pinn(m: Any, x: Tensor) -> Tensor:
        return torch.func.vmap(torch.func.grad(lambda p: m.net(p).squeeze(-1)))(m.encoder(x)).mean()

    model = Parts(pinn, encoder=nn.Linear(16, 16), net=nn.Linear(16, 1))
    assert "torch.func" not in kinds(rewrite(model, X).plan)
    ruled = {"policy": {"rules": [{"module": "net", "precision": "fp32"}]}}
    (row,) = kinds(rewrite(model, X, options=ruled).plan)["torch.func"]
    assert all(each in row.text for each in ("1 of 2", "net", "vmap"))


def test_encoder_layers_that_run_as_one_op_are_told_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.TransformerEncoderLayer(16, 2, batch_first=True).eval(), torch.randn(2, 4, 16)
    with torch.no_grad():
        (row,) = kinds(rewrite(model, x).plan)["fused layer"]
        assert row.text.startswith("1 nn.TransformerEncoderLayer")
        # as the remedy says, but for this test alone
        monkeypatch.setattr(torch.backends.mha, "_is_fastpath_enabled", False)
        torch._dynamo.reset()
        found = rewrite(model, x, options={"weights": "cast"})
    assert "fused layer" not in kinds(found.plan)
    assert torch.bfloat16 in dtypes(found, "linear", "linear1")
