"""Hazards that op lists cannot see, each with a near miss, and storages that must not be re-typed alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_fx.passes import Constrain
from amp_fx.plans.label import Kind
from amp_fx.plans.plan import NodePlan
from amp_fx.policy import OpClass
from checks import check, checked
from graphs import rewrite, run_until

BF16, FP16 = torch.bfloat16, torch.float16
DOWN, UP = ("float32", "bfloat16"), ("bfloat16", "float32")
FP32_MIN = torch.finfo(torch.float32).min
#: bounds the error of fp32 arithmetic behind one rounding to a 16-bit dtype, where autocast has no answer
ONE_ROUNDING = 1e-2

Program = Callable[..., object]


def constrained(program: Program, op: str, *args: Tensor, dtype: str, numerics: str = "compiled") -> NodePlan:
    options = {"dtype": dtype, "numerics": numerics}
    return run_until(Constrain, program, *args, options=options).one(op)


def square() -> Tensor:
    return torch.randn(4, 4)


def behind_a_matmul(program: Program, op: str, *more: Tensor, dtype: str) -> NodePlan:
    def multiplied(x: Tensor, w: Tensor, *more: Tensor) -> object:
        return program(torch.matmul(x, w), *more)

    return constrained(multiplied, op, square(), square(), *more, dtype=dtype)


# ---- scalar-range ----


def masked(fill: float) -> Program:
    def program(q: Tensor, k: Tensor) -> Tensor:
        scores = torch.matmul(q, k)
        return F.softmax(scores.masked_fill(torch.ones(4, 4).triu(1).bool(), fill), -1)

    return program


@pytest.mark.parametrize(
    ("dtype", "fill", "hazard"),
    [
        ("float16", FP32_MIN, True),
        ("float16", -1e9, True),
        ("float16", -65504.0, False),
        ("float16", -1e4, False),
        ("float16", float("-inf"), False),
        ("bfloat16", FP32_MIN, True),
        ("bfloat16", -1e9, False),
        ("bfloat16", torch.finfo(BF16).min, False),
        ("bfloat16", float("-inf"), False),
    ],
)
def test_a_fill_beyond_the_low_range_is_written_in_fp32(dtype: str, fill: float, hazard: bool) -> None:
    row = constrained(masked(fill), "masked_fill", square(), square(), dtype=dtype)
    assert row.op_class is (OpClass.FP32 if hazard else OpClass.PROMOTE)
    assert row.is_because(Kind.SCALAR_RANGE) is hazard


def test_a_mask_that_autocast_cannot_write_works() -> None:
    with pytest.raises(RuntimeError, match="cannot be converted"), torch.autocast("cpu", FP16):
        masked(FP32_MIN)(square(), square())
    check(
        masked(FP32_MIN),
        square(),
        square(),
        options={"dtype": "float16"},
        casts={("float32", "float16"): 2, ("float16", "float32"): 1},
        dtypes={"matmul": "float16", "masked_fill": "float32", "softmax": "float32"},
        tolerance=ONE_ROUNDING,
    )


def test_the_range_of_another_low_dtype_counts_where_its_values_come() -> None:
    def program(q: Tensor, k: Tensor) -> Tensor:
        scores = torch.matmul(q, k)
        with torch.autocast("cpu", BF16):
            return scores.relu().masked_fill(torch.ones(4, 4).triu(1).bool(), -1e9)

    assert rewrite(program, square(), square(), options={"dtype": "float16"}).dtypes("masked_fill") == [
        "float32"
    ]


@pytest.mark.parametrize(
    ("program", "op"),
    [
        (lambda h, m: torch.where(m > 0, h, -1e9), "where"),
        (lambda h, m: torch.where(m > 0, h, torch.tensor(-1e9)), "where"),
        (lambda h, m: h + 1e6, "add"),
        (lambda h, m: h.clamp(max=1e5), "clamp"),
        (lambda h, m: (1.0 - m) * -1e9 + h, "mul"),
    ],
)
def test_any_number_beyond_fp16_counts(program: Callable[[Tensor, Tensor], Tensor], op: str) -> None:
    assert behind_a_matmul(program, op, square(), dtype="float16").is_because(Kind.SCALAR_RANGE)


@pytest.mark.parametrize(
    ("program", "op"),
    [
        (lambda h: h[1:], "slice"),
        (lambda h: h.repeat_interleave(70_000, 0), "repeat_interleave"),
        (lambda h: h.expand(70_000, 4, 4), "expand"),
        (lambda h: h.clamp(max=100.0), "clamp"),
    ],
)
def test_sizes_and_positions_are_not_numbers_to_compute_with(
    program: Callable[[Tensor], Tensor], op: str
) -> None:
    assert not behind_a_matmul(program, op, dtype="float16").is_because(Kind.SCALAR_RANGE)


# ---- tiny-eps ----


def normalised(eps: float) -> Program:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h = torch.matmul(x, w)
        return h / (h.norm(dim=-1, keepdim=True) + eps)

    return program


@pytest.mark.parametrize(
    ("dtype", "eps", "hazard"),
    [
        ("float16", 1e-8, True),
        ("float16", 1e-5, True),
        ("float16", 1e-4, False),
        ("bfloat16", 1e-8, False),
        ("bfloat16", 1e-39, True),
    ],
)
def test_an_eps_that_vanishes_before_a_division_is_added_in_fp32(
    dtype: str, eps: float, hazard: bool
) -> None:
    row = constrained(normalised(eps), "add", square(), square(), dtype=dtype)
    assert row.is_because(Kind.TINY_EPS) is hazard
    assert (row.op_class is OpClass.FP32) is hazard


def test_a_zero_row_is_not_divided_by_zero() -> None:
    x = square()
    x[0] = 0
    with torch.autocast("cpu", FP16):
        assert normalised(1e-8)(x, square()).isnan().any()  # pyright: ignore[reportAttributeAccessIssue]
    check(
        normalised(1e-8),
        x,
        square(),
        options={"dtype": "float16"},
        casts={("float32", "float16"): 2, ("float16", "float32"): 1},
        dtypes={"matmul": "float16", "add": "float32", "div": "float32"},
        tolerance=ONE_ROUNDING,
    )


@pytest.mark.parametrize(
    ("program", "op", "hazard"),
    [
        (lambda h: h + 1e-8, "add", False),
        (lambda h: (h + 1e-8).tanh(), "add", False),
        (lambda h: (h.square() + 1e-8).view(-1).rsqrt(), "add", True),
        (lambda h: h.clamp(min=1e-12).log(), "clamp", True),
        (lambda h: h.clamp(min=1e-12) * 2, "clamp", False),
    ],
)
def test_only_a_division_makes_an_eps_matter(
    program: Callable[[Tensor], Tensor], op: str, hazard: bool
) -> None:
    assert behind_a_matmul(program, op, dtype="float16").is_because(Kind.TINY_EPS) is hazard


# ---- exp-sum ----


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_exponentials_that_are_summed_run_in_fp32(dtype: str) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        e = torch.matmul(x, w).exp()
        return e / e.sum(-1, keepdim=True)

    check(
        program,
        square(),
        square(),
        options={"dtype": dtype},
        casts={("float32", dtype): 2, (dtype, "float32"): 1},
        dtypes={"matmul": dtype, "exp": "float32", "sum": "float32", "div": "float32"},
    )
    assert constrained(program, "exp", square(), square(), dtype=dtype).is_because(Kind.EXP_SUM)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("program", "op"),
    [(lambda h: h.exp() + 1, "exp"), (lambda h: h.exp().amax(), "exp"), (lambda h: h.sum().exp(), "sum")],
)
def test_exponentials_that_are_not_summed_do_not(
    program: Callable[[Tensor], Tensor], op: str, dtype: str
) -> None:
    assert behind_a_matmul(program, op, dtype=dtype).op_class is OpClass.PROMOTE


# ---- positions ----


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_positions_in_a_matmul_stay_exact(dtype: str) -> None:
    def angles(inv_freq: Tensor) -> Tensor:
        t = torch.arange(2048, device=inv_freq.device).float()
        return torch.matmul(t[:, None], inv_freq[None, :]).cos()

    check(
        angles,
        1 / 10_000 ** (torch.arange(8) / 8),
        options={"dtype": dtype},
        casts={},
        dtypes={"matmul": "float32"},
        reference=torch.float32,
        tolerance=0,
    )


def test_positions_offset_and_scaled_are_still_positions() -> None:
    def angles(x: Tensor, inv_freq: Tensor) -> Tensor:
        t = (torch.arange(512) + 3).to(inv_freq.dtype) / 2.0
        return torch.matmul(t.unsqueeze(1), inv_freq.unsqueeze(0)).sin() + x

    row = constrained(angles, "matmul", torch.randn(512, 4), torch.randn(4), dtype="bfloat16")
    assert row.is_because(Kind.POSITIONS)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x + F.embedding(torch.arange(4), torch.randn(16, 4)),
        lambda x: x[torch.arange(3)],
        lambda x: torch.where(torch.arange(4)[:, None] >= torch.arange(4)[None, :], x, 0.0),
    ],
    ids=["learned embedding", "rows picked", "mask"],
)
def test_what_positions_pick_or_mask_is_no_position(read: Callable[[Tensor], Tensor]) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.linear(read(x), w)

    assert constrained(program, "linear", square(), square(), dtype="bfloat16").op_class is OpClass.LOW


# ---- numerics="eager" ----


def test_under_eager_numerics_only_what_eager_cannot_compute_moves() -> None:
    eager = {"dtype": "float16", "numerics": "eager"}
    assert constrained(masked(FP32_MIN), "masked_fill", square(), square(), **eager).op_class is OpClass.FP32
    assert constrained(normalised(1e-8), "add", square(), square(), **eager).op_class is OpClass.PROMOTE


# ---- storages ----


def test_relu_in_place_stays_in_the_low_dtype() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(inplace=True), nn.Linear(8, 4))
    check(
        model,
        torch.randn(2, 8, requires_grad=True),
        casts={DOWN: 5, UP: 1},
        dtypes={"relu_": "bfloat16", "linear": "bfloat16"},
    )


def test_a_residual_added_in_place_runs_in_the_dtype_of_its_target() -> None:
    def into_low(x: Tensor, w: Tensor) -> Tensor:
        y = torch.matmul(x, w)
        y += x
        return y

    def into_fp32(x: Tensor, w: Tensor) -> Tensor:
        y = x * 2
        y += torch.matmul(x, w)
        return y

    down = {DOWN: 2}
    check(into_low, square(), square(), casts={**down, UP: 1}, dtypes={"add_": "bfloat16"})
    # the kernel widens what it adds: no cast back
    check(into_fp32, square(), square(), casts=down, dtypes={"add_": "float32", "mul": "float32"})


@checked(square(), square(), casts={DOWN: 2, UP: 1}, dtypes={"copy_": "float32"}, reference=torch.float32)
def test_a_slice_assignment_casts_what_is_assigned_not_the_target(x: Tensor, w: Tensor) -> Tensor:
    out = torch.zeros(4, 8)
    out[:, :4] = torch.matmul(x, w)
    return out


@checked(
    square(),
    square(),
    casts={DOWN: 2, UP: 1},
    dtypes={"mul_": "bfloat16", "select": "bfloat16", "add": "float32"},
)
def test_a_view_of_a_mutated_tensor_shows_the_mutation(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    h = torch.matmul(x, w)
    row = h[0]
    h.mul_(2)
    return row + x, h @ w


@checked(square(), square(), casts={DOWN: 2, UP: 1}, dtypes={"matmul": "bfloat16"})
def test_a_write_through_a_view_reaches_its_base(x: Tensor, w: Tensor) -> Tensor:
    h = torch.matmul(x, w)
    first, _ = h.chunk(2)
    first.add_(x[:2])
    return h * 2


# the key goes back up to be stored; the cache goes down to be read
# autocast raises: it does not cast what is written in place
@checked(
    torch.zeros(16, 4),
    torch.tensor([3, 4, 5, 6]),
    square(),
    square(),
    casts={DOWN: 3, UP: 2},
    dtypes={"index_copy_": "float32", "matmul": "bfloat16"},
    tolerance=ONE_ROUNDING,
)
def test_a_key_value_cache_is_written_in_its_own_dtype(
    cache: Tensor, position: Tensor, x: Tensor, w: Tensor
) -> Tensor:
    key = torch.matmul(x, w)
    cache.index_copy_(0, position, key)
    return torch.matmul(key, cache.mT)


def test_a_cache_that_came_in_low_precision_is_written_without_a_detour() -> None:
    def program(cache: Tensor, position: Tensor, x: Tensor, w: Tensor) -> Tensor:
        key = torch.matmul(x, w)
        cache.index_copy_(0, position, key.to(cache.dtype))
        return torch.matmul(key, cache.to(key.dtype).mT)

    rewritten = rewrite(program, torch.zeros(16, 4, dtype=BF16), torch.arange(4), square(), square())
    assert rewritten.one("index_copy_").dtype is BF16


@checked(square(), square(), casts={DOWN: 2, UP: 1})
def test_an_output_that_is_a_view_of_an_input_stays_one(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    return x.view(-1), torch.matmul(x.view(4, 4), w)


@checked(square(), square(), casts={DOWN: 3, UP: 1})
def test_an_input_that_is_mutated_and_returned_stays_itself(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    x.add_(torch.matmul(x, w))
    return x.mT, torch.matmul(x, w)


@pytest.mark.parametrize("name", ["view_as", "reshape_as", "expand_as"])
def test_a_written_view_in_the_shape_of_another_value_has_the_dtype_of_its_own_storage(name: str) -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        h = torch.matmul(x, w)
        getattr(h, name)(x).mul_(2)
        return h

    check(
        program,
        square(),
        square(),
        casts={DOWN: 2, UP: 1},
        dtypes={"matmul": "bfloat16", name: "bfloat16", "mul_": "bfloat16"},
    )


@checked(
    square(),
    square(),
    torch.ones(4, 4).triu(1).bool(),
    options={"dtype": "float16"},
    casts={("float32", "float16"): 2, ("float16", "float32"): 1},
    dtypes={"matmul": "float16", "softmax": "float32"},
    tolerance=ONE_ROUNDING,
)
def test_a_hazard_in_a_write_lifts_the_storage_it_writes_to(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    scores = torch.matmul(q, k)
    scores.masked_fill_(mask, FP32_MIN)
    return F.softmax(scores, -1)


@checked(square(), square(), casts={DOWN: 2, UP: 1}, dtypes={"matmul": "bfloat16", "as_strided": "float32"})
def test_a_strided_view_keeps_the_layout_it_counts_on(x: Tensor, w: Tensor) -> Tensor:
    return torch.matmul(x, w).as_strided((3, 2), (4, 1)) * 2


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_keeps_its_statistics_in_fp32(training: bool) -> None:
    model = nn.Sequential(nn.Conv1d(4, 8, 3), nn.BatchNorm1d(8), nn.ReLU(inplace=True)).train(training)
    rewritten = check(
        model, torch.randn(2, 4, 9, requires_grad=True), casts={DOWN: 3, UP: 1}, dtypes={"conv1d": "bfloat16"}
    )
    statistics = [n for n in rewritten.gm.graph.find_nodes(op="placeholder") if "running" in n.name]
    assert len(statistics) == 2
    assert {user.target for n in statistics for user in n.users} == {torch.ops.aten.batch_norm.default}
