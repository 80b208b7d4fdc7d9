"""The epilogue pass on joint graphs of fake CUDA tensors. End to end: tests/fake/targets, tests/gpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx._torch import FakeTensorMode
from amp_fx.graphs.keys import RESULT_MARK
from amp_fx.passes import GemmEpilogue, PassContext
from amp_fx.passes.base import mark

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
MM, ADDMM, VIEW, ADD = aten.mm.default, aten.addmm.default, aten.view.default, aten.add.Tensor
PERMUTE = aten.permute.default


def joint_graph(
    program: Callable[..., object], *shapes: tuple[int, ...], device: str = "cuda"
) -> fx.GraphModule:
    """``program`` on bf16 inputs, as ATen, with fake values."""
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=torch.bfloat16, device=device) for shape in shapes]
        return make_fx(program)(*inputs)


def run(gm: fx.GraphModule) -> list[object]:
    """Targets of the calls after the pass."""
    GemmEpilogue().call(gm, PassContext())
    gm.graph.lint()
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def dtypes(gm: fx.GraphModule) -> list[torch.dtype]:
    return [node.meta["val"].dtype for node in gm.graph.nodes if node.op == "call_function"]


def widen(x: Tensor) -> Tensor:
    return CONVERT(x, torch.float32)


@pytest.mark.parametrize(
    ("program", "shapes", "expected"),
    [
        (lambda g, x: widen(MM(g, x)), [(8, 4), (4, 6)], [aten.mm.dtype]),
        (lambda g, x: widen(PERMUTE(MM(g, x), [1, 0])), [(8, 4), (4, 6)], [aten.mm.dtype, PERMUTE]),
        (lambda g, x: PERMUTE(widen(MM(g, x)), [1, 0]), [(8, 4), (4, 6)], [aten.mm.dtype, PERMUTE]),
        (lambda a, b: widen(aten.bmm.default(a, b)), [(2, 8, 4), (2, 4, 6)], [aten.bmm.dtype]),
    ],
    ids=["at once", "after a view", "before a view", "batched"],
)
def test_a_result_that_is_only_widened_leaves_the_matmul_in_fp32(
    program: Callable[..., Tensor], shapes: list[tuple[int, ...]], expected: list[object]
) -> None:
    gm = joint_graph(program, *shapes)
    assert run(gm) == expected
    assert set(dtypes(gm)) == {torch.float32}


def test_biased_matmuls_stay_because_inductor_lowers_no_wide_one() -> None:
    gm = joint_graph(lambda *args: widen(ADDMM(*args)), (6,), (8, 4), (4, 6))
    assert run(gm) == [ADDMM, CONVERT]


@pytest.mark.parametrize(
    "read",
    [
        lambda wide: (wide.exp(),),
        lambda wide: (wide, wide.exp()),
        lambda wide: (wide, aten.view.default(wide, [-1]).exp()),
        lambda wide: (wide.to(torch.bfloat16),),
    ],
    ids=["an activation", "also returned", "through a view", "narrowed again"],
)
def test_a_result_that_the_graph_reads_in_fp32_stays_because_its_cast_fuses(
    read: Callable[[Tensor], tuple[Tensor, ...]],
) -> None:
    targets = run(joint_graph(lambda g, x: read(widen(aten.mm.default(g, x))), (8, 4), (4, 6)))
    assert targets[:2] == [aten.mm.default, CONVERT]


def test_two_casts_of_one_matmul_become_the_matmul_itself() -> None:
    def program(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        mm = aten.mm.default(g, x)
        return widen(mm), widen(mm)

    gm = joint_graph(program, (8, 4), (4, 6))
    assert run(gm) == [aten.mm.dtype]
    assert len(gm.graph.output_node().all_input_nodes) == 1


def test_a_result_that_is_also_read_in_16_bits_stays() -> None:
    def program(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        mm = aten.mm.default(g, x)
        return widen(mm), mm

    assert run(joint_graph(program, (8, 4), (4, 6))) == [aten.mm.default, CONVERT]


def test_on_cpu_nothing_changes_because_there_is_no_kernel() -> None:
    gm = joint_graph(lambda g, x: widen(aten.mm.default(g, x)), (8, 4), (4, 6), device="cpu")
    assert run(gm) == [aten.mm.default, CONVERT]


# ---- results that a rule has in fp32 ----


def run_marked(gm: fx.GraphModule, *own: object) -> list[object]:
    """Targets of the calls after the pass, where the calls of some targets come from one whose result is in fp32."""
    for node in gm.graph.nodes:
        if node.target in own:
            mark(node, RESULT_MARK, "linear")
    GemmEpilogue(("linear",)).call(gm, PassContext())
    gm.graph.lint()
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def test_a_marked_result_that_the_graph_reads_leaves_its_matmul_in_fp32() -> None:
    gm = joint_graph(
        lambda x, w: widen(aten.view.default(aten.mm.default(x, w), [2, 4, 6])).exp(), (8, 4), (4, 6)
    )
    assert run_marked(gm, MM, VIEW) == [aten.mm.dtype, VIEW, aten.exp.default]
    assert set(dtypes(gm)) == {torch.float32}


def test_a_bias_is_added_to_a_marked_result_in_fp32() -> None:
    gm = joint_graph(lambda *args: widen(aten.addmm.default(*args)).exp(), (6,), (8, 4), (4, 6))
    assert run_marked(gm, ADDMM) == [aten.mm.dtype, CONVERT, ADD, aten.exp.default]
    assert set(dtypes(gm)) == {torch.float32}


def test_a_bias_of_a_batched_product_is_added_in_fp32() -> None:
    gm = joint_graph(lambda *args: widen(aten.baddbmm.default(*args)), (2, 8, 6), (2, 8, 4), (2, 4, 6))
    assert run_marked(gm, aten.baddbmm.default) == [aten.bmm.dtype, CONVERT, ADD]


def test_what_a_marked_call_does_with_its_product_is_done_in_fp32() -> None:
    gm = joint_graph(
        lambda x, w, b: widen(aten.add.Tensor(aten.mm.default(x, w), b)).exp(), (8, 4), (4, 6), (6,)
    )
    assert run_marked(gm, MM, ADD) == [aten.mm.dtype, CONVERT, ADD, aten.exp.default]
    assert set(dtypes(gm)) == {torch.float32}


def test_readers_in_16_bits_get_the_rounded_result() -> None:
    gm = joint_graph(
        lambda x, w: (lambda mm: (widen(mm).exp(), mm.relu()))(aten.mm.default(x, w)), (8, 4), (4, 6)
    )
    assert run_marked(gm, MM) == [aten.mm.dtype, CONVERT, aten.exp.default, aten.relu.default]
    assert dtypes(gm)[-1] is torch.bfloat16


def test_a_marked_product_of_a_marked_product_reads_16_bits() -> None:
    gm = joint_graph(lambda x, w, v: widen(aten.mm.default(aten.mm.default(x, w), v)), (8, 4), (4, 6), (6, 4))
    assert run_marked(gm, MM) == [aten.mm.dtype, CONVERT, aten.mm.dtype]
    assert dtypes(gm) == [torch.float32, torch.bfloat16, torch.float32]


def test_marks_that_are_not_the_passes_own_change_nothing() -> None:
    gm = joint_graph(lambda x, w: widen(aten.mm.default(x, w)).exp(), (8, 4), (4, 6))
    for node in gm.graph.nodes:
        mark(node, RESULT_MARK, "linear")
    assert run(gm) == [MM, CONVERT, aten.exp.default]
