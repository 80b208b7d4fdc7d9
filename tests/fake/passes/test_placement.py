"""Where values are stored: what the lists fix, what may move without losing accuracy, and golden counts of casts.

Only what every allowed placement has in common, or what is strictly cheapest, is asserted here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from amp_fx import Policy
from amp_fx.passes import PassContext, run_passes
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.plans.plan import CastPlan, Plan
from amp_fx.precision.policy import OpClass, table
from support.checks.whole_program import DOWN, UP, check, checked
from support.tracing.captured_graphs import PIPELINE, Program, captured, casts_of, rewrite

BF16 = torch.bfloat16
randn = torch.randn
X, W = randn(8, 8), randn(8, 8)

#: rates at which low precision gains, and a kernel launch costs nothing
FAST_LOW = DeviceProfile("test", "cpu", {"float32": 1e12, "bfloat16": 1e13}, 1e11, 0.0)
#: bf16 is emulated: slower than fp32
EMULATED = DeviceProfile("emulated", "cpu", {"float32": 1e12, "bfloat16": 1e11}, 1e11, 0.0)


def place(program: Program, *args: Any, device: str = "cpu", **context: Any) -> tuple[fx.GraphModule, Plan]:
    """The rewritten graph and its plan."""
    gm = captured(program, *args, device=device)
    return gm, run_passes(gm, PIPELINE, PassContext(**context))


def cast_values(plan: Plan) -> dict[str, CastPlan]:
    """Casts by the name of what they cast."""
    return {cast.value: cast for cast in plan.casts}


# --- what the lists fix ---


@checked(X, W, casts={DOWN: 2, UP: 1}, dtypes=dict.fromkeys(("matmul", "gelu", "mul"), "bfloat16"))
def test_arithmetic_between_two_matmuls_stays_low(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(F.gelu(torch.matmul(x, w)) * 2, w)


@checked(X, W, casts={DOWN: 2}, dtypes={"add": "float32", "matmul": "bfloat16"})
def test_arithmetic_with_an_fp32_value_is_in_fp32(x: Tensor, w: Tensor) -> Tensor:
    return x + torch.matmul(x, w)


@checked(X, W, casts={DOWN: 2}, dtypes={"cat": "float32"})
def test_joined_values_are_in_the_widest_dtype(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([x, torch.matmul(x, w)]).exp()


def test_softmax_follows_its_devices_list() -> None:
    for device, dtype in (("cpu", "bfloat16"), ("cuda", "float32")):
        found = rewrite(lambda q, k, v: F.softmax(q @ k, -1) @ v, X, W, randn(8, 8), device=device)
        assert found.dtypes("softmax") == [dtype]
        assert found.dtypes("matmul") == ["bfloat16"] * 2


def test_eager_numerics_keep_autocasts_placement() -> None:
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)

    def model(x: Tensor, table: Tensor) -> Tensor:
        h = F.gelu(first(x))
        h = h.mul(2.0) - h.sigmoid()
        return second(h) + table.mT.flip(0)

    pinned = rewrite(model, X, W, options={"numerics": "eager"})
    assert pinned.dtypes("gelu") == pinned.dtypes("mul") == pinned.dtypes("sigmoid") == ["bfloat16"]
    assert pinned.dtypes("flip") == ["float32"]
    with torch.autocast("cpu", BF16):
        theirs = model(X, W)
    # the same placement, so the same bits
    assert torch.equal(pinned.outputs, theirs.float())


def test_eager_numerics_round_where_autocast_rounds_at_the_end_of_a_graph() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.softmax(F.layer_norm(torch.matmul(x, w), (8,)).exp() * 3.0, -1)

    pinned = rewrite(program, X, W, options={"numerics": "eager", "dtype": "bfloat16"})
    with torch.autocast("cpu", BF16):
        theirs = program(X, W)
    assert theirs.dtype is BF16
    assert torch.equal(pinned.outputs, theirs.float())


# --- moves ---


@checked(X, W, casts={DOWN: 2, UP: 1}, dtypes={"flip": "float32", "exp": "float32"})
def test_a_move_whose_readers_want_fp32_stays_in_fp32(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    moved = x.mT.flip(0)
    return moved.exp(), torch.matmul(moved, w)


def test_a_view_is_where_autocast_has_it_if_both_cost_the_same() -> None:
    found = rewrite(lambda x, w: (x @ w).view(4, 16).exp().view(8, 8) @ w, X, W, device="cuda")
    assert found.dtypes("view") == ["bfloat16", "float32"]


def test_the_plan_says_why_a_value_is_where_it_is() -> None:
    found = rewrite(lambda x, w: x @ w[:, None].expand(2, 4, 8).reshape(8, 8), X, randn(2, 8))
    assert found.one("expand").is_because(ReasonKind.CHEAPER)


def test_a_slice_is_cast_after_it_is_cut() -> None:
    rewritten = check(lambda x, w: F.linear(x[:, -1], w), randn(4, 32, 8), W, casts={DOWN: 2, UP: 1})
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
    table, index = randn(64, 8), torch.arange(8)
    gm, plan = place(lambda table, index: F.linear(F.embedding(index, table).relu(), table), table, index)
    assert casts_of(gm) == {DOWN: 1, UP: 1}
    assert cast_values(plan)["l_table_"].users == ("embedding", "linear")


CACHED = randn(2, 32, 8), randn(2, 1, 8), W, randn(2, 1, 8)


def test_pieces_of_a_key_cache_are_joined_before_they_are_cast() -> None:
    def attend(cache: Tensor, x: Tensor, w: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        keys = torch.cat([cache, F.linear(x, w)], 1)
        return torch.matmul(q, keys.mT), keys

    # the cache is returned in fp32, so the new key is widened for it; the joined keys are narrowed once
    rewritten = check(attend, *CACHED, casts={DOWN: 4, UP: 1})
    assert {"cat", "m_t"} & set(cast_values(rewritten.plan))


@checked(*CACHED, casts={DOWN: 4, UP: 1}, dtypes={"cat": "bfloat16"})
def test_a_cache_kept_only_for_attention_is_joined_low(*args: Tensor) -> Tensor:
    cache, x, w, q = args
    return torch.matmul(q, torch.cat([cache, F.linear(x, w)], 1).mT)


def test_a_user_cast_that_widens_is_undone_rather_than_answered() -> None:
    # the program's own .float() remains in the graph, unread by the second matmul
    promised = {"casts": {DOWN: 2, UP: 2}, "dtypes": {"linear": "bfloat16"}, "reference": torch.float32}
    rewritten = check(lambda x, w: F.linear(F.linear(x, w).float(), w), X, W, **promised)
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
    assert plan.node("add").dtype is BF16


def test_policy_fast_keeps_the_norms_stream_low_under_the_cuda_list() -> None:
    def block(x: Tensor, scale: Tensor, w: Tensor) -> Tensor:
        h = x + F.linear(F.rms_norm(x, (8,), scale), w)
        return F.linear(F.rms_norm(h, (8,), scale), w)

    args = randn(2, 16, 8), randn(8), randn(8, 8)
    _, plan = place(block, *args, device="cuda", policy=Policy("fast"), training=True)
    assert plan.node("add").dtype is BF16
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
    assert plan.node("mul_1").dtype is BF16
    assert plan.node("mul").dtype is torch.float32


# --- the device decides whether a matmul gains ---


def test_a_matmul_goes_low_where_it_gains_more_than_its_casts_cost() -> None:
    _, plan = place(F.linear, randn(1, 256), randn(256, 256), profile=FAST_LOW)
    assert plan.node("linear").dtype is torch.float32
    assert plan.node("linear").is_because(ReasonKind.CASTS_COST_MORE)
    assert not plan.changed
    gm, plan = place(F.linear, randn(4096, 256), randn(256, 256), profile=FAST_LOW)
    assert plan.node("linear").dtype is BF16
    assert casts_of(gm) == {DOWN: 2, UP: 1}
    # without instructions for bf16 nothing gains
    _, plan = place(F.linear, randn(4096, 256), randn(256, 256), profile=EMULATED)
    assert plan.node("linear").dtype is torch.float32
    assert not plan.changed


@pytest.mark.parametrize("training", [False, True])
def test_between_products_in_fp32_nothing_is_rounded(training: bool) -> None:
    def gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
        # by an adapter, say, one factor is a kernel later
        return (F.silu(x @ gate) * (x @ up @ up)) @ down

    args = randn(64, 64), *(randn(64, 64) for _ in range(3))
    _, plan = place(gated, *args, profile=EMULATED, training=training)
    assert not plan.changed
    assert {row.op for row in plan.nodes if row.is_because(ReasonKind.IDLE)} == {"silu", "mul.Tensor"}
    _, plan = place(gated, *args, training=training)
    assert {row.dtype for row in plan.nodes} == {BF16}


def test_the_placement_does_not_depend_on_the_order_of_independent_calls() -> None:
    def one(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        left = F.linear(F.relu(x), a)
        right = F.linear(torch.tanh(x), b)
        return left.mul(right) + x

    def other(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        right = F.linear(torch.tanh(x), b)
        left = F.linear(F.relu(x), a)
        return left.mul(right) + x

    first, second = (rewrite(program, X, W, randn(8, 8)) for program in (one, other))
    assert first.plan.ops_by_dtype() == second.plan.ops_by_dtype()
    assert casts_of(first.gm) == casts_of(second.gm)
