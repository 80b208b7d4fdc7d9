"""Which gradients a backward graph adds, and what the graph then looks like."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx._torch import FakeTensorMode
from amp_fx.passes import AccumulateGradients, PassContext, run_in_order
from amp_fx.placement.layout import ADD_CONVERTED
from amp_fx.placement.layout import CONVERT as CONVERT_LAYOUT
from amp_fx.placement.products import ADD_PRODUCT

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
SIDE = 128


def backward_graph(
    program: Callable[..., object], *shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16
) -> fx.GraphModule:
    """``program``, which returns a tuple of gradients, as ATen with fake values."""
    with FakeTensorMode():
        return make_fx(program)(*[torch.empty(shape, dtype=dtype) for shape in shapes])


def added(gm: fx.GraphModule, *parameters: int) -> tuple[int, ...]:
    """Positions that the pass chose."""
    run_in_order(gm, [AccumulateGradients(parameters or (0,))], PassContext())
    return AccumulateGradients.positions(gm)


def widen(x: Tensor) -> Tensor:
    return CONVERT(x, torch.float32)


def matmul(g: Tensor, x: Tensor) -> Tensor:
    return aten.mm.default(aten.permute.default(g, [1, 0]), x)


WIDE = ((16, SIDE), (16, SIDE))


def test_a_widened_matmul_is_added_to_one_more_input_and_not_returned() -> None:
    gm = backward_graph(lambda g, x: (widen(matmul(g, x)), None), *WIDE)
    assert added(gm) == (0,)
    *_, total, copy, output = gm.graph.nodes
    last = gm.graph.find_nodes(op="placeholder")[-1]
    assert (total.target, copy.target) == (aten.add.Tensor, aten.copy_.default)
    assert total.args[0] is copy.args[0] is last
    assert output.args[0] == (None, None)
    assert last.meta["val"].dtype is torch.float32


def test_the_graph_computes_the_same_sum() -> None:
    gm = backward_graph(lambda g, x: (widen(matmul(g, x)),), *WIDE)
    added(gm)
    g, x = torch.randn(16, SIDE).bfloat16(), torch.randn(16, SIDE).bfloat16()
    grad = torch.randn(SIDE, SIDE)
    expected = grad + (g.t() @ x).float()
    assert gm(g, x, grad) == (None,)
    assert torch.equal(grad, expected)


@pytest.mark.parametrize(
    "program",
    [
        lambda g, x: (
            aten.view.default(widen(aten.view.default(matmul(g, x), [SIDE * SIDE])), [SIDE, SIDE]),
        ),
        lambda g, x: (widen(aten.squeeze.dim(aten.bmm.default(g.t().unsqueeze(0), x.unsqueeze(0)), 0)),),
        lambda g, x: (aten.div.Tensor(matmul(g, x), torch.ones(1, 1)),),
    ],
)
def test_views_and_a_loss_scale_may_stand_between(program: Callable[..., object]) -> None:
    assert added(backward_graph(program, *WIDE)) == (0,)


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(lambda g, x: (widen(g * x),), id="generated code"),
        pytest.param(lambda g, x: (widen(matmul(g, x)) * 2,), id="arithmetic after the cast"),
        pytest.param(lambda g, x: (widen(matmul(g, x) * 2),), id="arithmetic before the cast"),
        pytest.param(lambda g, x: (matmul(g, x),), id="a gradient in 16 bits"),
        pytest.param(lambda g, x: (CONVERT(matmul(g, x), torch.float64),), id="a gradient in fp64"),
        pytest.param(lambda g, x: (aten.permute.default(widen(matmul(g, x)), [1, 0]),), id="not contiguous"),
        pytest.param(lambda g, x: (widen(g.sum(0)),), id="a bias"),
        pytest.param(lambda g, x: (None,), id="no gradient"),
    ],
)
def test_others_are_returned(program: Callable[..., object]) -> None:
    gm = backward_graph(program, (256, SIDE), (256, SIDE))
    code = gm.code
    assert added(gm) == ()
    assert gm.code == code


def test_a_matmul_in_fp32_is_returned() -> None:
    gm = backward_graph(lambda g, x: (matmul(g, x),), *WIDE, dtype=torch.float32)
    assert added(gm) == ()


def test_one_value_for_two_inputs_is_returned() -> None:
    def program(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        grad = widen(matmul(g, x))
        return grad, grad

    assert added(backward_graph(program, *WIDE), 0, 1) == ()


def test_small_gradients_are_returned() -> None:
    gm = backward_graph(lambda g, x: (widen(matmul(g, x)),), (16, 64), (16, 64))
    assert added(gm) == ()


def test_only_parameters_are_added() -> None:
    gm = backward_graph(lambda g, x: (widen(matmul(g, x)), widen(matmul(x, g))), *WIDE)
    assert added(gm, 1) == (1,)
    assert isinstance(gm.graph.output_node().args[0][0], fx.Node)  # type: ignore[index]


@pytest.mark.parametrize("kernel", [1, 3])
def test_a_convolution_returns_the_gradient_of_its_weight_among_others(kernel: int) -> None:
    def program(g: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor]:
        results = aten.convolution_backward.default(
            g, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [False, True, False]
        )
        return (widen(results[1]),)

    side = 8 - kernel + 1
    gm = backward_graph(program, (2, 128, side, side), (2, 128, 8, 8), (128, 128, kernel, kernel))
    assert added(gm) == (0,)


def test_a_cast_that_changes_the_layout_adds() -> None:
    strides = list(torch.empty(128, 64, 3, 3).stride())
    gm = backward_graph(lambda g: (CONVERT_LAYOUT(g, torch.float32, strides),), (128, 64, 3, 3))
    assert added(gm) == (0,)
    assert [n.target for n in gm.graph.nodes if n.op == "call_function"] == [ADD_CONVERTED]
    g = torch.randn(128, 64, 3, 3).bfloat16().contiguous(memory_format=torch.channels_last)
    grad = torch.randn(128, 64, 3, 3)
    expected = grad + g.float()
    assert gm(g, grad) == (None,)
    assert torch.equal(grad, expected)


def test_a_matmul_that_returns_fp32_adds() -> None:
    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in WIDE]
        gm = make_fx(lambda g, x: (aten.mm.dtype(g.t(), x, torch.float32),))(*inputs)
    assert added(gm) == (0,)
    *_, transposed, product, _ = gm.graph.nodes
    assert product.target is ADD_PRODUCT
    assert product.args[1] is transposed


def test_a_matmul_in_fp32_that_is_read_is_returned() -> None:
    def program(g: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        grad = aten.mm.dtype(g.t(), x, torch.float32)
        return grad, grad.sum()

    with FakeTensorMode():
        inputs = [torch.empty(shape, dtype=torch.bfloat16, device="cuda") for shape in WIDE]
        gm = make_fx(program)(*inputs)
    assert added(gm) == ()
