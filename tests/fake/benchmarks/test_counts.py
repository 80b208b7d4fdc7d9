"""The counters of benchmarks/counts.py on functions whose counts can be worked out by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import counts
from benchmarks.arms import ARMS
from benchmarks.counts import Counter, Counts, Row, counting
from benchmarks.workloads import Workload

ROWS, INNER, COLUMNS = 64, 32, 16
#: elements of the operands and of the result of the product that most tests use
LEFT, RIGHT, RESULT = ROWS * INNER, INNER * COLUMNS, ROWS * COLUMNS
FP32, BF16 = 4, 2


def run(
    function: Callable[..., Tensor],
    *args: Tensor,
    autocast: bool = False,
    backend: str = "inductor",
    options: dict[str, Any] | None = None,
) -> Counter:
    """Compiles and runs, with the backward if something wants a gradient."""
    with counting() as counter:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            result = torch.compile(function, backend=backend, options=options)(*args)
        if result.requires_grad:
            result.sum().backward()
    return counter


def product(x: Tensor, w: Tensor) -> Tensor:
    return x @ w


def operands(requires_grad: bool = False) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(ROWS, INNER, requires_grad=requires_grad),
        torch.randn(INNER, COLUMNS, requires_grad=requires_grad),
    )


def test_a_product_under_autocast_casts_both_operands() -> None:
    counter = run(product, *operands(), autocast=True)
    cast_bytes = (LEFT + RIGHT) * (FP32 + BF16)
    product_bytes = (LEFT + RIGHT + RESULT) * BF16
    assert counter.total == Counts(
        conversions=2,
        conversion_bytes=cast_bytes,
        bytes_moved=cast_bytes + product_bytes,
        extern_kernels=1,
        generated_kernels=2,
        casts=2,
        cast_bytes=cast_bytes,
    )


def test_amp_fx_is_counted_by_the_same_hook_and_widens_its_result() -> None:
    counter = run(product, *operands(), backend="amp_fx", options={"profile": "off"})
    assert counter.total.casts == 3
    assert counter.total.cast_bytes == (LEFT + RIGHT + RESULT) * (FP32 + BF16)


def test_a_fused_cast_is_a_conversion_and_no_cast() -> None:
    counter = run(lambda x: (x.sin().bfloat16().relu().float() + 1).to(torch.int32), torch.randn(1000))
    # nor is a conversion to an integer one between floating dtypes
    assert counter.total == Counts(
        conversions=2,
        conversion_bytes=2 * 1000 * (FP32 + BF16),
        bytes_moved=2 * 1000 * FP32,
        generated_kernels=1,
    )


def test_inputs_and_their_views_are_not_saved_bytes() -> None:
    x = torch.randn(ROWS, INNER, requires_grad=True)
    counter = run(lambda x: F.gelu(x[: ROWS // 2].view(-1)).sin(), x)
    assert [kind for kind, _ in counter.graphs] == ["forward", "backward"]
    assert counter.total.saved_bytes == 0


@pytest.mark.parametrize(("function", "itemsize"), [(F.gelu, FP32), (F.relu, 1)])
def test_an_activation_saves_its_input_or_a_mask(function: Callable[[Tensor], Tensor], itemsize: int) -> None:
    x, w = operands(requires_grad=True)
    counter = run(lambda x, w: function(x @ w), x, w)
    assert counter.total.saved_bytes == RESULT * itemsize
    assert [kind for kind, _ in counter.graphs] == ["forward", "backward"]
    assert counter.forward.extern_kernels == 1
    assert counter.backward.extern_kernels == 2


def test_under_autocast_the_narrowed_operands_are_saved() -> None:
    counter = run(product, *operands(requires_grad=True), autocast=True)
    assert counter.total.saved_bytes == (LEFT + RIGHT) * BF16


def test_a_storage_that_is_saved_twice_counts_once() -> None:
    def gated(x: Tensor, w: Tensor) -> Tensor:
        first, second = (x @ w).chunk(2, dim=-1)
        return first.sin() * second

    counter = run(gated, *operands(requires_grad=True))
    assert counter.total.saved_bytes == RESULT * FP32


def test_a_constant_in_the_graph_survives() -> None:
    def shifted(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] = 3
        return y.sin()

    assert run(shifted, torch.randn(8, 8)).total.generated_kernels == 1


def test_a_graph_break_adds_up() -> None:
    def broken(x: Tensor, w: Tensor) -> Tensor:
        y = F.gelu(x @ w)
        torch._dynamo.graph_break()
        return F.gelu(y @ w.t())

    counter = run(broken, *operands(requires_grad=True))
    assert [kind for kind, _ in counter.graphs].count("forward") == 2
    assert counter.forward.extern_kernels == 2
    # the second graph gets y as an input
    assert counter.total.saved_bytes == (ROWS * COLUMNS + ROWS * INNER) * FP32


def test_what_is_counted_still_computes() -> None:
    x, w = operands(requires_grad=True)
    run(lambda x, w: F.gelu(x @ w), x, w)
    got = x.grad
    x.grad = None
    F.gelu(x @ w).sum().backward()
    torch.testing.assert_close(got, x.grad)


def test_nothing_stays_replaced() -> None:
    from torch._inductor import compile_fx, config

    before = compile_fx.compile_fx, config.force_disable_caches
    run(torch.sin, torch.randn(4))
    assert (compile_fx.compile_fx, config.force_disable_caches) == before


def test_counts_do_not_depend_on_the_run() -> None:
    workload = Workload("tiny", _Tiny(), {"x": torch.randn(8, 16)})
    rows = [counts.count(workload, ARMS["autocast"], "training")[0] for _ in range(2)]
    assert rows[0] == rows[1]
    assert rows[0].total.casts > 0
    assert all(parameter.grad is None for parameter in workload.model.parameters())


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean()


def test_the_whole_model_arm_is_in_bf16() -> None:
    workload = Workload("tiny", _Tiny(), {"x": torch.randn(8, 16)})
    _, counter = counts.count(workload, ARMS["bf16"], "inference")
    inputs = counter.graphs[0][1].before.graph.find_nodes(op="placeholder")
    assert {node.meta["val"].dtype for node in inputs} == {torch.bfloat16}


def test_one_graph_is_counted_where_amp_fx_compiles_one_per_mode() -> None:
    workload = Workload("tiny", _Tiny(), {"x": torch.randn(8, 16)})
    row, counter = counts.count(workload, ARMS["off"], "inference")
    assert len(counter.graphs) == 1
    # the input, the weight and the bias are narrowed in it
    assert row.total.conversions >= 3


def test_a_table_has_ratios_to_autocast() -> None:
    def row(arm: str, casts: int) -> Row:
        return Row("toy", arm, "training", Counts(casts=casts, bytes_moved=1000), Counts())

    text = counts.table([row("bf16", 9), row("autocast", 4), row("amp_fx", 5)], "training")
    assert "5 1.250" in text
    assert "9 2.250" in text


def test_what_the_program_returns_is_not_counted_as_saved() -> None:
    def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ w
        return y, y.sin().sum()

    with counting() as returned:
        torch.compile(program)(*operands(requires_grad=True))[1].backward()
    with counting() as kept:
        torch.compile(lambda x, w: program(x, w)[1])(*operands(requires_grad=True)).backward()
    # the backward of sin reads the product
    assert (returned.total.saved_bytes, kept.total.saved_bytes) == (0, RESULT * FP32)
