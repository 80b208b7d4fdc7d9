"""What the cost model believes about Inductor, checked against what Inductor says it would move.

Each program has its casts written out. ``n`` is the number of elements of its only activation, ``w`` of its
weight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from amp_fx.passes import Classify, Constrain, PassContext, PinDtypes, run_passes
from amp_fx.precision.placement.cost import CostModel
from amp_fx.precision.placement.profile import FLASH_QUERY, DeviceProfile
from amp_fx.precision.plans.label import label_of
from benchmarks.counts import counting
from support.models.small import Parts
from support.tracing.captured_graphs import captured

BF16 = torch.bfloat16
ROWS, WIDTH = 64, 32
N, W = ROWS * WIDTH, WIDTH * WIDTH


def moved(program: Callable[..., Tensor], *args: Tensor) -> int:
    """Bytes that Inductor's kernels for the program read and write."""
    torch._dynamo.reset()
    with counting() as counter, torch.no_grad():
        torch.compile(program, backend="inductor", fullgraph=True)(*args)
    return counter.total.bytes_moved


def x(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, WIDTH).to(dtype)


def w(dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(WIDTH, WIDTH).to(dtype)


#: a matmul in bf16: operands read, result written
MATMUL = 2 * (N + W + N)


def copied_twice(x: Tensor, w: Tensor) -> Tensor:
    # a softmax, because Inductor would rather compute a sine twice than write it
    y = torch.softmax(x, -1)
    return y.to(BF16) @ w + y


def viewed(x: Tensor, w: Tensor) -> Tensor:
    return torch.sin(x).to(BF16).reshape(ROWS // 2, 2, WIDTH).flatten(0, 1) @ w


XW, XVW, LOW_XW = (x(), w()), (x(), w(torch.float32), w()), (x(BF16), w())
#: what a cast is -> program, its arguments, bytes that its kernels read and write
MOVED: dict[str, tuple[Callable[..., Tensor], tuple[Tensor, ...], int]] = {
    "a kernel of an input": (lambda x, w: x.to(BF16) @ w, XW, (4 + 2) * N + MATMUL),
    "a kernel between matmuls": (lambda x, v, w: (x @ v).to(BF16) @ w, XVW, 4 * (N + W + N) + 6 * N + MATMUL),
    # only the bf16 copy is written: no fp32 result reaches memory
    "in the kernel in front": (lambda x, w: torch.sin(x).to(BF16) @ w, XW, 4 * N + 2 * N + MATMUL),
    "in the kernel behind": (lambda x, w: torch.sin((x @ w).float()), LOW_XW, MATMUL + 2 * N + 4 * N),
    # softmax, the statistics of its rows, matmul, add
    "a second copy": (copied_twice, XW, (4 + 4 + 2) * N + 2 * 4 * ROWS + MATMUL + (2 + 4 + 4) * N),
    "nothing more for a view": (viewed, XW, 4 * N + 2 * N + MATMUL),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_cast_moves_what_the_model_believes(name: str) -> None:
    program, args, expected = MOVED[name]
    assert moved(program, *args) == expected


def test_a_table_cast_in_front_of_a_lookup_alone_is_part_of_the_lookup() -> None:
    # so that where the cast stands is a tie for an unshared table, which bytes cast then decide
    args = torch.randn(8, WIDTH), torch.zeros(ROWS, dtype=torch.long), w()
    before = moved(lambda table, tokens, w: F.embedding(tokens, table.to(BF16)) @ w, *args)
    assert moved(lambda table, tokens, w: F.embedding(tokens, table).to(BF16) @ w, *args) == before


def model(
    program: Callable[..., Tensor],
    *args: Tensor,
    training: bool = False,
    profile: DeviceProfile | None = None,
    **how: Any,
) -> tuple[CostModel, dict[str, Any]]:
    """The cost model of a program, and its nodes by name."""
    gm = captured(program, *args, **how)
    run_passes(gm, (PinDtypes(), Classify(), Constrain()), PassContext())
    return CostModel(gm.graph, profile, training), {node.name: node for node in gm.graph.nodes}


def test_the_model_knows_which_readers_find_a_value_in_memory() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        y = torch.sin(x)
        return torch.cos(y) @ w + y

    cost, nodes = model(program, x(), w(torch.float32))
    assert not cost.reads_memory(nodes["cos"], nodes["sin"])
    assert cost.reads_memory(nodes["matmul"], nodes["cos"])
    assert cost.reads_memory(nodes["add"], nodes["sin"])  # the matmul stands between


@pytest.mark.parametrize(("training", "factor"), [(False, 1), (True, 2)])
def test_traffic_is_in_bytes_and_training_doubles_it(training: bool, factor: int) -> None:
    cost, nodes = model(lambda x, w: x @ w, x(), w(torch.float32), training=training)
    assert cost.traffic(nodes["matmul"], 2) == factor * 2 * N
    assert cost.cast_kernel(nodes["matmul"], BF16) == factor * 6 * N


def unit(device: str, low: float = 1.0) -> DeviceProfile:
    """One FLOP a second, one byte a second, and a second until a kernel starts."""
    return DeviceProfile("unit", device, {"float32": 1.0, "bfloat16": low}, 1.0, 1.0)


#: one weight, read by one matmul or by two, as it is or in another shape
READ: dict[str, Callable[..., Tensor]] = {
    "read": lambda m, x: m.linear(x),
    "transposed": lambda m, x: x @ m.linear.weight.t(),
    "shared": lambda m, x: m.linear(m.linear(x).relu()),
}


@pytest.mark.parametrize(
    ("device", "how", "kernels", "gradient"),
    [
        ("cuda", "read", 1, 4),
        ("cuda", "transposed", 1, 4),
        # two gradients are added, and widened, by one kernel
        ("cuda", "shared", 1, 2),
        ("cpu", "read", 2, 2),
    ],
)
def test_on_cuda_no_kernel_widens_the_gradient_of_a_weight(
    device: str, how: str, kernels: int, gradient: int
) -> None:
    program = Parts(READ[how], linear=torch.nn.Linear(WIDTH, WIDTH, bias=False))
    cost, nodes = model(program, x(), training=True, profile=unit(device), device=device)
    reader = next(n for n in nodes.values() if getattr(label_of(n), "op", "") in ("linear", "matmul"))
    weight = reader.args[1]
    assert cost.cast_kernel(weight, BF16) == kernels * (6 * W + 1) * 10**12
    # the forward reads it, and the backward writes its gradient
    assert cost.read(reader, weight, 2) == (2 + gradient) * W * 10**12
    assert cost.read(reader, weight, 4) == 8 * W * 10**12


@pytest.mark.parametrize(("device", "rows", "passes"), [("cpu", 1, 0), ("cpu", 2, 2), ("cuda", 2, 0)])
def test_an_fp32_matmul_of_several_rows_writes_and_reads_its_weight_again_on_a_cpu(
    device: str, rows: int, passes: int
) -> None:
    cost, nodes = model(F.linear, x()[:rows], w(torch.float32), profile=unit(device))
    high, low = cost.arithmetic(nodes["linear"], BF16) or (0, 0)
    assert low == 2 * rows * W * 10**12
    assert high - low == passes * 4 * W * 10**12


@pytest.mark.parametrize(
    ("device", "queries", "how", "slower"),
    [
        ("cpu", 1, {"training": True}, True), ("cpu", 1, {"dynamic": True}, True),
        ("cpu", 1, {"writes_attention": False}, True), ("cpu", 1, {"writes_attention": False, "query": 7.0}, False),
        ("cpu", 1, {"query": 7.0}, False), ("cpu", 1, {}, False),
        ("cpu", 2, {"training": True}, False), ("cuda", 1, {"training": True}, False),
    ],
)  # fmt: skip
def test_attention_of_one_query_takes_longer_in_16_bits_on_a_cpu_by_the_flash_kernel(
    device: str, queries: int, how: dict[str, Any], slower: bool
) -> None:
    query, key = torch.randn(3, 2, queries, 8), torch.randn(3, 2, 16, 8)
    given = {name: value for name, value in how.items() if name in ("training", "dynamic")}
    profile = dataclasses.replace(
        unit(device, low=2.0), calls={FLASH_QUERY: how.get("query", 9.0)} if device == "cpu" else {}
    )
    cost, nodes = model(F.scaled_dot_product_attention, query, key, key, profile=profile, **given)
    cost = dataclasses.replace(cost, writes_attention=how.get("writes_attention", True))
    high, low = cost.arithmetic(nodes["scaled_dot_product_attention"], BF16) or (0, 0)
    assert (low > high) is slower


@pytest.mark.parametrize(
    ("device", "kernel", "layout", "passes"),
    [
        ("cpu", 3, torch.contiguous_format, 2),
        ("cpu", 3, torch.channels_last, 0),
        ("cpu", 1, torch.contiguous_format, 0),
        ("cuda", 3, torch.contiguous_format, 0),
    ],
)
def test_an_fp32_convolution_lays_out_its_weight_on_a_cpu_which_a_cast_does_by_itself(
    device: str, kernel: int, layout: torch.memory_format, passes: int
) -> None:
    weight = torch.randn(256, 256, kernel, kernel).to(memory_format=layout)
    cost, nodes = model(F.conv2d, torch.randn(1, 256, 4, 4), weight, profile=unit(device))
    high, low = cost.arithmetic(nodes["conv2d"], BF16) or (0, 0)
    assert high - low == passes * 4 * weight.numel() * 10**12


def test_symbolic_sizes_count_with_their_hint() -> None:
    rows = x().unflatten(0, (2, -1))
    cost, nodes = model(F.linear, rows, w(torch.float32), profile=unit("cpu"), dynamic=True)
    assert cost.traffic(nodes["linear"], 2) == 2 * N * 10**12
    _, low = cost.arithmetic(nodes["linear"], BF16) or (0, 0)
    assert low == 2 * N * WIDTH * 10**12


def test_a_write_in_place_costs_what_a_new_value_costs() -> None:
    def found(*, in_place: bool) -> tuple[list[tuple[bool, int]], list[bool]]:
        def program(x: Tensor, w: Tensor) -> Tensor:
            y = x @ w
            y = y.add_(x) if in_place else y.add(x)
            y = torch.relu_(y) if in_place else torch.relu(y)
            return y @ w

        cost, nodes = model(program, x(), w(torch.float32))
        values = [node for node in nodes.values() if node.op == "call_function"]
        readers = [(reader, value) for value in values for reader in value.users]
        read = [(cost.reads_memory(*pair), cost.read(*pair, 2)) for pair in readers]
        return read, [cost.is_stored(value) for value in values]

    assert found(in_place=True) == found(in_place=False)
