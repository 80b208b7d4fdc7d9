"""Every call gets its class: from the program, the user's autocast, rules, or the device's list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from amp_fx.graphs.keys import TIED
from amp_fx.passes import Classify, PinDtypes
from amp_fx.precision.plans.label import ReasonKind, Takes
from amp_fx.precision.policy import OpClass
from support.checks.whole_program import check
from support.tracing.captured_graphs import Rewritten, plans, run_until

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
X, W = torch.randn(4, 4), torch.randn(4, 4)

Program = Callable[..., Any]


def classified(program: Program, *args: Tensor, **how: Any) -> Rewritten:
    return run_until(Classify, program, *args, **how)


def in_an_island(x: Tensor, w: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return torch.matmul(x, w)


def written(x: Tensor, w: Tensor) -> Tensor:
    y = torch.matmul(x, w)
    y.add_(x)
    y.clamp_(min=0)
    return y


FP32_EVERYWHERE = {"policy": {"rules": [{"module": ".*", "precision": "fp32"}]}}
CUDA = {"device": "cuda"}
FAST: dict[str, Any] = {"options": {"policy": "fast"}, "device": "cuda"}

#: what it is about -> program, op, its arguments, how else it is captured; class, what it takes, dtype and why
CASES: dict[str, tuple[Program, str, tuple[Tensor, ...], dict[str, Any], str]] = {
    "an element of a call": (lambda x: x.topk(2)[0], "getitem", (X,), {}, "follow, takes any, None, element"),
    "a cast": (lambda x: x.to(BF16), "to", (X,), {}, "keep, takes any, bfloat16, cast"),
    "a cast by name": (lambda x: x.half(), "to", (X,), {}, "keep, takes any, float16, cast"),
    "a cast like another": (
        lambda x: x.type_as(torch.ones((), dtype=BF16)), "to", (X,), {}, "keep, takes any, bfloat16, cast"
    ),
    "a sum in fp32": (lambda x: x.sum(dtype=FP32), "sum", (X,), {}, "keep, takes any, float32, names-dtype"),
    "a softmax in fp32": (
        lambda x: F.softmax(x, -1, dtype=FP32), "softmax", (X,), {}, "keep, takes any, float32, names-dtype"
    ),
    "the same on CUDA": (
        lambda x: F.softmax(x, -1, dtype=FP32), "softmax", (X,), CUDA, "keep, takes any, float32, names-dtype"
    ),
    "a softmax on CUDA": (lambda x: F.softmax(x, -1), "softmax", (X,), CUDA, "fp32, takes dtype, None, listed"),
    "zeros like": (lambda x: torch.zeros_like(x), "zeros_like", (X,), {}, "keep, takes any, float32, names-dtype"),
    "zeros": (lambda x: torch.zeros(4) + x, "zeros", (X,), {}, "keep, takes any, float32, names-dtype"),
    "ones after another": (lambda x: x.new_ones(3), "new_ones", (X,), {}, "keep, takes any, float32, names-dtype"),
    "an island": (in_an_island, "matmul", (X, W), {}, "keep, takes traced, float32, autocast-disabled"),
    "a product that the program lowered": (
        lambda x, w: x.to(FP16) @ w.to(FP16), "matmul", (X, W), {}, "keep, takes traced, float16, low-already"
    ),
    "a norm that it lowered": (
        lambda x: F.layer_norm(x.to(FP16), (4,)), "layer_norm", (X,), {}, "keep, takes traced, float16, low-already"
    ),
    "one argument in fp32": (lambda x, w: x.to(BF16) * w, "mul", (X, W), {}, "promote, takes mixed, None, listed"),
    "low values in the user's autocast": (
        lambda x, w: F.mse_loss(x.to(BF16), w.to(BF16)), "mse_loss", (X, W), {"ambient": BF16},
        "fp32, takes dtype, None, listed",
    ),
    "a write by a kernel that promotes": (written, "add_", (X, W), {}, "promote, takes mixed, None, writes-in-place"),
    "a write by one that does not": (written, "clamp_", (X, W), {}, "promote, takes self, None, writes-in-place"),
    "a write that a rule is about": (
        lambda x, w: torch.matmul(x, w).relu_(), "relu_", (X, W), {"options": FP32_EVERYWHERE},
        "promote, takes self, None, writes-in-place",
    ),
    "no list": (lambda x: torch.unique(x, dim=0), "unique_dim", (X,), {}, "keep, takes traced, float32, unlisted"),
    "a listed op": (lambda x, w: torch.matmul(x, w), "matmul", (X, W), {}, "low, takes dtype, None, listed"),
    "a softmax under fast": (
        lambda x: F.softmax(x, -1), "softmax", (X,), FAST, "promote, takes dtype, None, listed, fast-low-io"
    ),
    "a norm under fast": (
        lambda x: F.group_norm(x, 2), "group_norm", (X,), FAST, "promote, takes dtype, None, listed, fast-low-io"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_class_of_a_call_and_why(name: str) -> None:
    program, op, args, how, expected = CASES[name]
    row = plans(classified(program, *args, **how).plan, op)[0]
    kinds = ", ".join(reason.kind.value for reason in row.reasons)
    found = f"{row.op_class.value}, takes {row.takes}, {row.dtype}, {kinds}"
    assert found.replace("torch.", "") == expected


@pytest.mark.parametrize("dtype", [torch.int64, torch.float64, torch.complex64, torch.bool])
def test_tensors_that_autocast_may_not_retype_are_kept(dtype: torch.dtype) -> None:
    args = torch.ones(4, dtype=dtype), torch.ones(4)
    row = classified(lambda x, y: (torch.cat([x, x]), y.exp()), *args).one("cat")
    assert (row.op_class, row.dtype, row.traced) == (OpClass.KEEP, None, None)


def test_what_is_written_is_tied_to_what_it_writes_to() -> None:
    nodes = classified(written, X, W).gm.graph.nodes
    assert [node.name for node in nodes if node.meta.get(TIED)] == ["add_", "clamp_"]


def test_batch_norm_writes_its_statistics_and_is_still_a_listed_op() -> None:
    args = torch.randn(4, 8, 2), torch.zeros(8), torch.ones(8)
    found = classified(lambda x, mean, var: F.batch_norm(x, mean, var, training=True), *args)
    row = found.one("batch_norm")
    assert row.op_class is OpClass.PROMOTE
    assert not any(TIED in node.meta for node in found.gm.graph.nodes)
    assert row.own_dtype_slots == ("weight", "bias", "running_mean", "running_var")


def test_a_plan_row_says_where_it_comes_from() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x, w)  # this line

    row = classified(program, X, W).one("matmul")
    assert (row.low, row.traced, row.dtype, row.takes) == (BF16, torch.float32, None, Takes.DTYPE)
    assert row.source.endswith("return torch.matmul(x, w)  # this line")
    (reason,) = row.reasons
    assert reason.kind is ReasonKind.LISTED
    assert "listed by CPU autocast" in reason.values["why"]


# ---- before that, what a program only implies about dtypes is written down ----

WIDE, INTEGERS = torch.randn(4, 4, dtype=torch.float64), torch.ones(4, dtype=torch.int64)
#: how a tensor is made or converted -> program, its arguments, the op that is left and the dtype that it names
PINNED: dict[str, tuple[Program, tuple[Tensor, ...], str, torch.dtype | None]] = {
    "zeros_like": (lambda x: torch.zeros_like(x), (X,), "zeros_like.default", FP32),
    "ones_like": (lambda x: torch.ones_like(x), (X,), "ones_like.default", FP32),
    "empty_like": (lambda x: torch.empty_like(x), (X,), "empty_like.default", FP32),
    "rand_like": (lambda x: torch.rand_like(x), (X,), "rand_like.default", FP32),
    "randn_like": (lambda x: torch.randn_like(x), (X,), "randn_like.default", FP32),
    "full_like": (lambda x: torch.full_like(x, 2.0), (X,), "full_like.default", FP32),
    "randint_like": (lambda x: torch.randint_like(x, 9), (X,), "randint_like.default", FP32),
    "new_zeros": (lambda x: x.new_zeros(3), (X,), "new_zeros.default", FP32),
    "new_ones": (lambda x: x.new_ones(3), (X,), "new_ones.default", FP32),
    "new_empty": (lambda x: x.new_empty(3), (X,), "new_empty.default", FP32),
    "new_full": (lambda x: x.new_full((3,), 1.5), (X,), "new_full.default", FP32),
    "with a dtype": (lambda x: torch.zeros_like(x, dtype=BF16), (X,), "zeros_like.default", BF16),
    "of integers": (lambda x: torch.zeros_like(x), (INTEGERS,), "zeros_like.default", None),
    "type_as": (lambda y, x: y.type_as(x), (WIDE, X), "to.dtype", FP32),
    "to a dtype": (lambda y, x: y.to(x.dtype), (WIDE, X), "to.dtype", FP32),
    "float": (lambda y, x: y.float(), (WIDE, X), "to.dtype", FP32),
    "type": (lambda y, x: y.type(torch.float32), (WIDE, X), "to.dtype", FP32),
    "to another tensor": (lambda y, x: y.to(x), (WIDE, X), "to.device", FP32),
}


@pytest.mark.parametrize("name", PINNED)
def test_creation_after_a_tensor_and_conversions_name_their_dtype(name: str) -> None:
    program, args, op, dtype = PINNED[name]
    (node,) = run_until(PinDtypes, program, *args).gm.graph.output_node().all_input_nodes
    dtypes = [value for value in (*node.args, *node.kwargs.values()) if isinstance(value, torch.dtype)]
    assert (str(node.target), dtypes) == (f"aten.{op}", [dtype] if dtype else [])


def test_what_follows_a_retyped_tensor_keeps_its_traced_dtype() -> None:
    def program(x: Tensor, w: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.matmul(x, w)
        return torch.zeros_like(h), y.to(torch.float64).type_as(h)

    check(program, X, W, X, casts={("float32", "bfloat16"): 2}, reference=torch.float32)
