"""Placement by measured sensitivity: exact, monotone, fp32 in the limit, and within what hazards and rules pin."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from amp_fx import Policy
from amp_fx.passes import (
    PIPELINE,
    Classify,
    Constrain,
    Given,
    PassContext,
    PinDtypes,
    PlaceBySensitivity,
    captured_passes,
    run_passes,
)
from amp_fx.passes.base import run_in_order
from amp_fx.passes.forward.network import rounded
from amp_fx.passes.forward.place_by_sensitivity import PricedGraph, price
from amp_fx.placement.cut import HIGH, LOW, Problem, Var
from amp_fx.placement.profile import DeviceProfile
from amp_fx.placement.tradeoff import within
from amp_fx.plans.label import Kind, label_of
from amp_fx.plans.plan import Plan
from amp_fx.plans.sensitivity import INSIDE, CallSensitivity, ReadSensitivity, slots
from amp_fx.policy import OpClass
from graphs import captured

#: rates at which the matmuls below gain in low precision
FAST_LOW = DeviceProfile("test", "cpu", {"float32": 1e10, "bfloat16": 1e12, "float16": 1e12}, 1e11, 1e-9)
CONTEXT = PassContext(profile=FAST_LOW, training=True)


def variance(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """A matmul, a difference of squares, a matmul."""
    h = torch.matmul(x, w)
    spread = (h * h).mean(-1, keepdim=True) - h.mean(-1, keepdim=True).square()
    return torch.matmul(h * spread.rsqrt(), v)


ARGS = torch.randn(64, 16), torch.randn(16, 16), torch.randn(16, 16)


def uniform(
    gm: fx.GraphModule, value: float | None = 1e-6, gradient: float | None = 1e-6
) -> dict[str, CallSensitivity]:
    """The same sensitivity everywhere."""
    run_in_order(gm, (PinDtypes(), Classify()), CONTEXT)
    return {
        plan.name: CallSensitivity(
            plan.name, value, gradient, {slot: ReadSensitivity(value, gradient) for slot, _, _ in slots(node)}
        )
        for node in gm.graph.nodes
        if (plan := label_of(node)) is not None and plan.op_class is not OpClass.KEEP
    }


def priced(
    gm: fx.GraphModule, rows: Mapping[str, CallSensitivity], context: PassContext = CONTEXT
) -> PricedGraph:
    run_in_order(gm, (PinDtypes(), Classify(), Constrain()), context)
    found = price(gm, context, rows)
    assert found is not None
    return found


def placed(
    program: Callable[..., Any],
    *args: Any,
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
        rows[name] = CallSensitivity(
            name, value, value, dict.fromkeys(rows[name].reads, ReadSensitivity(value, value))
        )
    for name, value in (results or {}).items():
        rows[name].value = value
    gm = captured(program, *args, low=low, device=device)
    return run_passes(gm, captured_passes(Given(place=PlaceBySensitivity(rows, **goal))), context)


@functools.cache
def spread(device: str = "cpu") -> tuple[fx.GraphModule, dict[str, CallSensitivity]]:
    """The graph of :func:`variance`, and the same sensitivity everywhere."""
    gm = captured(variance, *ARGS, device=device)
    return gm, uniform(gm)


sensitivities = st.sampled_from([0.0, 1e-8, 1e-6, 3e-5, 1e-3, None])


@st.composite
def measured(draw: st.DrawFn) -> dict[str, CallSensitivity]:
    """Random sensitivities of the graph's calls; some calls were not measured."""
    return {
        name: CallSensitivity(
            name,
            draw(sensitivities),
            draw(sensitivities),
            {slot: ReadSensitivity(draw(sensitivities), draw(sensitivities)) for slot in row.reads},
        )
        for name, row in spread()[1].items()
        if draw(st.integers(0, 9))
    }


