"""Graphs priced by sensitivity: the cut is exact and monotone, and what is written is what is charged."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx

from amp_fx.passes.forward.network import rounded
from amp_fx.passes.forward.place_by_sensitivity import PricedGraph
from amp_fx.precision.placement.cut import HIGH, LOW, Problem, Var
from amp_fx.precision.placement.tradeoff import within
from amp_fx.precision.plans.sensitivity import INSIDE, CallSensitivity, ReadSensitivity
from support.models.sensitive_graph import ARGS, Rows, node_of, priced, spread, uniform
from support.tracing.captured_graphs import captured

sensitivities = st.sampled_from([0.0, 1e-8, 1e-6, 3e-5, 1e-3, None])


@st.composite
def measured(draw: st.DrawFn) -> Rows:
    """Random sensitivities of the graph's calls; some calls were not measured."""
    return {
        name: CallSensitivity(
            name,
            *(draw(sensitivities), draw(sensitivities)),
            {slot: ReadSensitivity(draw(sensitivities), draw(sensitivities)) for slot in row.reads},
        )
        for name, row in spread()[1].items()
        if draw(st.integers(0, 9))
    }


def every(problem: Problem) -> Iterator[dict[Var, bool]]:
    """All assignments that the pins allow."""
    free = sorted(problem.variables() - problem.pins.keys(), key=str)
    assert len(free) <= 14
    for choice in itertools.product([True, False], repeat=len(free)):
        yield {**problem.pins, **dict(zip(free, choice, strict=True))}


@settings(max_examples=60, deadline=None)
@given(measured(), st.sampled_from([0.0, 1e6, 1e9, 1e12, math.inf]))
def test_the_cut_with_sensitivity_is_the_brute_force_optimum(rows: Rows, weight: float) -> None:
    problem = priced(spread()[0], rows).priced.problem(weight)
    found = priced(spread()[0], rows).priced.choose(weight).placement
    assert problem.allows(found)
    assert problem.cost(found) == min(map(problem.cost, filter(problem.allows, every(problem))))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@settings(max_examples=20, deadline=None)
@given(rows=measured(), budget=st.floats(0.0, 1.5))
def test_nothing_within_a_budget_moves_fewer_bytes(rows: Rows, budget: float, device: str) -> None:
    graph = priced(spread(device)[0], rows)
    aim, limit = graph.by_bytes, budget**2 * graph.autocast_sensitivity * (1 + 1e-9)
    found = within([aim], limit, [graph.autocast])
    assert found.sensitivity <= limit * (1 + 1e-9)
    allowed = filter(aim.base.allows, every(aim.base))
    assert found.time == min(aim.time(sides) for sides in allowed if aim.sensitivity(sides) <= limit)


@settings(max_examples=40, deadline=None)
@given(measured())
def test_error_falls_and_time_grows_with_the_weight(rows: Rows) -> None:
    graph = priced(spread()[0], rows)
    corners = [graph.priced.choose(weight) for weight in (0.0, 1e3, 1e6, 1e8, 1e10, 1e13, 1e16, math.inf)]
    for before, after in itertools.pairwise(corners):
        assert after.sensitivity <= before.sensitivity * (1 + 1e-9)
        assert after.time >= before.time


def test_the_sensitivity_of_a_placement_is_the_sum_of_the_roundings_that_happen() -> None:
    graph = priced(*spread())
    assert graph.priced.choose(math.inf).sensitivity == 0
    # both matmuls: a result, two operands, their gradients and the gradient of the result that arrives in fp32;
    # all arithmetic between them is one kernel, whose result the second matmul reads
    assert graph.autocast_sensitivity == pytest.approx(12e-6)


Term = tuple[str, str, bool]


def blamed(graph: PricedGraph, sides: Mapping[Var, bool]) -> set[Term]:
    """(call, slot, whether a gradient) of every rounding that happens in a placement."""
    return {(term.call, term.slot, term.backward) for term in graph.priced.blame(sides)}


def charged(gm: fx.GraphModule, rows: Rows | None = None) -> set[Term]:
    """The same where all that may be low is low."""
    graph = priced(gm, uniform(gm) if rows is None else rows)
    return blamed(graph, dict.fromkeys(graph.priced.problem(0.0).variables(), LOW))


SQUARE = torch.randn(64, 16), torch.randn(16, 16)


