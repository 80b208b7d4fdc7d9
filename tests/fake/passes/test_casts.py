"""Casts stand where the placement implies them, once per value and dtype; a rounding that the user wrote stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from amp_fx.graphs.keys import CAST_META
from amp_fx.passes import FuseCasts, InsertCasts, PassContext
from support.checks.whole_program import DOWN, UP, check, checked
from support.models.small import Parts
from support.tracing.captured_graphs import casts_of, rewrite, run_until

aten = torch.ops.aten
BF16, FP16 = torch.bfloat16, torch.float16
X, Y, W = (each.clone() for each in torch.randn(3, 8, 8, generator=torch.Generator().manual_seed(0)))
SCALE, LEAVES = torch.ones(8), [value.clone().requires_grad_() for value in (X, W)]
TO_FP16, FROM_FP16 = ("float32", "float16"), ("float16", "float32")


@pytest.mark.parametrize("training", [True, False])
def test_one_cast_serves_all_readers_of_a_value(training: bool) -> None:
    def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(F.linear(x, q), F.linear(x, k), F.linear(x, v))

    x, *_ = args = [value.clone().requires_grad_(training) for value in (torch.randn(2, 4, 8), X, Y, W)]
    with torch.set_grad_enabled(training):
        rewritten = check(attention, *args, casts={DOWN: 4, UP: 1}, dtypes={"linear": "bfloat16"})
    (of_x,) = [cast for cast in rewritten.plan.casts if len(cast.users) == 3]
    assert of_x.users == ("linear", "linear_1", "linear_2")
    assert of_x.bytes == x.numel() * (4 + 2)


@checked(X, W, casts={DOWN: 4, UP: 3}, dtypes={"add_": "float32"})
def test_a_cast_is_not_shared_across_a_write_to_its_source_or_to_a_view(
    x: Tensor, w: Tensor
) -> tuple[Tensor, ...]:
    state = x * 1.0
    before = torch.matmul(state, w)
    state.add_(1)
    between = torch.matmul(state, w)
    state[0].zero_()
    return before, between, torch.matmul(state, w)


@checked(X, W, casts={DOWN: 2, UP: 1})
def test_a_cast_is_shared_across_a_write_to_something_else(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    other = x * 1.0
    before = torch.matmul(x, w)
    other.add_(1)
    return before + other, torch.matmul(x, w.mT)


@checked(X, Y, W, casts={DOWN: 3, UP: 2})
def test_an_input_that_is_written_is_cast_again(buffer: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    before = torch.matmul(buffer, w)
    buffer.copy_(x)
    return before, torch.matmul(buffer, w)


def test_arguments_with_a_dtype_of_their_own_are_not_cast() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
    x = torch.randn(2, 8, requires_grad=True)
    rewritten = check(model, x, casts={DOWN: 5, UP: 1}, dtypes={"layer_norm": "bfloat16"})
    (norm,) = rewritten.gm.graph.find_nodes(op="call_function", target=aten.layer_norm.default)
    assert [arg.meta["val"].dtype for arg in norm.all_input_nodes] == [BF16, torch.float32, torch.float32]


def test_on_cuda_the_norm_and_its_weights_are_in_fp32_but_a_low_one_without_weights_is_not_cast() -> None:
    rewritten = rewrite(lambda x, w, scale: F.layer_norm(x @ w, (8,), scale) @ w, X, W, SCALE, device="cuda")
    assert rewritten.dtypes("layer_norm") == ["float32"]
    assert casts_of(rewritten.gm) == {DOWN: 3, UP: 2}
    how = {"device": "cuda", "options": {"policy": "fast"}}
    assert casts_of(rewrite(lambda x, w: F.layer_norm(x @ w, (8,)) @ w, X, W, **how).gm) == {DOWN: 2, UP: 1}


NORMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "layer_norm": lambda x, scale: F.layer_norm(x, (8,), scale),
    "native_layer_norm": lambda x, scale: torch.native_layer_norm(x, (8,), scale, scale, 1e-5)[0],
    "group_norm": lambda x, scale: F.group_norm(x, 2, scale, scale),
}


@pytest.mark.parametrize("norm", NORMS)
def test_a_low_norm_on_cuda_widens_its_input_and_rounds_its_result(norm: str) -> None:
    def program(x: Tensor, w: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        hidden = NORMS[norm](torch.matmul(x, w), scale).relu()
        return torch.matmul(hidden, w), hidden

    rewritten = rewrite(program, X, W, SCALE, device="cuda", options={"policy": "fast"})
    (call,) = [n for n in rewritten.gm.graph.nodes if getattr(n.target, "_opname", "") == norm]
    assert {source.meta["val"].dtype for source in call.all_input_nodes} == {torch.float32}
    assert {source.meta["val"].dtype for source in call.all_input_nodes[0].all_input_nodes} == {BF16}
    # the plan says what is stored
    assert rewritten.dtypes(norm) == rewritten.dtypes("relu") == ["bfloat16"]


# autocast raises: lerp is on no list of it
@checked(X, W, casts={DOWN: 2, UP: 1}, dtypes={"lerp": "float32"}, tolerance=1e-2)
def test_inputs_of_a_kernel_that_does_not_widen_are_cast(x: Tensor, w: Tensor) -> Tensor:
    return torch.lerp(x, torch.matmul(x, w), 0.5)


@checked(X, W, torch.tensor(0.37, requires_grad=True), casts={DOWN: 2, UP: 1}, dtypes={"mul": "bfloat16"})
def test_a_zero_dimensional_tensor_needs_no_cast_in_arithmetic(x: Tensor, w: Tensor, scale: Tensor) -> Tensor:
    return torch.matmul(torch.matmul(x, w) * scale, w)


@checked(X, W, casts={DOWN: 2, UP: 1})
def test_outputs_return_to_their_traced_dtypes(x: Tensor, w: Tensor) -> dict[str, object]:
    h = torch.matmul(x, w)
    return {"h": h, "low": h.to(BF16), "nested": [(h.argmax(), h.double())], "size": h.shape[0]}


@checked(X, W, ambient=BF16, casts={DOWN: 2}, dtypes={"add": "float32"})
def test_under_an_ambient_autocast_low_outputs_stay_low(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.matmul(x, w)
    return h, h + x


@checked(W, torch.randint(8, (8, 8)), X > 0, X.double(), casts={}, reference=torch.float32)
def test_integers_booleans_and_fp64_are_never_cast(*args: Tensor) -> tuple[Tensor, ...]:
    x, n, mask, wide = args
    return torch.matmul(n, n), torch.matmul(wide, wide), mask & mask, F.embedding(n, x)


# autocast raises: inside the island h is bf16 and w is not
@checked(X, W, casts={DOWN: 3, UP: 2}, dtypes={"matmul": ["bfloat16", "float32", "bfloat16"]}, tolerance=1e-2)
def test_an_island_gets_what_it_was_traced_with(x: Tensor, w: Tensor) -> Tensor:
    h = torch.matmul(x, w)
    with torch.autocast("cpu", enabled=False):
        h = torch.matmul(h, w)
    return torch.matmul(h, w)


def test_inserted_casts_carry_the_users_source_line_and_a_mark() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        scaled = x * 3.0
        return torch.matmul(scaled, w)

    rewritten = rewrite(program, X, W)
    casts = rewritten.gm.graph.find_nodes(op="call_function", target=aten.to.dtype)
    assert [cast.meta[CAST_META] for cast in casts] == [True] * 3
    (of_scaled,) = [cast for cast in rewritten.plan.casts if cast.value == "mul"]
    assert of_scaled.inserted
    assert of_scaled.source.endswith("scaled = x * 3.0")


@checked(*LEAVES, casts={DOWN: 4, UP: 1})
def test_a_cast_is_not_shared_out_of_no_grad(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (x @ w).amax()
    return (x @ w) * scale


def test_tied_weights_are_cast_once_and_collect_both_gradients() -> None:
    def tied(m: Any, tokens: Tensor) -> Tensor:
        return m.head(F.gelu(m.head(m.embed(tokens))) @ m.embed.weight)

    embed, head = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
    head.weight = embed.weight
    model = Parts(tied, embed=embed, head=head)
    check(model, torch.randint(16, (2, 5)), casts={DOWN: 1, UP: 1}, dtypes={"linear": "bfloat16"})


BOTH = {TO_FP16: 2, FROM_FP16: 1, DOWN: 2, UP: 1}


@checked(X, W, casts=BOTH, dtypes={"matmul": ["float16", "bfloat16"]}, reference=torch.float32)
def test_two_low_dtypes_in_one_program_each_get_their_casts(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        h = torch.matmul(x, w)
    return torch.matmul(h.float(), w)


# --- conversions that do nothing go ---


def matmul_of(gm: fx.GraphModule) -> fx.Node:
    (found,) = gm.graph.find_nodes(op="call_function", target=aten.matmul.default)
    return found


def widened(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(x.float(), w)


def rounded(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(x.to(BF16).float(), w)


def test_narrowing_to_another_dtype_is_no_round_trip() -> None:
    casts = {("float16", "float32"): 1, DOWN: 2, UP: 1}
    check(widened, X.to(FP16), W, casts=casts, dtypes={"matmul": "bfloat16"}, reference=torch.float32)


@checked(X, W, casts={DOWN: 2, UP: 1}, reference=torch.float32)
def test_a_cast_equal_to_one_that_the_program_made_reuses_it(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    low = x.to(BF16)
    return low.abs(), torch.matmul(x, w)


@checked(X, casts={DOWN: 2}, reference=torch.float32)
def test_the_programs_own_casts_are_never_merged(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.to(BF16), x.to(BF16).abs()


@checked(X, casts={TO_FP16: 1, FROM_FP16: 1}, reference=torch.float32, tolerance=0)
def test_the_users_narrowing_is_a_barrier(x: Tensor) -> Tensor:
    return x.to(FP16).float().exp()


def test_the_users_rounding_in_front_of_a_matmul_is_kept() -> None:
    casts, options = {DOWN: 1, UP: 1, TO_FP16: 2, FROM_FP16: 1}, {"dtype": "float16"}
    rewritten = check(rounded, X, W, options=options, casts=casts, reference=torch.float32)
    assert rewritten.one("matmul").dtype is FP16


def test_the_users_rounding_between_two_low_dtypes_is_kept() -> None:
    casts = {("float16", "bfloat16"): 1, UP: 1, TO_FP16: 2, FROM_FP16: 1}
    check(rounded, X.to(FP16), W, options={"dtype": "float16"}, casts=casts, reference=torch.float32)


def test_the_users_rounding_serves_the_matmul_where_the_dtypes_agree() -> None:
    gm = rewrite(rounded, X, W).gm
    assert matmul_of(gm).args[0].args == (gm.graph.find_nodes(op="placeholder")[0], BF16)  # type: ignore[union-attr]  # nodes


@checked(X.to(BF16), W, casts={UP: 2, DOWN: 2}, reference=torch.float32)
def test_a_widened_value_that_is_written_is_not_the_original(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    wide.add_(1)
    return torch.matmul(wide, w)


@checked(X.to(BF16), W, casts={UP: 2, DOWN: 2}, reference=torch.float32)
def test_an_original_that_is_written_later_is_not_read_instead(x: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    x.add_(1)
    return torch.matmul(wide, w)


def with_cast(dtype: torch.dtype) -> tuple[fx.GraphModule, fx.Node, fx.Node]:
    """A graph that is ready but for the fusing of casts, its matmul, and a cast of that which nobody reads."""
    gm = run_until(InsertCasts, lambda x, w: torch.matmul(x, w), X, W).gm
    matmul = matmul_of(gm)
    with gm.graph.inserting_after(matmul):
        made = gm.graph.call_function(aten.to.dtype, (matmul, dtype))
    made.meta["val"] = matmul.meta["val"].to(dtype, copy=True)
    return gm, matmul, made


def test_an_inserted_cast_that_nobody_reads_goes() -> None:
    # no other cast of the matmul is equal to it
    gm, _, idle = with_cast(torch.float16)
    idle.meta[CAST_META] = True
    before = len(gm.graph.nodes)
    FuseCasts().call(gm, PassContext())
    assert idle not in gm.graph.nodes
    assert len(gm.graph.nodes) == before - 1


@pytest.mark.parametrize("mark", [True, False])
def test_a_cast_to_the_dtype_it_has_goes_if_it_was_inserted(mark: bool) -> None:
    gm, matmul, same = with_cast(BF16)
    matmul.replace_all_uses_with(same, delete_user_cb=lambda user: user is not same)
    if mark:
        same.meta[CAST_META] = True
    FuseCasts().call(gm, PassContext())
    assert (same in gm.graph.find_nodes(op="call_function", target=aten.to.dtype)) != mark


@checked(*LEAVES, casts={DOWN: 3, UP: 1}, reference=torch.float32)
def test_a_cast_of_the_programs_under_no_grad_is_not_reused(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        low = x.to(BF16)
    return low.abs(), x @ w


def test_a_round_trip_is_seen_through_a_cast_that_does_nothing() -> None:
    casts = {DOWN: 2, UP: 2}
    rewritten = check(lambda x, w: x.to(BF16).float().float() @ w, X, W, casts=casts, reference=torch.float32)
    assert rewritten.one("matmul").dtype is BF16