def every(problem: Problem) -> Iterator[dict[Var, bool]]:
    """All labellings that the pins allow."""
    free = sorted(problem.variables() - problem.pins.keys(), key=str)
    assert len(free) <= 14
    for choice in itertools.product([True, False], repeat=len(free)):
        yield {**problem.pins, **dict(zip(free, choice, strict=True))}


@settings(max_examples=60, deadline=None)
@given(measured(), st.sampled_from([0.0, 1e6, 1e9, 1e12, math.inf]))
def test_the_cut_with_sensitivity_is_the_brute_force_optimum(
    rows: dict[str, CallSensitivity], weight: float
) -> None:
    problem = priced(spread()[0], rows).priced.problem(weight)
    found = priced(spread()[0], rows).priced.choose(weight).placement
    costs = (problem.cost(labels) for labels in every(problem) if problem.allows(labels))
    assert problem.allows(found)
    assert problem.cost(found) == min(costs)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@settings(max_examples=20, deadline=None)
@given(rows=measured(), budget=st.floats(0.0, 1.5))
def test_no_placement_within_a_budget_is_cheaper_in_bytes_than_the_one_found(
    rows: dict[str, CallSensitivity], budget: float, device: str
) -> None:
    graph = priced(spread(device)[0], rows)
    aim, limit = graph.by_bytes, budget**2 * graph.autocast_sensitivity * (1 + 1e-9)
    found = within([aim], limit, [graph.autocast])
    assert found.sensitivity <= limit * (1 + 1e-9)
    allowed = filter(aim.base.allows, every(aim.base))
    assert found.time == min(aim.time(labels) for labels in allowed if aim.sensitivity(labels) <= limit)


@settings(max_examples=40, deadline=None)
@given(measured())
def test_error_falls_and_time_grows_with_the_weight(rows: dict[str, CallSensitivity]) -> None:
    graph = priced(spread()[0], rows)
    corners = [graph.priced.choose(weight) for weight in (0.0, 1e3, 1e6, 1e8, 1e10, 1e13, 1e16, math.inf)]
    for before, after in itertools.pairwise(corners):
        assert after.sensitivity <= before.sensitivity * (1 + 1e-9)
        assert after.time >= before.time


def test_the_sensitivity_of_a_placement_is_the_sum_of_the_roundings_that_happen() -> None:
    graph = priced(*spread())
    nothing = graph.priced.choose(math.inf)
    assert nothing.sensitivity == 0
    # both matmuls: a result, two operands, their gradients and the gradient of the result that arrives in fp32;
    # all arithmetic between them is one kernel, whose result the second matmul reads
    assert graph.autocast_sensitivity == pytest.approx(12e-6)


def test_a_budget_of_zero_gives_fp32_and_without_a_limit_what_is_cheapest_goes_low() -> None:
    plan = placed(variance, *ARGS, budget=0.0)
    assert not plan.changed
    assert {row.dtype for row in plan.nodes} == {torch.float32}
    assert {row.dtype for row in placed(variance, *ARGS, budget=math.inf).nodes} >= {torch.bfloat16}


def test_a_matmul_whose_rounding_is_felt_stays_in_fp32_and_says_what_it_would_cost() -> None:
    plan = placed(variance, *ARGS, sensitivity={"matmul": 1e-2}, budget=0.1)
    assert plan.node("matmul").dtype is torch.float32
    assert plan.node("matmul_1").dtype is torch.bfloat16
    assert plan.node("matmul").is_because(Kind.ROUNDING_WOULD_ADD)
    assert plan.node("matmul_1").is_because(Kind.ROUNDING_ADDS)


