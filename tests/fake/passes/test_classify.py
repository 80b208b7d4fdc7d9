"""Every call gets its class: from the program, the user's autocast, rules, or the device's list."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from amp_fx.graphs.keys import TIED
from amp_fx.passes import Classify
from amp_fx.plans.label import Kind, Takes
from amp_fx.plans.plan import NodePlan
from amp_fx.policy import OpClass
from graphs import Rewritten, run_until

BF16, FP16 = torch.bfloat16, torch.float16


def classified(program: Callable[..., object], *args: Tensor, **how: object) -> Rewritten:
    return run_until(Classify, program, *args, **how)  # pyright: ignore[reportArgumentType]


def label(program: Callable[..., object], op: str, *args: Tensor, **how: object) -> NodePlan:
    return classified(program, *args, **how).one(op)


def square() -> Tensor:
    return torch.randn(4, 4)


# ---- case 1: not ours ----


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64, torch.bool])
def test_tensors_that_autocast_may_not_retype_are_kept(dtype: torch.dtype) -> None:
    def program(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([x, x]), y.exp()

    row = label(program, "cat", torch.ones(4, dtype=dtype), torch.ones(4))
    assert (row.op_class, row.dtype, row.traced) == (OpClass.KEEP, None, None)


def test_python_arithmetic_on_sizes_is_kept() -> None:
    def program(x: Tensor) -> Tensor:
        return x * (x.shape[0] // 2)

    found = classified(program, torch.randn(6, 2))
    assert all(row.op_class is OpClass.KEEP for row in found.plan.nodes if row.op != "mul.Tensor")


def test_an_element_of_a_call_follows_the_call() -> None:
    def program(x: Tensor) -> Tensor:
        values, _ = x.topk(2)
        return values

    rows = classified(program, square()).plan.nodes
    assert [(row.op, row.op_class, row.takes) for row in rows][1:2] == [
        ("getitem", OpClass.FOLLOW, Takes.ANY)
    ]


# ---- case 2: the program names the dtype ----


@pytest.mark.parametrize(
    ("program", "op"),
    [
        (lambda x: x.to(BF16), "to"),
        (lambda x: x.half(), "to"),
        (lambda x: x.sum(dtype=torch.float32), "sum"),
        (lambda x: F.softmax(x, -1, dtype=torch.float32), "softmax"),
        (lambda x: torch.zeros_like(x), "zeros_like"),
        (lambda x: torch.zeros(4) + x, "zeros"),
        (lambda x: x.new_ones(3), "new_ones"),
        (lambda x: x.type_as(torch.ones((), dtype=BF16)), "to"),
    ],
)
def test_a_dtype_that_the_program_names_stays(program: Callable[[Tensor], Tensor], op: str) -> None:
    row = label(program, op, square())
    assert (row.op_class, row.takes) == (OpClass.KEEP, Takes.ANY)
    assert row.dtype is row.traced


# ---- case 3: islands ----


def test_an_island_keeps_what_its_nodes_were_traced_with() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return torch.matmul(x, w)

    row = label(program, "matmul", square(), square())
    assert (row.op_class, row.takes, row.dtype) == (OpClass.KEEP, Takes.TRACED, torch.float32)
    assert row.is_because(Kind.REGION)


# ---- case 4: what the user lowered ----


def test_a_program_in_low_precision_stays_as_written() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(x.to(FP16) @ w.to(FP16), (4,))

    found = classified(program, square(), square())
    assert found.one("matmul").op_class is OpClass.KEEP
    assert found.one("matmul").dtype is FP16
    assert found.one("layer_norm").is_because(Kind.LOW_ALREADY)


def test_a_call_with_one_fp32_argument_is_ours_again() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return x.to(BF16) * w

    assert label(program, "mul", square(), square()).op_class is OpClass.PROMOTE


def test_under_the_users_autocast_low_values_are_listed_ops_too() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return F.mse_loss(x.to(BF16), w.to(BF16))

    row = label(program, "mse_loss", square(), square(), ambient=BF16)
    assert row.op_class is OpClass.FP32


# ---- case 5: writes ----


def test_a_write_runs_in_the_dtype_of_what_it_writes_to() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = torch.matmul(x, w)
        y.add_(x)
        y.clamp_(min=0)
        return y

    found = classified(program, square(), square())
    # add's kernel promotes its other operand; clamp's takes one dtype
    assert (found.one("add_.Tensor").op_class, found.one("add_.Tensor").takes) == (
        OpClass.PROMOTE,
        Takes.MIXED,
    )
    assert (found.one("clamp_").op_class, found.one("clamp_").takes) == (OpClass.PROMOTE, Takes.SELF)
    assert [TIED.of(node) for node in found.gm.graph.nodes if node.name == "add_"] == [True]


def test_no_rule_reaches_a_write() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x, w).relu_()

    options = {"policy": {"rules": [{"module": ".*", "precision": "fp32"}]}}
    row = label(program, "relu_", square(), square(), options=options)
    assert row.op_class is OpClass.PROMOTE


def test_batch_norm_writes_its_statistics_and_is_still_a_listed_op() -> None:
    def program(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return F.batch_norm(x, mean, var, training=True)

    found = classified(program, torch.randn(4, 8, 2), torch.zeros(8), torch.ones(8))
    row = found.one("batch_norm")
    assert row.op_class is OpClass.PROMOTE
    assert not any(map(TIED.of, found.gm.graph.nodes))
    assert row.own_dtype_slots == ("weight", "bias", "running_mean", "running_var")


# ---- case 6: the lists ----


def test_an_op_that_no_list_names_is_left_as_traced() -> None:
    def program(x: Tensor) -> Tensor:
        return torch.unique(x, dim=0)

    row = classified(program, square()).plan.nodes[0]
    assert (row.op_class, row.dtype) == (OpClass.KEEP, torch.float32)
    assert row.is_because(Kind.UNLISTED)


def test_a_row_that_the_arguments_switch_off_does_not_count() -> None:
    def plain(x: Tensor) -> Tensor:
        return F.softmax(x, -1)

    def named(x: Tensor) -> Tensor:
        return F.softmax(x, -1, dtype=torch.float32)

    assert label(plain, "softmax", square(), device="cuda").op_class is OpClass.FP32
    assert label(named, "softmax", square(), device="cuda").op_class is OpClass.KEEP


def test_a_plan_row_says_where_it_comes_from() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x, w)  # this line

    row = label(program, "matmul", square(), square())
    assert row.low is BF16
    assert row.traced is torch.float32
    assert row.dtype is None
    assert row.source.endswith("return torch.matmul(x, w)  # this line")
    (reason,) = row.reasons
    assert reason.kind is Kind.LISTED
    assert "listed by CPU autocast" in reason.values["why"]
