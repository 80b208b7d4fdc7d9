"""Hazards that op lists cannot see, each with a near miss, and storages that must not be re-typed alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_fx.passes import Constrain
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.plans.plan import NodePlan
from amp_fx.precision.policy import OpClass
from support.checks.whole_program import DOWN, UP, check, checked
from support.tracing.captured_graphs import rewrite, run_until

BF16, FP16 = torch.bfloat16, torch.float16
FP32_MIN = torch.finfo(torch.float32).min
TO_FP16 = {("float32", "float16"): 2, ("float16", "float32"): 1}
#: bounds the error of fp32 arithmetic behind one rounding to a 16-bit dtype, where autocast has no answer
ONE_ROUNDING = 1e-2
X, W = torch.randn(4, 4), torch.randn(4, 4)
LATER = torch.ones(4, 4).triu(1).bool()

Program = Callable[..., Any]


def constrained(program: Program, op: str, *args: Tensor, dtype: str, numerics: str = "compiled") -> NodePlan:
    options = {"dtype": dtype, "numerics": numerics}
    return run_until(Constrain, program, *args, options=options).one(op)


def behind(program: Program) -> Program:
    """A program of the product of two matrices."""
    return lambda x, w, *more: program(torch.matmul(x, w), *more)


def filled(value: float) -> Program:
    return behind(lambda h: F.softmax(h.masked_fill(LATER, value), -1))


def normalised(eps: float) -> Program:
    return behind(lambda h: h / (h.norm(dim=-1, keepdim=True) + eps))


#: what becomes of a product -> low dtype, program, the op that it is about
HAZARDS: dict[ReasonKind, dict[str, tuple[str, Program, str]]] = {
    ReasonKind.SCALAR_RANGE: {
        "fill by the least of fp32": ("float16", filled(FP32_MIN), "masked_fill"),
        "fill beyond fp16": ("float16", filled(-1e9), "masked_fill"),
        "fill beyond bf16": ("bfloat16", filled(FP32_MIN), "masked_fill"),
        "choice": ("float16", behind(lambda h: torch.where(h > 0, h, -1e9)), "where"),
        "tensor chosen": ("float16", behind(lambda h: torch.where(h > 0, h, torch.tensor(-1e9))), "where"),
        "sum": ("float16", behind(lambda h: h + 1e6), "add"),
        "bound": ("float16", behind(lambda h: h.clamp(max=1e5)), "clamp"),
        "mask times a number": ("float16", lambda x, m: (1.0 - m) * -1e9 + x @ m, "mul"),
    },
    ReasonKind.TINY_EPS: {
        "zero in fp16": ("float16", normalised(1e-8), "add"),
        "few digits in fp16": ("float16", normalised(1e-5), "add"),
        "zero in bf16": ("bfloat16", normalised(1e-39), "add"),
        "behind a view": ("float16", behind(lambda h: (h.square() + 1e-8).view(-1).rsqrt()), "add"),
        "bound of a logarithm": ("float16", behind(lambda h: h.clamp(min=1e-12).log()), "clamp"),
    },
}
#: near misses
HARMLESS: dict[str, tuple[str, Program, str]] = {
    "fill by the least of fp16": ("float16", filled(-65504.0), "masked_fill"),
    "fill within fp16": ("float16", filled(-1e4), "masked_fill"),
    "infinite fill in fp16": ("float16", filled(float("-inf")), "masked_fill"),
    "fill within bf16": ("bfloat16", filled(-1e9), "masked_fill"),
    "fill by the least of bf16": ("bfloat16", filled(torch.finfo(BF16).min), "masked_fill"),
    "infinite fill in bf16": ("bfloat16", filled(float("-inf")), "masked_fill"),
    "position": ("float16", behind(lambda h: h[1:]), "slice"),
    "repetitions": ("float16", behind(lambda h: h.repeat_interleave(70_000, 0)), "repeat_interleave"),
    "size": ("float16", behind(lambda h: h.expand(70_000, 4, 4)), "expand"),
    "bound": ("float16", behind(lambda h: h.clamp(max=100.0)), "clamp"),
    "eps that fp16 has": ("float16", normalised(1e-4), "add"),
    "eps that bf16 has": ("bfloat16", normalised(1e-8), "add"),
    "eps without a reader": ("float16", behind(lambda h: h + 1e-8), "add"),
    "eps without a division": ("float16", behind(lambda h: (h + 1e-8).tanh()), "add"),
    "bound without a logarithm": ("float16", behind(lambda h: h.clamp(min=1e-12) * 2), "clamp"),
    **{
        f"{name} in {dtype}": (dtype, behind(program), op)
        for dtype in ("float16", "bfloat16")
        for name, program, op in (
            ("exponential added to", lambda h: h.exp() + 1, "exp"),
            ("largest exponential", lambda h: h.exp().amax(), "exp"),
            ("exponential of a sum", lambda h: h.sum().exp(), "sum"),
        )
    },
}


@pytest.mark.parametrize(("kind", "name"), [(k, name) for k, cases in HAZARDS.items() for name in cases])
def test_a_hazard_runs_in_fp32_and_says_why(kind: ReasonKind, name: str) -> None:
    dtype, program, op = HAZARDS[kind][name]
    row = constrained(program, op, X, W, dtype=dtype)
    assert row.op_class is OpClass.FP32
    assert row.is_because(kind)


@pytest.mark.parametrize("name", HARMLESS)
def test_a_near_miss_does_not(name: str) -> None:
    dtype, program, op = HARMLESS[name]
    row = constrained(program, op, X, W, dtype=dtype)
    assert row.op_class in (OpClass.PROMOTE, OpClass.FOLLOW)
    assert not any(row.is_because(kind) for kind in HAZARDS)


def test_a_mask_that_autocast_cannot_write_works() -> None:
    with pytest.raises(RuntimeError, match="cannot be converted"), torch.autocast("cpu", FP16):
        filled(FP32_MIN)(X, W)
    dtypes = {"matmul": "float16", "masked_fill": "float32", "softmax": "float32"}
    options = {"dtype": "float16"}
    check(filled(FP32_MIN), X, W, options=options, casts=TO_FP16, dtypes=dtypes, tolerance=ONE_ROUNDING)


def test_the_range_of_another_low_dtype_counts_where_its_values_come() -> None:
    def program(q: Tensor, k: Tensor) -> Tensor:
        scores = torch.matmul(q, k)
        with torch.autocast("cpu", BF16):
            return scores.relu().masked_fill(LATER, -1e9)

    assert rewrite(program, X, W, options={"dtype": "float16"}).dtypes("masked_fill") == ["float32"]


def test_a_zero_row_is_not_divided_by_zero() -> None:
    x = X.clone()
    x[0] = 0
    with torch.autocast("cpu", FP16):
        assert normalised(1e-8)(x, W).isnan().any()
    dtypes = {"matmul": "float16", "add": "float32", "div": "float32"}
    options = {"dtype": "float16"}
    check(normalised(1e-8), x, W, options=options, casts=TO_FP16, dtypes=dtypes, tolerance=ONE_ROUNDING)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_exponentials_that_are_summed_run_in_fp32(dtype: str) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        e = torch.matmul(x, w).exp()
        return e / e.sum(-1, keepdim=True)

    casts = {("float32", dtype): 2, (dtype, "float32"): 1}
    dtypes = {"matmul": dtype, "exp": "float32", "sum": "float32", "div": "float32"}
    check(program, X, W, options={"dtype": dtype}, casts=casts, dtypes=dtypes)
    assert constrained(program, "exp", X, W, dtype=dtype).is_because(ReasonKind.EXP_SUM)


def test_under_eager_numerics_only_what_eager_cannot_compute_moves() -> None:
    eager = {"dtype": "float16", "numerics": "eager"}
    assert constrained(filled(FP32_MIN), "masked_fill", X, W, **eager).op_class is OpClass.FP32
    assert constrained(normalised(1e-8), "add", X, W, **eager).op_class is OpClass.PROMOTE


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_positions_in_a_matmul_stay_exact(dtype: str) -> None:
    def angles(inv_freq: Tensor) -> Tensor:
        t = torch.arange(2048, device=inv_freq.device).float()
        return torch.matmul(t[:, None], inv_freq[None, :]).cos()

    inv_freq, how = 1 / 10_000 ** (torch.arange(8) / 8), {"reference": torch.float32, "tolerance": 0}
    check(angles, inv_freq, options={"dtype": dtype}, casts={}, dtypes={"matmul": "float32"}, **how)


def test_positions_offset_and_scaled_are_still_positions() -> None:
    def angles(x: Tensor, inv_freq: Tensor) -> Tensor:
        t = (torch.arange(512) + 3).to(inv_freq.dtype) / 2.0
        return torch.matmul(t.unsqueeze(1), inv_freq.unsqueeze(0)).sin() + x

    row = constrained(angles, "matmul", torch.randn(512, 4), torch.randn(4), dtype="bfloat16")
    assert row.is_because(ReasonKind.POSITIONS)


READS: dict[str, Program] = {
    "learned embedding": lambda x: x + F.embedding(torch.arange(4), torch.randn(16, 4)),
    "rows picked": lambda x: x[torch.arange(3)],
    "mask": lambda x: torch.where(torch.arange(4)[:, None] >= torch.arange(4)[None, :], x, 0.0),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_positions_pick_or_mask_is_no_position(read: Program) -> None:
    row = constrained(lambda x, w: F.linear(read(x), w), "linear", X, W, dtype="bfloat16")
    assert row.op_class is OpClass.LOW


def test_relu_in_place_stays_in_the_low_dtype() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    x, dtypes = torch.randn(2, 8, requires_grad=True), {"relu_": "bfloat16", "linear": "bfloat16"}
    check(model, x, casts={DOWN: 5, UP: 1}, dtypes=dtypes)


@checked(X, W, casts={DOWN: 2, UP: 1}, dtypes={"add_": "bfloat16"})
def test_a_residual_added_in_place_to_a_low_value_runs_low(x: Tensor, w: Tensor) -> Tensor:
    y = torch.matmul(x, w)
    y += x
    return y


# the kernel widens what it adds: no cast back
@checked(X, W, casts={DOWN: 2}, dtypes={"add_": "float32", "mul": "float32"})
def test_a_residual_added_in_place_to_an_fp32_value_runs_in_fp32(x: Tensor, w: Tensor) -> Tensor:
    y = x * 2
    y += torch.matmul(x, w)
    return y


@checked(X, W, casts={DOWN: 2, UP: 1}, dtypes={"copy_": "float32"}, reference=torch.float32)
def test_a_slice_assignment_casts_what_is_assigned_not_the_target(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros(4, 8)
    out[:, :4] = torch.matmul(x, w)
    return out


@checked(X, W, casts={DOWN: 2, UP: 1}, dtypes={"mul_": "bfloat16", "select": "bfloat16", "add": "float32"})
def test_a_view_of_a_mutated_tensor_shows_the_mutation(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.matmul(x, w)
    row = h[0]
    h.mul_(2)
    return row + x, h @ w


@checked(X, W, casts={DOWN: 2, UP: 1}, dtypes={"matmul": "bfloat16"})
def test_a_write_through_a_view_reaches_its_base(x: Tensor, w: Tensor) -> Tensor:
    h = torch.matmul(x, w)
    first, _ = h.chunk(2)
    first.add_(x[:2])
    return h * 2


CACHE, INDEX = torch.zeros(16, 4), torch.arange(3, 7)
CACHED = {"index_copy_": "float32", "matmul": "bfloat16"}


# the key goes back up to be stored; the cache goes down to be read
# autocast raises: it does not cast what is written in place
@checked(CACHE, INDEX, X, W, casts={DOWN: 3, UP: 2}, dtypes=CACHED, tolerance=ONE_ROUNDING)
def test_a_key_value_cache_is_written_in_its_own_dtype(*args: Tensor) -> Tensor:
    cache, index, x, w = args
    key = torch.matmul(x, w)
    cache.index_copy_(0, index, key)
    return torch.matmul(key, cache.mT)


def test_a_cache_that_came_in_low_precision_is_written_without_a_detour() -> None:
    def program(cache: Tensor, index: Tensor, x: Tensor, w: Tensor) -> Tensor:
        key = torch.matmul(x, w)
        cache.index_copy_(0, index, key.to(cache.dtype))
        return torch.matmul(key, cache.to(key.dtype).mT)

    assert rewrite(program, CACHE.to(BF16), INDEX, X, W).one("index_copy_").dtype is BF16


@checked(X, W, casts={DOWN: 2, UP: 1})
def test_an_output_that_is_a_view_of_an_input_stays_one(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.view(-1), torch.matmul(x.view(4, 4), w)


@checked(X, W, casts={DOWN: 3, UP: 1})
def test_an_input_that_is_mutated_and_returned_stays_itself(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    x.add_(torch.matmul(x, w))
    return x.mT, torch.matmul(x, w)


@pytest.mark.parametrize("name", ["view_as", "reshape_as", "expand_as"])
def test_a_written_view_in_the_shape_of_another_value_has_the_dtype_of_its_own_storage(name: str) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h = torch.matmul(x, w)
        getattr(h, name)(x).mul_(2)
        return h

    check(program, X, W, casts={DOWN: 2, UP: 1}, dtypes=dict.fromkeys(("matmul", name, "mul_"), "bfloat16"))


def test_a_hazard_in_a_write_lifts_the_storage_it_writes_to() -> None:
    def program(q: Tensor, k: Tensor) -> Tensor:
        scores = torch.matmul(q, k)
        scores.masked_fill_(LATER, FP32_MIN)
        return F.softmax(scores, -1)

    dtypes = {"matmul": "float16", "softmax": "float32"}
    check(program, X, W, options={"dtype": "float16"}, casts=TO_FP16, dtypes=dtypes, tolerance=ONE_ROUNDING)


def test_a_hazard_in_what_the_program_has_in_16_bits_and_writes_to() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h = torch.matmul(x, w)
        scale = (h.abs() + 1e-8).rsqrt()
        same = scale.to(h)
        scale.add_(h)
        return same

    casts = {("float32", "float16"): 3, ("float16", "float32"): 1}
    check(program, X, W, ambient=FP16, casts=casts, dtypes={"add": "float32"}, tolerance=ONE_ROUNDING)


@checked(X, W, casts={DOWN: 2, UP: 1}, dtypes={"matmul": "bfloat16", "as_strided": "float32"})
def test_a_strided_view_keeps_the_layout_it_counts_on(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(x, w).as_strided((3, 2), (4, 1)) * 2


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_keeps_its_statistics_in_fp32(training: bool) -> None:
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(inplace=True)).train(training)
    x = torch.randn(2, 4, 9, requires_grad=True)
    rewritten = check(model, x, casts={DOWN: 3, UP: 1}, dtypes={"conv1d": "bfloat16"})
    statistics = [n for n in rewritten.gm.graph.find_nodes(op="placeholder") if "running" in n.name]
    assert len(statistics) == 2
    assert {user.target for n in statistics for user in n.users} == {torch.ops.aten.batch_norm.default}
