"""The counters of benchmarks/counts.py and scaler.py on what can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import counts
from benchmarks.arms import ARMS
from benchmarks.counts import Counter, Counts, Row, counting
from benchmarks.scaler import beside, launches
from benchmarks.workloads import Workload
from small_models import UpDown

ROWS, INNER, COLUMNS = 64, 32, 16
#: elements of the operands and of the result of the product that most tests use
LEFT, RIGHT, RESULT = ROWS * INNER, INNER * COLUMNS, ROWS * COLUMNS
FP32, BF16 = 4, 2


def run(function: Callable[..., Tensor], *args: Tensor, autocast: bool = False, **settings: Any) -> Counter:
    """Compiles and runs, with the backward if something wants a gradient."""
    with counting() as counter:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = torch.compile(function, **settings)(*args)
        if result.requires_grad:
            result.sum().backward()
    return counter


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def operands(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    first, second = torch.randn(ROWS, INNER), torch.randn(INNER, COLUMNS)
    return first.requires_grad_(requires_grad), second.requires_grad_(requires_grad)


def test_a_product_under_autocast_casts_both_operands() -> None:
    counter = run(product, *operands(), autocast=True)
    cast_bytes = (LEFT + RIGHT) * (FP32 + BF16)
    product_bytes = (LEFT + RIGHT + RESULT) * BF16
    kinds = {"conversions": 2, "casts": 2, "generated_kernels": 2, "extern_kernels": 1}
    moved = {
        "bytes_moved": cast_bytes + product_bytes,
        "conversion_bytes": cast_bytes,
        "cast_bytes": cast_bytes,
    }
    assert counter.total == Counts(**kinds, **moved)


def test_amp_fx_is_counted_by_the_same_hook_and_widens_its_result() -> None:
    counter = run(product, *operands(), backend="amp_fx", options={"profile": "off"})
    assert counter.total.casts == 3
    assert counter.total.cast_bytes == (LEFT + RIGHT + RESULT) * (FP32 + BF16)


def test_a_fused_cast_is_a_conversion_and_no_cast() -> None:
    counter = run(lambda x: (x.sin().bfloat16().relu().float() + 1).to(torch.int32), torch.randn(1000))
    # nor is a conversion to an integer one between floating dtypes
    kinds = {"conversions": 2, "generated_kernels": 1}
    moved = {"bytes_moved": 2 * 1000 * FP32, "conversion_bytes": 2 * 1000 * (FP32 + BF16)}
    assert counter.total == Counts(**kinds, **moved)


def gated(x: Tensor, w: Tensor) -> Tensor:
    first, second = (x @ w).chunk(2, dim=-1)
    return first.sin() * second


def broken(x: Tensor, w: Tensor) -> Tensor:
    y = F.gelu(x @ w)
    torch._dynamo.graph_break()
    return F.gelu(y @ w.t())


#: name -> the program, the bytes it saves, products in its forward and backward
SAVED: dict[str, tuple[Callable[..., Tensor], int, tuple[int, int]]] = {
    "gelu": (lambda x, w: F.gelu(x @ w), RESULT * FP32, (1, 2)),
    # a mask
    "relu": (lambda x, w: F.relu(x @ w), RESULT, (1, 2)),
    # the narrowed operands
    "autocast": (product, (LEFT + RIGHT) * BF16, (1, 2)),
    # one storage, twice
    "chunks": (gated, RESULT * FP32, (1, 2)),
    # inputs and their views are there anyway
    "views": (lambda x, w: F.gelu(x[: ROWS // 2].view(-1)).sin(), 0, (0, 0)),
    # the second graph gets y as an input
    "break": (broken, (ROWS * COLUMNS + ROWS * INNER) * FP32, (2, 4)),
}


@pytest.mark.parametrize("name", SAVED)
def test_saved_bytes_are_what_the_backward_reads_and_inputs_are_not(name: str) -> None:
    (function, saved, products), autocast = SAVED[name], name == "autocast"
    x, w = operands(requires_grad=True)
    counter = run(function, x, w, autocast=autocast)
    assert counter.total.saved_bytes == saved
    assert {kind for kind, _ in counter.graphs} == {"forward", "backward"}
    assert (counter.forward.extern_kernels, counter.backward.extern_kernels) == products
    if not autocast:
        # what is counted still computes
        (expected,) = torch.autograd.grad(function(x, w).sum(), x)
        torch.testing.assert_close(x.grad, expected)


def test_a_constant_in_the_graph_survives() -> None:
    assert run(lambda x: x.sin() * torch.tensor([3.0, 4.0]), torch.randn(8, 2)).total.generated_kernels == 1


def test_nothing_stays_replaced() -> None:
    from torch._inductor import compile_fx, config

    before = compile_fx.compile_fx, config.force_disable_caches
    run(torch.sin, torch.randn(4))
    assert (compile_fx.compile_fx, config.force_disable_caches) == before


def test_a_workload_is_counted_in_each_arm() -> None:
    model = UpDown(16, 16, out=1)
    workload = Workload("tiny", model, {"x": torch.randn(1, 16)})
    first, second = (counts.count(workload, ARMS["autocast"], "training")[0] for _ in range(2))
    assert first == second
    assert first.total.casts > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    _, counter = counts.count(workload, ARMS["bf16"], "inference")
    inputs = counter.graphs[0][1].before.graph.find_nodes(op="placeholder")
    assert {node.meta["val"].dtype for node in inputs} == {torch.bfloat16}
    # amp_fx compiles one graph for each mode; the input, weights and biases are narrowed in it
    row, counter = counts.count(workload, ARMS["off"], "inference")
    assert len(counter.graphs) == 1
    assert row.total.conversions >= 3


def test_a_table_has_ratios_to_autocast() -> None:
    def row(arm: str, casts: int) -> Row:
        return Row("toy", arm, "training", Counts(casts=casts, bytes_moved=1000), Counts())

    text = counts.table([row("bf16", 9), row("autocast", 4), row("amp_fx", 5)], "training")
    assert "5 1.250" in text
    assert "9 2.250" in text


def test_what_the_program_returns_is_not_counted_as_saved() -> None:
    # the backward of sin reads the product
    with counting() as returned:
        torch.compile(lambda x, w: (y := x @ w, y.sin().sum()))(*operands(requires_grad=True))[1].backward()
    assert returned.total.saved_bytes == 0
    assert (
        run(lambda x, w: (x @ w).sin().sum(), *operands(requires_grad=True)).total.saved_bytes
        == RESULT * FP32
    )


CHUNK = 65536


@pytest.mark.parametrize(
    ("sizes", "count"),
    [
        ([], 0),
        ([1], 1),
        ([8] * 110, 1),
        ([8] * 111, 2),
        # 320 blocks of 65536 elements fill a launch
        ([320 * CHUNK], 1),
        ([320 * CHUNK + 1], 2),
        ([319 * CHUNK, CHUNK, CHUNK], 2),
        # a tensor that goes on in the next launch is one of its tensors, too
        ([321 * CHUNK] + [8] * 109, 2),
        ([321 * CHUNK] + [8] * 110, 3),
    ],
)
def test_a_launch_takes_so_many_tensors_and_blocks(sizes: list[int], count: int) -> None:
    assert launches(sizes) == count


@pytest.mark.parametrize("sizes", [[64 * 64, 64] * 3, [4096 * 4096] * 30], ids=["small", "large"])
def test_a_step_takes_no_more_kernels_than_torchs_scaler_and_half_the_bytes(sizes: list[int]) -> None:
    (our_kernels, our_bytes), (kernels, moved) = beside(True, sizes), beside(False, sizes)
    assert our_kernels <= kernels
    # every gradient is read once, and one number for each; torch writes them, too
    assert our_bytes == 4 * sum(sizes) + 8 * len(sizes)
    assert moved == 8 * sum(sizes)
