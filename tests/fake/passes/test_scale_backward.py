"""The scaling pass on joint graphs: what is multiplied and divided, and what is not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor, fx
from torch._functorch._aot_autograd import descriptors as aot
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx._torch import FakeTensorMode
from amp_fx.passes import GemmEpilogue, PassContext, ScaleBackward
from support.tracing.captured_graphs import calls_text

aten, prims = torch.ops.aten, torch.ops.prims

FP16, FP32, FP64 = torch.float16, torch.float32, torch.float64


def joint_graph(
    program: Callable[..., Sequence[Any]],
    inputs: Sequence[torch.dtype],
    tangents: Sequence[torch.dtype],
    differentiable: Sequence[int],
    device: str = "cpu",
) -> fx.GraphModule:
    """``program(*inputs, *tangents)`` returns one output, then the gradients of inputs; then comes the scale.

    Inputs and tangents are 4x4. The gradients of inputs that are not differentiable are left out of the aot.
    """
    with FakeTensorMode(allow_non_fake_inputs=True):
        values = [torch.empty(4, 4, dtype=dtype, device=device) for dtype in inputs]
        values.append(torch.empty((), device=device))
        count = len(values)
        values += [torch.empty(4, 4, dtype=dtype, device=device) for dtype in tangents]

        def run(*args: Tensor) -> list[Any]:
            return list(program(*args[: len(inputs)], *args[count:]))

        gm = make_fx(run)(*values)
    placeholders = gm.graph.find_nodes(op="placeholder")
    for position, node in enumerate(placeholders):
        output = aot.PlainAOTOutput(position - count)
        node.meta["desc"] = aot.PlainAOTInput(position) if position < count else aot.TangentAOTInput(output)
    output = gm.graph.output_node()
    output.args = ([*output.args[0], None],)  # type: ignore[misc]
    places = [p if p in differentiable else None for p in range(len(inputs))]
    gradients = [None if p is None else aot.GradAOTOutput(aot.PlainAOTInput(p)) for p in places]
    output.meta["desc"] = [aot.PlainAOTOutput(0), *gradients, None]
    return gm


def scaled(gm: fx.GraphModule) -> str:
    """The calls after the pass."""
    descriptions = [node.meta["desc"] for node in gm.graph.find_nodes(op="placeholder")]
    inputs = sum(isinstance(description, aot.PlainAOTInput) for description in descriptions)
    ScaleBackward(inputs - 1).call(gm, PassContext())
    gm.graph.lint()
    return calls_text(gm)


def division(gm: fx.GraphModule) -> fx.Node:
    """The only one after the pass."""
    scaled(gm)
    (found,) = gm.graph.find_nodes(op="call_function", target=aten.div.Tensor)
    return found


def widen(x: Tensor) -> Tensor:
    return prims.convert_element_type.default(x, FP32)


def narrow(x: Tensor) -> Tensor:
    return prims.convert_element_type.default(x, FP16)


def linear(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
    return x, widen(aten.mm.default(narrow(tangent), narrow(x)))


def test_gradients_are_multiplied_and_divided_in_32_bits_or_more() -> None:
    cases: dict[str, tuple[Callable[..., Sequence[Any]], torch.dtype]] = {
        # nobody reads the widening that is left
        "narrowed and widened": (linear, FP32),
        "in 16 bits": (lambda x, tangent: (x, aten.mm.default(tangent, x)), FP16),
        "in 64 bits": (lambda x, tangent: (x, aten.mul.Tensor(tangent, x)), FP64),
        "low rows": (lambda x, tangent: (x, ADDING["embedding"](x, tangent)), FP16),
    }
    found = [f"{name}: {scaled(joint_graph(of, [at], [at], [0]))}" for name, (of, at) in cases.items()]
    expecttest.assert_expected_inline(
        "\n".join(found),
        """\
