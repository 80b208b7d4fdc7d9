"""``amp_fx.explain`` counts what runs outside of graphs, and names the remedy, which lowers it as autocast does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx import Report
from amp_fx.instruments.reports.outside import OutsideFlops
from support.models.graph_breaks import LEFT, Between
from support.models.small import Parts
from support.tracing.captured_graphs import without_inductor

OFF: dict[str, Any] = {"profile": "off", "strict": True}
X = torch.randn(2, 4, 8)


def explained(model: nn.Module, *args: Tensor, **options: Any) -> Report:
    return amp_fx.explain(model, *args, options={**OFF, **options})


def flops_in_graphs(report: Report) -> int:
    return sum(row.flops for plan in report.plans for row in plan.nodes)


@pytest.mark.quick_rows("disabled", "recurrent")
@pytest.mark.parametrize("part", ["disabled", "recurrent", "gated", "loop", "rows"])
def test_matmuls_that_run_eagerly_are_counted_and_are_part_of_the_shares(part: str) -> None:
    report = explained(Between(part), X)
    assert report.outside == {"float32": LEFT[part]}
    inside = flops_in_graphs(report)
    assert report.shares()["bfloat16"]["flops"] == pytest.approx(inside / (inside + LEFT[part]))
    share = f"{LEFT[part] / (inside + LEFT[part]):.1%} of the FLOPs in float32"
    assert f"outside of graphs, in eager code: {share}; amp_fx.compile(model, outside='autocast')" in str(
        report
    )
    (row,) = (row for row in report.advice if row.kind == "outside")
    assert "inside torch.autocast('cpu', torch.bfloat16)" in row.remedy
    assert Report.from_dict(report.to_dict()) == report


@pytest.mark.parametrize("part", ["printed", "branch"])
def test_behind_an_ordinary_break_nothing_is_outside_of_graphs(part: str) -> None:
    report = explained(Between(part), X)
    assert report.outside == {}
    assert report.shares()["bfloat16"]["flops"] == 1.0
    assert "outside of graphs" not in str(report)


def test_inside_autocast_and_where_low_matmuls_are_slower_no_remedy_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report = explained(Between("disabled"), X)
    assert report.outside == {"bfloat16": LEFT["disabled"]}
    assert report.shares()["bfloat16"]["flops"] == 1.0
    assert [row for row in report.notes if row.kind == "outside"] == []
    monkeypatch.setattr("amp_fx.compiler.settings.Options.is_slower_low", lambda *_: True)
    assert [row for row in explained(Between("disabled"), X).notes if row.kind == "outside"] == []


@pytest.mark.parametrize("grad", [True, False])
def test_attention_convolutions_and_products_of_batches_are_counted_as_in_graphs(grad: bool) -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        h = m.convolution(x.mT).mT.reshape(2, 4, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(h, h, h) @ h.mT

    model, x = Parts(run, convolution=nn.Conv1d(8, 8, 1)), X.clone()
    apart = Parts(torch.compiler.disable(run), convolution=model.convolution)
    with torch.set_grad_enabled(grad):
        whole, left = explained(model, x), explained(apart, x)
    assert whole.outside == {}
    assert left.outside == {"float32": flops_in_graphs(whole)}


def test_operators_with_bodies_run_while_it_counts() -> None:
    a = torch.randn(4, 4)
    with OutsideFlops():
        result = torch.cond(torch.tensor(True), lambda v: v @ v, lambda v: v + 1, (a,))
    torch.testing.assert_close(result, a @ a)


def mixture() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The experts of transformers' Mixtral, one by one, between two linears; which are asked is given."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=64, num_local_experts=4, num_experts_per_tok=2
    )
    config._experts_implementation = "eager"
    experts = MixtralExperts(config)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = Parts(
        lambda m, x, asked, weights: m.last(m.experts(m.first(x), asked, weights)),
        first=nn.Linear(32, 32),
        experts=experts,
        last=nn.Linear(32, 32),
    )
    asked = torch.stack([torch.randperm(4)[:2] for _ in range(48)])
    return model, (torch.randn(48, 32), asked, torch.rand(48, 2))


def gradients(model: nn.Module, call: Any, args: tuple[Tensor, ...]) -> dict[str, Tensor]:
    result = call(*args)
    (result if result.dtype is torch.float64 else result.float()).square().mean().backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def test_eager_experts_are_lowered_as_by_autocast_where_that_is_asked_for_and_else_stay_in_fp32() -> None:
    model, args = mixture()
    wide, theirs = copy.deepcopy(model).double(), copy.deepcopy(model)
    exact = gradients(wide, wide, tuple(v.double() if v.is_floating_point() else v for v in args))
    autocast = gradients(theirs, torch.autocast("cpu", torch.bfloat16)(theirs.forward), args)
    errors: dict[Any, dict[str, Tensor]] = {}
    for outside in ("autocast", None):
        torch._dynamo.reset()
        ours: Any = copy.deepcopy(model)
        seen: list[torch.dtype] = []
        ours.experts.act_fn = nn.SiLU()
        ours.experts.act_fn.register_forward_hook(lambda *call, seen=seen: seen.append(call[-1].dtype))
        with without_inductor():
            found = gradients(ours, amp_fx.compile(ours, profile="off", outside=outside), args)
        assert set(seen) == {torch.bfloat16 if outside else torch.float32}
        errors[outside] = {
            name: (found[name] - each).norm() / (autocast[name] - each).norm() for name, each in exact.items()
        }
    assert errors["autocast"].keys() == dict(model.named_parameters()).keys()
    assert max(errors["autocast"].values()) <= 1.05
    # in fp32, the experts add no error
    assert errors[None]["experts.down_proj"] < 0.9


@pytest.mark.slow
def test_the_report_of_eager_experts_has_their_share() -> None:
    model, args = mixture()
    in_linears = 2 * 3 * 2 * 48 * 32 * 32 - 2 * 48 * 32 * 32
    # each of the two that a row asks; their input needs a gradient
    in_experts = 3 * 2 * (48 * 2) * (32 * 128 + 64 * 32)
    report = explained(model, *args)
    assert (flops_in_graphs(report), report.outside) == (in_linears, {"float32": in_experts})
    with torch.autocast("cpu", torch.bfloat16):
        report = explained(model, *args)
    assert report.shares()["bfloat16"]["flops"] == 1.0