def test_of_arithmetic_inside_one_kernel_only_what_is_written_is_charged() -> None:
    terms = charged(captured(lambda x, w: torch.matmul(torch.matmul(x, w).exp().sin().mul(2.0), w), *SQUARE))
    assert {call for call, _, _ in terms} == {"matmul", "mul", "matmul_1"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_elements_that_were_rounded_are_not_rounded_again(device: str) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h, g = torch.matmul(x, w), torch.matmul(x.sin(), w)
        joined = torch.cat([h, g, h.exp()], -1)
        leaky = F.leaky_relu(torch.matmul(F.relu(h), w))
        return torch.matmul(joined, joined.mT) @ torch.matmul(leaky, w) @ torch.matmul(F.relu(x.exp()), w).mT

    gm = captured(program, *SQUARE, device=device)
    rows = uniform(gm)
    rows["leaky_relu"].kept = 4e-7
    rows["cat"].reads = dict.fromkeys(rows["cat"].reads, ReadSensitivity(3e-7, 3e-7))
    graph = priced(gm, rows)
    low = dict.fromkeys(graph.priced.problem(0.0).variables(), LOW)

    def cost(name: str, sides: Mapping[Var, bool]) -> float:
        terms = graph.priced.blame(sides)
        return sum(
            term.sensitivity for term in terms if (term.call, term.slot, term.backward) == (name, "", False)
        )

    names = "relu", "cat", "leaky_relu", "relu_1"
    assert [cost(name, low) for name in names] == pytest.approx([0.0, 4e-7, 6e-7, 1e-6])


def test_a_gradient_that_arrives_rounded_is_not_charged_again() -> None:
    terms = charged(captured(lambda x, w: torch.matmul(torch.matmul(x, w).view(64, 16), w), *SQUARE))
    # of its operands; that of the result is what the second matmul hands back
    assert {slot for call, slot, backward in terms if call == "matmul" and backward} == {"self", "other"}


def residual(x: Tensor, w: Tensor) -> Tensor:
    first = torch.matmul(x, w).sin()
    # the gradient of the sum is there before that of its first summand, which the matmul reads, too
    return (first + torch.matmul(first, w)).exp().sum()


def dropped(x: Tensor, w: Tensor, p: float) -> Tensor:
    first = torch.matmul(x, w).sin()
    return (first + F.dropout(torch.matmul(first, w), p)).exp().sum()


def joined(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(x, w) + torch.matmul(w, x.mT).mT


#: what happens -> program, roundings that are charged, others that are not: (call, slot, whether a gradient)
CHARGED: dict[str, tuple[Callable[..., Tensor], set[Term], set[Term]]] = {
    "the gradient of a residual add waits in memory, others are complete within a kernel or come from it": (
        residual, {("add", "", True)}, {("sin", "", True), ("exp", "", True), ("matmul_1", "", True)}
    ),
    "what joins two values is kept": (lambda x, w: joined(x, w).exp().sum(), {("add", "", False)}, set()),
    "the backward of a sum needs nothing": (lambda x, w: joined(x, w).sum(), set(), {("add", "", False)}),
    "what follows from one value is computed again": (
        lambda x, w: torch.matmul(x, w).sin().exp().sum(), set(), {("sin", "", False), ("exp", "", False)}
    ),
    "dropout that drops nothing passes a gradient as it is": (
        lambda x, w: dropped(x, w, 0.0), set(), {("matmul_1", "", True)}
    ),
    "dropout that drops computes one": (lambda x, w: dropped(x, w, 0.5), {("matmul_1", "", True)}, set()),
    "a gradient that adds up in a table is read from memory": (
        lambda table, w: torch.matmul(F.embedding(torch.arange(8), table).sin(), w).sum(),
        {("embedding", "", True)}, set(),
    ),
}  # fmt: skip


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
    for name in ("mul", "mul_1"):
        rows[name].reads["other"] = ReadSensitivity(1e-6, 0.0)
    left = charged(captured(program, *args), rows)
    assert ("mul", "", True) not in left
    assert left <= flows


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
    assert priced(captured(program, *SQUARE), rows).priced.choose(math.inf).sensitivity == 0


def test_a_result_in_fp32_saves_its_rounding_and_no_other() -> None:
    graph = priced(*spread("cuda"))
    low = dict.fromkeys(graph.priced.base.variables(), LOW)
    wide = {**low, rounded(node_of("matmul")): HIGH}
    left = blamed(graph, wide)
    assert blamed(graph, low) - left == {("matmul", "", False)}
    assert ("matmul", "", True) in left
    assert graph.by_bytes.time(wide) > graph.by_bytes.time(low)


def test_the_bias_of_a_result_in_fp32_is_added_as_it_is() -> None:
    gm = captured(lambda x, w, b: F.linear(x, w, b).exp(), *ARGS[:2], torch.randn(16), device="cuda")
    graph = priced(gm, uniform(gm))
    (linear,) = (node for node in gm.graph.nodes if node.name == "linear")
    low = dict.fromkeys(graph.priced.base.variables(), LOW) | dict.fromkeys(graph.priced.base.pins, HIGH)
    plain, wide = (blamed(graph, {**low, rounded(linear): side}) for side in (LOW, HIGH))
    assert plain - wide == {("linear", "", False), ("linear", "bias", False)}
