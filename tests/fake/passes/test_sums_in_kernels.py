"""What counts, adds up or factorises inside a kernel that has the dtype of its input alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.policy import OpClass
from support.checks.whole_program import agree
from support.tracing.captured_graphs import rewrite

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
COUNT = 4096
X, W = torch.rand(64, 16), torch.rand(16, 64)
FIRST, LENGTHS = torch.zeros(COUNT, dtype=torch.int64), torch.tensor([COUNT])

Program = Callable[[Tensor, Tensor], Any]


def flat(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).view(-1)


#: op -> a program that counts or adds up 4,096 results of a product in one place
SUMS: dict[str, Program] = {
    "histc": lambda x, w: torch.histc(x @ w, 2, 0, 10),
    "segment_reduce": lambda x, w: torch.segment_reduce(flat(x, w), "sum", lengths=LENGTHS),
    "segment_reduce of a mean": lambda x, w: torch.segment_reduce(flat(x, w), "mean", lengths=LENGTHS),
    "index_add": lambda x, w: flat(x, w)[:1].index_add(0, FIRST, flat(x, w)),
    "index_add_": lambda x, w: flat(x, w).clone().index_add_(0, FIRST, flat(x, w)),
    "index_put": lambda x, w: flat(x, w)[:1].index_put((FIRST,), flat(x, w), accumulate=True),
    "index_put_": lambda x, w: flat(x, w).clone().index_put_((FIRST,), flat(x, w), accumulate=True),
    "put": lambda x, w: flat(x, w)[:1].put(FIRST, flat(x, w), accumulate=True),
    "scatter_add": lambda x, w: flat(x, w)[:1].scatter_add(0, FIRST, flat(x, w)),
    "scatter_reduce": lambda x, w: flat(x, w)[:1].scatter_reduce(0, FIRST, flat(x, w), "mean"),
    "index_reduce": lambda x, w: flat(x, w)[:1].index_reduce(0, FIRST, flat(x, w), "mean"),
    "col2im": lambda x, w: F.fold((x @ w)[None].repeat(1, 1, 1), (71, 8), (64, 1)),
}


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("low", [BF16, FP16])
@pytest.mark.parametrize("name", SUMS)
def test_what_a_kernel_adds_up_is_added_in_fp32(name: str, low: torch.dtype) -> None:
    program = SUMS[name]
    rewritten, exact = rewrite(program, X, W, options={"dtype": low}), program(X.double(), W.double())
    assert rewritten.outputs.dtype is FP32
    assert (rewritten.outputs - exact).norm() <= 2 * torch.finfo(low).eps * exact.norm()
    # the products stay low
    assert (
        all(dtype == str(low).removeprefix("torch.") for dtype in rewritten.dtypes("matmul")) or "_" in name
    )


def test_autocast_stops_counting_where_adding_one_changes_nothing() -> None:
    with torch.autocast("cpu", BF16):
        assert torch.histc(X @ W, 2, 0, 10).max() == 256
    assert rewrite(SUMS["histc"], X, W).outputs.sum() == COUNT


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize(
    "program",
    [
        lambda x, w: torch.segment_reduce(flat(x, w), "max", lengths=LENGTHS),
        lambda x, w: flat(x, w).index_reduce(0, FIRST, flat(x, w), "amax"),
        lambda x, w: flat(x, w).scatter_reduce(0, FIRST, flat(x, w), "amin"),
        lambda x, w: flat(x, w).put(FIRST[:1], flat(x, w)[:1]),
        lambda x, w: flat(x, w).index_put((FIRST[:1],), flat(x, w)[:1]),
        lambda x, w: flat(x, w).scatter(0, FIRST[:1], flat(x, w)),
    ],
)
def test_what_adds_nothing_stays_low(program: Program) -> None:
    plan = rewrite(program, X, W).plan
    assert not any(row.op_class is OpClass.FP32 for row in plan.nodes)


def test_as_eager_autocast_rounds_is_as_it_counts() -> None:
    assert rewrite(SUMS["histc"], X, W, options={"numerics": "eager"}).outputs.max() == 256


def test_what_the_programs_own_autocast_made_keeps_its_dtype() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros(1, dtype=BF16)
        return total.index_add_(0, FIRST, flat(x, w))

    assert rewrite(program, X, W, ambient=BF16).outputs.dtype is BF16
    counts = rewrite(SUMS["histc"], X, W, ambient=BF16).outputs
    assert (counts.dtype, counts.sum() > 4000) == (BF16, True)


@pytest.mark.usefixtures("without_inductor")
def test_gradients_through_sums_are_those_of_the_program() -> None:
    agree(
        lambda x, w: flat(x, w)[:1].index_add(0, FIRST, flat(x, w).square()),
        X.clone().requires_grad_(), W.clone().requires_grad_(),
    )  # fmt: skip


# ---- no kernel in 16 bits, for some arguments ----

#: programs with what a factorisation inside has no half kernel for, and the op
FACTORISED: dict[str, tuple[Program, str]] = {
    "the largest singular value": (lambda x, w: torch.linalg.matrix_norm(x @ w, 2), "linalg_matrix_norm"),
    "the smallest": (lambda x, w: torch.linalg.matrix_norm(w @ x + 9 * torch.eye(16), -2.0), "linalg_matrix_norm"),
    "their sum": (lambda x, w: torch.linalg.matrix_norm(x @ w, "nuc"), "linalg_matrix_norm.str_ord"),
    "of a batch": (
        lambda x, w: torch.linalg.norm((x @ w).view(4, 16, 64), 2, dim=(1, 2), keepdim=True), "linalg_norm"
    ),
    "by another name": (lambda x, w: torch.linalg.norm(x @ w, 2), "linalg_norm"),
    "of the old name": (lambda x, w: torch.norm(x @ w, "nuc"), "linalg_matrix_norm.str_ord"),
    "an inverse": (lambda x, w: torch.linalg.matrix_power(w @ x + 9 * torch.eye(16), -1), "linalg_matrix_power"),
    "its square": (lambda x, w: torch.matrix_power(w @ x + 9 * torch.eye(16), -2), "matrix_power"),
    "an exponential": (lambda x, w: torch.matrix_exp(w @ x / 64), "matrix_exp"),
    "of another name": (lambda x, w: torch.linalg.matrix_exp(w @ x / 64), "linalg_matrix_exp"),
}  # fmt: skip


@pytest.mark.usefixtures("without_inductor")
@pytest.mark.parametrize("numerics", ["compiled", "eager"])
@pytest.mark.parametrize("name", FACTORISED)
def test_factorisations_run_in_fp32_and_the_rest_of_the_graph_low(name: str, numerics: str) -> None:
    program, op = FACTORISED[name]
    (plan,) = agree(program, X, W, options={"numerics": numerics}, tolerance=0.02)
    rows = {row.op: row.dtype for row in plan.nodes}
    assert (rows[op], rows["matmul"]) == (FP32, BF16)


@pytest.mark.parametrize("order", ["fro", 1, float("inf")])
def test_other_norms_are_as_the_list_has_them(order: Any) -> None:
    rewritten = rewrite(lambda x, w: torch.linalg.matrix_norm(x @ w, order), X, W)
    (row,) = [row for row in rewritten.plan.nodes if row.op.startswith("linalg_matrix_norm")]
    assert (row.op_class, row.dtype) == (OpClass.PROMOTE, BF16)
    vector = rewrite(lambda x, w: torch.linalg.norm(x @ w, 2, dim=-1), X, W).one("linalg_norm")
    assert not vector.is_because(ReasonKind.NO_KERNEL)