narrowed and widened: mul.Tensor:f32, convert:f16, convert:f16, mm:f16, convert:f32, view:f32, div.Tensor:f32
in 16 bits: view:f32, mul.Tensor:f32, convert:f16, mm:f16, view:f32, div.Tensor:f32, convert:f16
in 64 bits: mul.Tensor:f64, mul.Tensor:f64, div.Tensor:f64
low rows: view:f32, mul.Tensor:f32, convert:f16, embedding_dense_backward:f16, view:f32, div.Tensor:f32, convert:f16""",
    )


def test_what_the_pass_computes_is_right() -> None:
    def program(x: Tensor, w: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
        return x, aten.mm.default(tangent, w), aten.mm.default(x, tangent)

    gm = joint_graph(program, [FP32, FP32], [FP32], [0, 1])
    scaled(gm)
    gm.recompile()
    x, w, tangent = (torch.randn(4, 4) for _ in range(3))
    _, of_x, of_w, _ = gm(x, w, torch.tensor(256.0), tangent)
    assert torch.equal(of_x, tangent @ w)
    assert torch.equal(of_w, x @ tangent)


ROWS = torch.tensor([1, 7, 1, 30])

ADDING = {
    "index_put": lambda zeros, rows: aten.index_put.default(zeros, [ROWS], rows, True),
    "index_add": lambda zeros, rows: aten.index_add.default(zeros, 0, ROWS, rows),
    "scatter_add": lambda zeros, rows: aten.scatter_add.default(zeros, 0, ROWS[:, None].expand(4, 4), rows),
    "embedding": lambda _, rows: aten.embedding_dense_backward.default(rows, ROWS, 40, -1, False),
    "masked_index_put": lambda zeros, rows: aten._unsafe_masked_index_put_accumulate.default(
        zeros, torch.ones(4, 1, dtype=torch.bool), [ROWS], rows
    ),
    "sparse": lambda zeros, rows: aten._sparse_coo_tensor_with_dims_and_tensors.default(
        1, 1, zeros.shape, ROWS[None], rows, dtype=rows.dtype, layout=torch.sparse_coo, device="cpu"
    ),
    "sparse bag": lambda _, rows: aten._embedding_bag_backward.default(
        rows,
        ROWS,
        torch.arange(4),
        torch.arange(4),
        torch.ones(4, dtype=torch.int64),
        ROWS,
        40,
        False,
        0,
        True,
        None,
    ),
}


def table_gradient(add: Callable[..., Tensor], size: int = 40, fill: float = 0) -> fx.GraphModule:
    def program(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        return x, add(torch.full((size, 4), fill, dtype=x.dtype), tangent * 2)

    return joint_graph(program, [FP32], [FP32], [0])


@pytest.mark.parametrize("add", ADDING.values(), ids=ADDING)
def test_rows_are_divided_before_they_are_added_into_a_table_of_zeros(add: Callable[..., Tensor]) -> None:
    gm = table_gradient(add)
    assert division(gm).meta["val"].shape == (4, 4)
    gm.recompile()
    rows = torch.randn(4, 4)
    gradient = gm(rows, torch.tensor(256.0), rows)[1]
    assert torch.equal(gradient.to_dense(), torch.zeros(40, 4).index_add(0, ROWS, rows * 2))


OTHERS = {
    "rows replace": table_gradient(lambda zeros, rows: aten.index_put.default(zeros, [ROWS], rows, False)),
    "not zero": table_gradient(ADDING["index_add"], fill=1),
    "smaller": table_gradient(lambda zeros, rows: aten.index_add.default(zeros, 0, ROWS % 2, rows), size=2),
    "used further": joint_graph(
        lambda x, tangent: (x, ADDING["embedding"](x, tangent) * tangent.sum()), [FP32], [FP32], [0]
    ),
}


@pytest.mark.parametrize("gm", OTHERS.values(), ids=OTHERS)
def test_other_tables_are_divided_whole(gm: fx.GraphModule) -> None:
    assert division(gm) in gm.graph.output_node().all_input_nodes


def test_a_sparse_table_is_divided_by_rows_even_where_it_is_small_or_low_or_used_further() -> None:
    assert division(table_gradient(ADDING["sparse"], size=2)).meta["val"].shape == (4, 4)
    low = joint_graph(lambda x, tangent: (x, ADDING["sparse"](x, tangent)), [FP16], [FP16], [0])
    assert scaled(low).endswith("div.Tensor:f32, convert:f16, _sparse_coo_tensor_with_dims_and_tensors:f16")

    def program(x: Tensor, w: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
        zeros = torch.full((40, 4), 0.0)
        table = ADDING["sparse"](zeros, tangent * 2)
        return x, zeros + table, table

    gm = joint_graph(program, [FP32, FP32], [FP32], [0, 1])
    scaled(gm)
    gm.recompile()
    rows = torch.randn(4, 4)
    _, dense, sparse, _ = gm(rows, rows, torch.tensor(256.0), rows)
    assert sparse.is_sparse
    assert torch.equal(dense, sparse.to_dense())
    assert torch.equal(dense, torch.zeros(40, 4).index_add(0, ROWS, rows * 2))
    divisions = gm.graph.find_nodes(op="call_function", target=aten.div.Tensor)
    assert not any(node.meta["val"].is_sparse for node in divisions)


def test_on_cuda_more_rows_than_the_table_has_are_divided_in_the_kernel_that_adds_them() -> None:
    def program(x: Tensor, tangent: Tensor) -> tuple[Tensor, Tensor]:
        zeros, ids = torch.full((2, 4), 0.0, device="cuda"), torch.zeros(4, dtype=torch.int64, device="cuda")
        return x, aten.index_put.default(zeros, [ids], tangent * 2, True)

    gm = joint_graph(program, [FP32], [FP32], [0], device="cuda")
    assert division(gm).meta["val"].shape == (4, 4)


def test_one_value_that_is_the_gradient_of_two_inputs_is_divided_once() -> None:
    def program(x: Tensor, w: Tensor, tangent: Tensor) -> tuple[Tensor, ...]:
        both = aten.mul.Tensor(tangent, 2.0)
        return x, both, both

    gm = joint_graph(program, [FP32] * 2, [FP32], [0, 1])
    assert scaled(gm).count("div.Tensor:f32") == 1
    first, second = gm.graph.output_node().args[0][1:3]  # type: ignore[index]
    assert first is second


def test_new_nodes_belong_to_the_backward() -> None:
    gm = joint_graph(linear, [FP32], [FP32], [0])
    before = set(gm.graph.nodes)
    scaled(gm)
    new = [node for node in gm.graph.nodes if node not in before]
    assert {node.meta["partitioner_tag"] for node in new} == {"is_backward"}


@pytest.mark.parametrize("description", ["nothing described", "no gradients"])
def test_a_graph_without_a_backward_stays_as_it_is(description: str) -> None:
    gm = joint_graph(linear, [FP32], [FP32], [])
    for node in gm.graph.nodes if description == "nothing described" else ():
        node.meta.pop("desc", None)
    before = str(gm.graph)
    ScaleBackward(1).call(gm, PassContext())
    assert str(gm.graph) == before


def test_the_epilogue_pass_does_not_pull_the_widening_out_of_the_division() -> None:
    gm = joint_graph(linear, [FP32], [FP32], [0], device="cuda")
    scaled(gm)
    gm.graph.eliminate_dead_code()
    GemmEpilogue().call(gm, PassContext())
    assert calls_text(gm) == "mul.Tensor:f32, convert:f16, convert:f16, mm:f16, view:f32, div.Tensor:f32"