def test_an_op_of_the_fp32_list_goes_low_where_that_is_harmless() -> None:
    def stream(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = x + F.linear(F.layer_norm(x, (64,), scale), w)
        return F.linear(x, w)

    args = torch.randn(256, 64), torch.randn(64), torch.randn(64, 64)
    rows = uniform(captured(stream, *args, device="cuda"), 0.0, 0.0)
    for row in rows.values():
        if "linear" in row.name:
            row.value = 1e-6
    gm = captured(stream, *args, device="cuda")
    plan = run_passes(gm, captured_passes(Given(place=PlaceBySensitivity(rows))), CONTEXT)
    norms = [row for row in plan.nodes if row.op == "layer_norm"]
    assert any(row.dtype is torch.bfloat16 for row in norms)
    assert any(row.dtype is torch.bfloat16 for row in plan.nodes if row.op == "add.Tensor")


def test_a_call_that_overflows_is_never_low() -> None:
    plan = placed(variance, *ARGS, sensitivity={"matmul_1": None}, budget=100.0, low=torch.float16)
    assert plan.node("matmul_1").dtype is torch.float32
    # nor a fused one, which is rounded where nothing is fused
    plan = placed(variance, *ARGS, results={"mul": None}, budget=100.0, low=torch.float16)
    assert plan.node("mul").dtype is torch.float32


def test_a_users_rule_holds_whatever_was_measured() -> None:
    for precision, dtype in (("low", torch.bfloat16), ("fp32", torch.float32)):
        policy = Policy.parse({"rules": [{"op": "matmul", "precision": precision}]})
        context = PassContext(policy, profile=FAST_LOW, training=True)
        sensitivity = {"matmul": 1.0 if precision == "low" else 0.0}
        assert placed(variance, *ARGS, sensitivity=sensitivity, context=context).node("matmul").dtype is dtype


def test_a_hazard_holds_whatever_was_measured() -> None:
    def softmax_by_hand(x: Tensor, w: Tensor) -> Tensor:
        e = torch.matmul(x, w).exp()
        return torch.matmul(e / e.sum(-1, keepdim=True), w)

    args = torch.randn(64, 16), torch.randn(16, 16)
    plan = placed(softmax_by_hand, *args, sensitivity={"exp": 0.0, "sum_1": 0.0}, budget=100.0)
    assert plan.node("exp").dtype is plan.node("sum_1").dtype is torch.float32


def test_what_was_not_measured_is_as_autocast_has_it() -> None:
    plain = run_passes(captured(variance, *ARGS), PIPELINE, PassContext(training=True))
    blind = run_passes(
        captured(variance, *ARGS),
        captured_passes(Given(place=PlaceBySensitivity({}))),
        PassContext(training=True),
    )
    assert [row.dtype for row in blind.nodes] == [row.dtype for row in plain.nodes]


def test_of_arithmetic_inside_one_kernel_only_what_is_written_is_charged() -> None:
    def between(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(torch.matmul(x, w).exp().sin().mul(2.0), w)

    assert {call for call, _, _ in charged(captured(between, *SQUARE))} == {"matmul", "mul", "matmul_1"}


def test_a_gradient_that_arrives_rounded_is_not_charged_again() -> None:
    terms = charged(captured(lambda x, w: torch.matmul(torch.matmul(x, w).view(64, 16), w), *SQUARE))
    # of its operands; that of the result is what the second matmul hands back
    assert {slot for call, slot, backward in terms if call == "matmul" and backward} == {"self", "other"}


def test_a_graph_beyond_its_budget_at_any_weight_has_the_least_error() -> None:
    policy = Policy.parse({"rules": [{"op": "matmul", "precision": "low"}]})
    context = PassContext(policy, profile=FAST_LOW, training=True)
    plan = placed(variance, *ARGS, context=context, budget=0.0)
    others = [row for row in plan.nodes if row.op != "matmul" and row.dtype is not None]
    assert {row.dtype for row in others} == {torch.float32}


def charged(
    gm: fx.GraphModule, rows: Mapping[str, CallSensitivity] | None = None
) -> set[tuple[str, str, bool]]:
    """(call, slot, whether a gradient) of every rounding that happens where all that may be low is low."""
    graph = priced(gm, uniform(gm) if rows is None else rows)
    labels = dict.fromkeys(graph.priced.problem(0.0).variables(), LOW)
    return {(term.call, term.slot, term.backward) for term in graph.priced.blame(labels)}


SQUARE = torch.randn(64, 16), torch.randn(16, 16)


def stream(x: Tensor, w: Tensor) -> Tensor:
    first = torch.matmul(x, w).sin()
    # the gradient of the sum is there before that of its first summand, which the matmul reads, too
    return (first + torch.matmul(first, w)).exp().sum()


def dropped(p: float) -> Callable[..., Tensor]:
    def program(x: Tensor, w: Tensor) -> Tensor:
        first = torch.matmul(x, w).sin()
        return (first + F.dropout(torch.matmul(first, w), p)).exp().sum()

    return program


def joined(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(x, w) + torch.matmul(w, x.mT).mT


#: what happens -> program, roundings that are charged, others that are not: (call, slot, whether a gradient)
CHARGED: dict[str, tuple[Callable[..., Tensor], set[tuple[str, str, bool]], set[tuple[str, str, bool]]]] = {
    "the gradient of a residual add waits in memory, others are complete within a kernel or come from it": (
        stream,
        {("add", "", True)},
        {("sin", "", True), ("exp", "", True), ("matmul_1", "", True)},
    ),
    "what joins two values is kept for the backward": (
        lambda x, w: joined(x, w).exp().sum(),
        {("add", "", False)},
        set(),
    ),
    "the backward of a sum needs nothing": (lambda x, w: joined(x, w).sum(), set(), {("add", "", False)}),
    "what follows from one value is computed again": (
        lambda x, w: torch.matmul(x, w).sin().exp().sum(),
        set(),
        {("sin", "", False), ("exp", "", False)},
    ),
    "dropout that drops nothing passes a gradient as it is": (dropped(0.0), set(), {("matmul_1", "", True)}),
    "dropout that drops computes one": (dropped(0.5), {("matmul_1", "", True)}, set()),
    "a gradient that adds up in a table is read from memory": (
        lambda table, w: torch.matmul(F.embedding(torch.arange(8), table).sin(), w).sum(),
        {("embedding", "", True)},
        set(),
    ),
}


@pytest.mark.parametrize("name", CHARGED)
def test_of_values_and_gradients_what_is_written_is_charged(name: str) -> None:
    program, present, absent = CHARGED[name]
    terms = charged(captured(program, *SQUARE))
    assert present <= terms
    assert not absent & terms


def test_where_no_gradient_flows_none_waits() -> None:
    def program(x: Tensor, w: Tensor, angle: Tensor) -> Tensor:
        cos = angle.cos()
        h = torch.matmul(x, w) * cos
        return torch.matmul(h * cos, w).sum()

    args = *SQUARE, torch.randn(64, 16)
    rows = uniform(captured(program, *args))
    flows = charged(captured(program, *args), rows)
    for row in rows.values():
        for slot in row.reads:
            if "mul" in row.name and "mat" not in row.name and slot == "other":
                row.reads[slot] = ReadSensitivity(1e-6, 0.0)
    assert ("mul", "", True) not in charged(captured(program, *args), rows)
    assert charged(captured(program, *args), rows) <= flows


def test_what_attention_rounds_inside_is_charged_where_it_runs_low() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h = torch.matmul(x, w).view(1, 2, 32, 16)
        return F.scaled_dot_product_attention(h, h, h).sum()

    gm = captured(program, *SQUARE)
    rows = uniform(gm)
    for slot in INSIDE:
        rows["scaled_dot_product_attention"].reads[slot] = ReadSensitivity(1e-6, 0.0)
    inside = {("scaled_dot_product_attention", slot, False) for slot in INSIDE}
    assert inside <= charged(gm, rows)
    high = priced(captured(program, *SQUARE), rows).priced.choose(math.inf)
    assert high.sensitivity == 0


# ---- results of low products in fp32 ----


def test_on_cuda_a_result_whose_rounding_is_felt_is_the_fp32_sum_of_low_operands() -> None:
    plan = placed(variance, *ARGS, results={"matmul": 1e-2}, budget=0.1, device="cuda")
    row = plan.node("matmul")
    assert (row.dtype, row.pinned) == (torch.bfloat16, torch.float32)
    assert row.is_because(Kind.WIDE_RESULT)


def test_where_no_kernel_returns_the_sum_the_product_is_fp32() -> None:
    plan = placed(variance, *ARGS, results={"matmul": 1e-2}, budget=0.1)
    assert plan.node("matmul").dtype is torch.float32
    assert not any(row.is_because(Kind.WIDE_RESULT) for row in plan.nodes)

    def convolved(x: Tensor, w: Tensor) -> Tensor:
        return F.conv1d(x, w).exp()

    args = torch.randn(2, 16, 64), torch.randn(16, 16, 3)
    plan = placed(convolved, *args, results={"conv1d": 1e-2}, budget=0.1, device="cuda")
    assert plan.node("conv1d").dtype is torch.float32


def test_where_a_result_sensitivities_nothing_it_is_rounded() -> None:
    plan = placed(variance, *ARGS, results={"matmul": 0.0}, budget=1.0, device="cuda")
    assert plan.node("matmul").dtype is torch.bfloat16
    assert plan.node("matmul").pinned is None


def test_a_result_that_overflows_is_the_fp32_sum_of_low_operands() -> None:
    plan = placed(variance, *ARGS, results={"matmul": None}, budget=100.0, low=torch.float16, device="cuda")
    row = plan.node("matmul")
    assert (row.dtype, row.pinned) == (torch.float16, torch.float32)


def test_a_result_in_fp32_saves_its_rounding_and_no_other() -> None:
    graph = priced(*spread("cuda"))
    low = dict.fromkeys(graph.priced.base.variables(), LOW)
    wide = {**low, rounded(node_of("matmul")): HIGH}
    of = {(term.slot, term.backward) for term in graph.priced.blame(low) if term.call == "matmul"}
    left = {(term.slot, term.backward) for term in graph.priced.blame(wide) if term.call == "matmul"}
    assert of - left == {("", False)}
    assert ("", True) in left
    assert graph.by_bytes.time(wide) > graph.by_bytes.time(low)


def test_the_bias_of_a_result_in_fp32_is_added_as_it_is() -> None:
    def biased(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return F.linear(x, w, b).exp()

    gm = captured(biased, *ARGS[:2], torch.randn(16), device="cuda")
    graph = priced(gm, uniform(gm))
    (linear,) = (node for node in gm.graph.nodes if node.name == "linear")
    low = dict.fromkeys(graph.priced.base.variables(), LOW) | dict.fromkeys(graph.priced.base.pins, HIGH)
    plain, wide = (
        {
            (each.call, each.slot, each.backward)
            for each in graph.priced.blame({**low, rounded(linear): label})
        }
        for label in (LOW, HIGH)
    )
    assert plain - wide == {("linear", "", False), ("linear", "bias", False)}


def test_a_rule_and_a_plan_by_sensitivity_say_a_result_in_fp32_alike() -> None:
    policy = Policy.parse({"rules": [{"op": "matmul", "precision": "low", "result": "fp32"}]})
    ruled = run_passes(captured(variance, *ARGS, device="cuda"), PIPELINE, PassContext(policy, training=True))
    ours = placed(variance, *ARGS, results={"matmul": 1e-2}, budget=0.1, device="cuda").node("matmul")
    theirs = ruled.node("matmul")
    assert (ours.op_class, ours.dtype, ours.pinned) == (theirs.op_class, theirs.dtype, theirs.pinned)
    assert theirs.reasons[-1] in ours.reasons
    # a plan that is followed is priced as it was chosen
    graph = priced(spread("cuda")[0], spread()[1])
    labels = graph.labels_in({ours.name: ours})
    assert (labels[node_of(ours.name)], labels[rounded(node_of(ours.name))]) == (LOW, HIGH)


def node_of(name: str) -> fx.Node:
    return next(node for node in spread("cuda")[0].graph.nodes if node.name == name)
