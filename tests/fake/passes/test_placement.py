"""Named graphs and where their casts go: golden counts for the exact placement."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from amp_fx import Policy
from amp_fx.passes import PIPELINE, PassContext, run_passes
from amp_fx.placement.profile import DeviceProfile
from amp_fx.plans.label import Kind
from amp_fx.plans.plan import CastPlan, Plan
from amp_fx.policy import OpClass, table
from checks import check, checked
from graphs import captured, casts_of, rewrite

DOWN, UP = ("float32", "bfloat16"), ("bfloat16", "float32")
randn = torch.randn

#: rates at which low precision gains, and a kernel launch costs nothing
FAST_LOW = DeviceProfile("test", "cpu", {"float32": 1e12, "bfloat16": 1e13}, 1e11, 0.0)
#: bf16 is emulated: slower than fp32
EMULATED = DeviceProfile("emulated", "cpu", {"float32": 1e12, "bfloat16": 1e11}, 1e11, 0.0)


def place(
    program: Callable[..., Any], *args: Any, device: str = "cpu", **context: Any
) -> tuple[fx.GraphModule, Plan]:
    """The rewritten graph and its plan."""
    gm = captured(program, *args, device=device)
    return gm, run_passes(gm, PIPELINE, PassContext(**context))


def cast_values(plan: Plan) -> dict[str, CastPlan]:
    """Casts by the name of what they cast."""
    return {cast.value: cast for cast in plan.casts}


# --- moves ---


def test_a_head_shared_by_many_queries_is_cast_before_it_is_expanded() -> None:
    def attention(q: Tensor, kv: Tensor) -> Tensor:
        keys = kv[:, None].expand(2, 4, 16, 8)
        return torch.matmul(q, keys.transpose(-1, -2))

    rewritten = check(attention, randn(2, 4, 16, 8), randn(2, 16, 8), casts={DOWN: 2, UP: 1})
    sizes = {cast.bytes for cast in rewritten.plan.casts if cast.users == ("expand",)}
    assert sizes == {6 * 2 * 16 * 8}


def test_a_slice_is_cast_after_it_is_cut() -> None:
    def last_token(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(x[:, -1], w)

    rewritten = check(last_token, randn(4, 32, 8), randn(8, 8), casts={DOWN: 2, UP: 1})
    assert "l_x_" not in cast_values(rewritten.plan)


def look_up(table: Tensor, index: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.embedding(index, table), w)


@pytest.mark.parametrize(("rows", "tokens", "cast"), [(64, 8, "embedding"), (8, 64, "l_table_")])
def test_a_lookup_is_cast_on_its_smaller_side_in_inference(rows: int, tokens: int, cast: str) -> None:
    index = torch.arange(tokens) % rows
    _, plan = place(look_up, randn(rows, 8), index, randn(8, 8))
    assert cast in cast_values(plan)


def test_in_training_a_lookup_stays_in_fp32_because_its_gradient_adds_up_there() -> None:
    _, plan = place(look_up, randn(8, 8), torch.arange(64) % 8, randn(8, 8), training=True)
    assert "l_table_" not in cast_values(plan)
    assert plan.node("embedding").dtype is torch.float32


def test_a_tied_table_is_cast_once_for_both_its_readers_in_inference() -> None:
    def tied(table: Tensor, index: Tensor) -> Tensor:
        return F.linear(torch.relu(F.embedding(index, table)), table)

    gm, plan = place(tied, randn(64, 8), torch.arange(8))
    assert casts_of(gm) == {DOWN: 1, UP: 1}
    assert cast_values(plan)["l_table_"].users == ("embedding", "linear")


def test_pieces_of_a_key_cache_are_joined_before_they_are_cast() -> None:
    def attend(cache: Tensor, x: Tensor, w: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.cat([cache, F.linear(x, w)], 1)
        return torch.matmul(q, keys.mT), keys

    # the cache is returned in fp32, so the new key is widened for it; the joined keys are narrowed once
    rewritten = check(
        attend, randn(2, 32, 8), randn(2, 1, 8), randn(8, 8), randn(2, 1, 8), casts={DOWN: 4, UP: 1}
    )
    assert {"cat", "m_t"} & set(cast_values(rewritten.plan))


@checked(
    randn(2, 32, 8),
    randn(2, 1, 8),
    randn(8, 8),
    randn(2, 1, 8),
    casts={DOWN: 4, UP: 1},
    dtypes={"cat": "bfloat16"},
)
def test_a_cache_kept_only_for_attention_is_joined_low(
    cache: Tensor, x: Tensor, w: Tensor, q: Tensor
) -> Tensor:
    return torch.matmul(q, torch.cat([cache, F.linear(x, w)], 1).mT)


# --- sharing ---


def test_a_no_grad_graph_casts_each_value_once() -> None:
    def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(F.linear(x, q), F.linear(x, k), F.linear(x, v))

    with torch.no_grad():
        check(attention, randn(2, 16, 8), *(randn(8, 8) for _ in range(3)), casts={DOWN: 4, UP: 1})


def test_a_user_cast_that_widens_is_undone_rather_than_answered() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(F.linear(x, w).float(), w)

    # the program's own .float() remains in the graph, unread by the second matmul
    rewritten = check(
        program,
        randn(4, 8),
        randn(8, 8),
        casts={DOWN: 2, UP: 2},
        dtypes={"linear": "bfloat16"},
        reference=torch.float32,
    )
    assert "to" not in cast_values(rewritten.plan)


# --- the rms_norm regression of torch 2.12: fp32 activations and stand-alone cast kernels ---


@pytest.mark.skipif(
    table.lookup(torch.ops.aten.rms_norm.default, "cuda").op_class is not OpClass.FP32,  # pyright: ignore[reportOptionalMemberAccess]
    reason="CUDA autocast lists rms_norm from torch 2.12 on",
)
def test_rms_norm_under_the_cuda_list_costs_one_cast_each_way_for_all_its_readers() -> None:
    def block(x: Tensor, scale: Tensor, w: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        x = F.linear(x, w)
        h = F.rms_norm(x, (8,), scale)
        x = x + F.scaled_dot_product_attention(F.linear(h, q), F.linear(h, k), F.linear(h, v))
        return F.linear(x, w)

    args = randn(2, 16, 8), randn(8), *(randn(8, 8) for _ in range(4))
    gm, plan = place(block, *args, device="cuda")
    assert plan.node("rms_norm").dtype is torch.float32
    by_value = cast_values(plan)
    assert by_value["rms_norm"].users == ("linear_1", "linear_2", "linear_3")
    # the stream is widened for the norm and for the output; narrowed are the input, four weights and the norm
    assert casts_of(gm) == {UP: 2, DOWN: 6}
    assert by_value["linear"].users == ("rms_norm",)
    assert plan.node("add").dtype is torch.bfloat16


def test_policy_fast_keeps_the_norms_stream_low_under_the_cuda_list() -> None:
    def block(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        h = x + F.linear(F.rms_norm(x, (8,), scale), w)
        return F.linear(F.rms_norm(h, (8,), scale), w)

    args = randn(2, 16, 8), randn(8), randn(8, 8)
    _, plan = place(block, *args, device="cuda", policy=Policy("fast"), training=True)
    assert plan.node("add").dtype is torch.bfloat16
    _, plan = place(block, *args, device="cuda", training=True)
    assert plan.node("add").dtype is torch.float32


def test_policy_fast_rounds_nothing_that_the_same_kernel_reads_in_fp32() -> None:
    # as in a state-space model: small factors that cost less in 16 bits, a large product, its exponential
    def scan(x: Tensor, w: Tensor, bias: Tensor, rates: Tensor, v: Tensor) -> Tensor:
        steps = F.softplus(F.linear(x, w) + bias)
        decays = torch.exp(-rates.exp()[None, None] * steps[..., None])
        inputs = steps[..., None] * F.linear(x, v)[:, :, None]
        return torch.cumsum(decays, 1) @ inputs.mT

    args = randn(4, 16, 8), randn(8, 8), randn(8), randn(8, 4), randn(4, 8)
    _, plan = place(scan, *args, policy=Policy("fast"), training=True)
    assert plan.node("mul_1").dtype is torch.bfloat16
    assert plan.node("mul").dtype is torch.float32


# --- the device decides whether a matmul gains ---


def test_a_matmul_that_gains_less_than_its_casts_cost_stays_in_fp32_and_says_so() -> None:
    _, plan = place(F.linear, randn(1, 256), randn(256, 256), profile=FAST_LOW)
    row = plan.node("linear")
    assert row.dtype is torch.float32
    assert row.is_because(Kind.CASTS_COST_MORE)
    assert not plan.changed


def test_a_matmul_that_gains_more_goes_low() -> None:
    gm, plan = place(F.linear, randn(4096, 256), randn(256, 256), profile=FAST_LOW)
    assert plan.node("linear").dtype is torch.bfloat16
    assert casts_of(gm) == {DOWN: 2, UP: 1}


def test_without_bf16_instructions_everything_stays_in_fp32() -> None:
    def mlp(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, a)), b)

    _, plan = place(mlp, randn(4096, 256), randn(256, 256), randn(256, 256), profile=EMULATED)
    assert {row.dtype for row in plan.nodes} == {torch.float32}
    assert not plan.changed


# --- determinism ---


def test_the_placement_does_not_depend_on_the_order_of_independent_calls() -> None:
    def one(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        left = F.linear(F.relu(x), a)
        right = F.linear(torch.tanh(x), b)
        return left.mul(right) + x

    def other(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        right = F.linear(torch.tanh(x), b)
        left = F.linear(F.relu(x), a)
        return left.mul(right) + x

    args = randn(8, 8), randn(8, 8), randn(8, 8)
    first, second = (rewrite(program, *args) for program in (one, other))
    assert first.plan.ops_by_dtype() == second.plan.ops_by_dtype()
    assert casts_of(first.gm) == casts_of(second.gm)
