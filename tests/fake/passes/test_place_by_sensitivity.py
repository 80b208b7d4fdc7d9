"""Placement by measured sensitivity: fp32 in the limit, and within what hazards and rules pin."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from amp_fx import Policy
from amp_fx.passes import PassContext, PassSelection, PlaceBySensitivity, captured_passes, run_passes
from amp_fx.passes.forward.network import rounded
from amp_fx.precision.placement.cut import HIGH, LOW
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.plans.plan import Plan
from support.models.sensitive_graph import (
    ARGS,
    CONTEXT,
    FAST_LOW,
    node_of,
    priced,
    sensed,
    spread,
    uniform,
    variance,
)
from support.tracing.captured_graphs import PIPELINE, captured


def placed(
    *args: Tensor,
    program: Callable[..., Any] = variance,
    sensitivity: Mapping[str, float | None] | None = None,
    results: Mapping[str, float | None] | None = None,
    context: PassContext = CONTEXT,
    low: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    **goal: Any,
) -> Plan:
    """The plan where single calls, or their results, have another sensitivity than the rest, which has 1e-6."""
    rows = uniform(captured(program, *args, low=low, device=device))
    for name, value in (sensitivity or {}).items():
        rows[name] = sensed(name, value, rows[name].reads)
    for name in rows.keys() & (results or {}):
        rows[name].value = (results or {})[name]
    gm = captured(program, *args, low=low, device=device)
    return run_passes(gm, captured_passes(PassSelection(place=PlaceBySensitivity(rows, **goal))), context)


def test_a_budget_of_zero_gives_fp32_and_without_a_limit_what_is_cheapest_goes_low() -> None:
    plan = placed(*ARGS, budget=0.0)
    assert not plan.changed
    assert {row.dtype for row in plan.nodes} == {torch.float32}
    assert {row.dtype for row in placed(*ARGS, budget=math.inf).nodes} >= {torch.bfloat16}


def softmax_by_hand(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
    e = torch.matmul(x, w).exp()
    return torch.matmul(e / e.sum(-1, keepdim=True), w)


def by_rule(precision: str) -> PassContext:
    policy = Policy.parse({"rules": [{"op": "matmul", "precision": precision}]})
    return PassContext(policy, profile=FAST_LOW, training=True)


WIDE = ReasonKind.WIDE_RESULT
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
BEYOND = {"budget": 100.0, "low": FP16}
FELT = {"results": {"matmul": 1e-2, "conv1d": 1e-2}, "budget": 0.1}
RISEN = {"sensitivity": {"exp": 0.0, "sum_1": 0.0}, "budget": 100.0, "program": softmax_by_hand}
CUDA = {"device": "cuda"}
#: what was measured -> how it is placed; calls, the dtypes in which they run, and why
PLACED: dict[str, tuple[dict[str, Any], dict[str, tuple[torch.dtype, ReasonKind | None]]]] = {
    "a rounding that is felt": (
        {"sensitivity": {"matmul": 1e-2}, "budget": 0.1},
        {"matmul": (FP32, ReasonKind.ROUNDING_WOULD_ADD), "matmul_1": (BF16, ReasonKind.ROUNDING_ADDS)},
    ),
    "a call that overflows": ({"sensitivity": {"matmul_1": None}, **BEYOND}, {"matmul_1": (FP32, None)}),
    # which is rounded where nothing is fused
    "a fused call that overflows": ({"results": {"mul": None}, **BEYOND}, {"mul": (FP32, None)}),
    "a rule": ({"sensitivity": {"matmul": 1.0}, "context": by_rule("low")}, {"matmul": (BF16, None)}),
    "an fp32 rule": ({"sensitivity": {"matmul": 0.0}, "context": by_rule("fp32")}, {"matmul": (FP32, None)}),
    "a hazard": (RISEN, {"exp": (FP32, None), "sum_1": (FP32, None)}),
    # the result is the fp32 sum of low operands where a kernel returns it
    "a result that is felt": ({**FELT, **CUDA}, {"matmul": (BF16, WIDE)}),
    "a result that is felt, on a CPU": (FELT, {"matmul": (FP32, None)}),
    "that of a convolution": (
        {**FELT, **CUDA, "program": lambda x, w, _: F.conv1d(x.view(2, 16, 32), w.view(16, 16, 1)).exp()},
        {"conv1d": (FP32, None)},
    ),
    "a result that overflows": ({"results": {"matmul": None}, **BEYOND, **CUDA}, {"matmul": (FP16, WIDE)}),
    "a result not felt": ({"results": {"matmul": 0.0}, "budget": 1.0, **CUDA}, {"matmul": (BF16, None)}),
}


@pytest.mark.parametrize("name", PLACED)
def test_calls_are_where_their_roundings_are_not_felt_and_rules_and_hazards_hold(name: str) -> None:
    how, expected = PLACED[name]
    plan = placed(*ARGS, **how)
    for call, (dtype, kind) in expected.items():
        row = plan.node(call)
        assert (row.dtype, kind is None or row.is_because(kind)) == (dtype, True)
        assert (row.pinned is FP32) is row.is_because(WIDE) is (kind is WIDE)


def test_an_op_of_the_fp32_list_goes_low_where_that_is_harmless() -> None:
    def stream(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = x + F.linear(F.layer_norm(x, (64,), scale), w)
        return F.linear(x, w)

    args = torch.randn(256, 64), torch.randn(64), torch.randn(64, 64)
    rows = uniform(captured(stream, *args, device="cuda"), 0.0)
    for row in rows.values():
        if "linear" in row.name:
            row.value = 1e-6
    gm = captured(stream, *args, device="cuda")
    plan = run_passes(gm, captured_passes(PassSelection(place=PlaceBySensitivity(rows))), CONTEXT)
    low = {row.op for row in plan.nodes if row.dtype is torch.bfloat16}
    assert low >= {"layer_norm", "add.Tensor"}


def test_what_was_not_measured_is_as_autocast_has_it() -> None:
    plain, blind = (
        run_passes(captured(variance, *ARGS), pipeline, PassContext(training=True))
        for pipeline in (PIPELINE, captured_passes(PassSelection(place=PlaceBySensitivity({}))))
    )
    assert [row.dtype for row in blind.nodes] == [row.dtype for row in plain.nodes]


def test_a_graph_beyond_its_budget_at_any_weight_has_the_least_error() -> None:
    plan = placed(*ARGS, context=by_rule("low"), budget=0.0)
    others = [row for row in plan.nodes if row.op != "matmul" and row.dtype is not None]
    assert {row.dtype for row in others} == {torch.float32}


def test_a_rule_and_a_plan_by_sensitivity_say_a_result_in_fp32_alike() -> None:
    policy = Policy.parse({"rules": [{"op": "matmul", "precision": "low", "result": "fp32"}]})
    ruled = run_passes(captured(variance, *ARGS, device="cuda"), PIPELINE, PassContext(policy, training=True))
    ours = placed(*ARGS, results={"matmul": 1e-2}, budget=0.1, device="cuda").node("matmul")
    theirs = ruled.node("matmul")
    assert (ours.op_class, ours.dtype, ours.pinned) == (theirs.op_class, theirs.dtype, theirs.pinned)
    assert theirs.reasons[-1] in ours.reasons
    # a plan that is followed is priced as it was chosen
    graph = priced(spread("cuda")[0], spread()[1])
    sides = graph.sides_in({ours.name: ours})
    assert (sides[node_of(ours.name)], sides[rounded(node_of(ours.name))]) == (LOW, HIGH)
