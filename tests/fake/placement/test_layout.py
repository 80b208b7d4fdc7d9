"""Weights of convolutions that are cast and laid out in one call: the call, and who is rewritten to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from torch.fx.experimental.proxy_tensor import make_fx

from amp_fx._torch import FakeTensorMode, convert_op
from amp_fx.graphs.calls import output_nodes
from amp_fx.passes import LayOutGradients, LayOutWeights, PassContext
from amp_fx.precision.placement.cost import is_relaid

aten, prims = torch.ops.aten, torch.ops.prims

CHANNELS_LAST = torch.channels_last
WEIGHT = (64, 64, 3, 3)
IMAGE = (2, 64, 8, 8)

Program = Callable[..., Any]


@pytest.mark.parametrize("shape", [WEIGHT, (3, 5, 7, 2), (1, 1, 1, 1), (0, 4, 3, 3), (700, 40, 5, 5)])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_there_and_back_it_has_the_values_of_a_cast_and_the_layout_asked_for(
    shape: tuple[int, ...], low: torch.dtype
) -> None:
    weight = torch.randn(shape)
    narrow = convert_op()(weight, low, torch.empty(shape).to(memory_format=CHANNELS_LAST).stride())
    assert narrow.is_contiguous(memory_format=CHANNELS_LAST)
    torch.testing.assert_close(narrow, weight.to(low), rtol=0, atol=0)
    wide = convert_op()(narrow, torch.float32, list(weight.stride()))
    assert wide.is_contiguous()
    torch.testing.assert_close(wide, narrow.float(), rtol=0, atol=0)


def test_it_keeps_the_promises_of_a_custom_op() -> None:
    args = torch.randn(4, 3, 3, 3), torch.bfloat16, [27, 1, 9, 3]
    torch.library.opcheck(convert_op(), args, raise_exception=True)


def test_only_large_weights_that_lie_otherwise_are_worth_a_call() -> None:
    weights = {
        "3x3": torch.empty(WEIGHT),
        "channels last": torch.empty(WEIGHT).to(memory_format=CHANNELS_LAST),
        "1x1": torch.empty(256, 256, 1, 1),
        "depthwise": torch.empty(4096, 1, 3, 3),
        "small": torch.empty(16, 16, 3, 3),
        "3d": torch.empty(64, 64, 3, 3, 3),
        "linear": torch.empty(1024, 1024),
    }
    assert [name for name, weight in weights.items() if is_relaid(weight)] == ["3x3"]


def traced(program: Program, *values: tuple[tuple[int, ...], dict[str, Any]]) -> fx.GraphModule:
    """The program as ATen on fake values, each of a shape and with arguments of ``torch.empty``."""
    with FakeTensorMode():
        return make_fx(program)(*(torch.empty(shape, **how) for shape, how in values))


def convolve(x: Tensor, weight: Tensor, transposed: bool = False) -> Tensor:
    return aten.convolution(x, weight, None, [1, 1], [1, 1], [1, 1], transposed, [0, 0], 1)


def narrowed(value: Tensor) -> Tensor:
    return prims.convert_element_type(value, torch.bfloat16)


def widened(value: Tensor) -> Tensor:
    return prims.convert_element_type(value, torch.float32)


def targets(gm: fx.GraphModule) -> list[object]:
    gm.graph.lint()
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


LOW = {"dtype": torch.bfloat16}


def test_the_cast_of_a_transposed_convolutions_weight_also_lays_it_out() -> None:
    gm = traced(lambda x, w: convolve(x, narrowed(w), transposed=True), (IMAGE, LOW), (WEIGHT, {}))
    LayOutWeights().call(gm, PassContext())
    assert targets(gm) == [convert_op(), aten.convolution.default]
    (cast,) = gm.graph.find_nodes(op="call_function", target=convert_op())
    assert cast.meta["val"].dtype is torch.bfloat16
    assert cast.meta["val"].is_contiguous(memory_format=CHANNELS_LAST)


@pytest.mark.parametrize(
    ("program", "device", "inductor"),
    [
        (lambda x, w: convolve(x, narrowed(w * 2)), "cpu", {}),
        (lambda x, w: (convolve(x, x[:, :, :3, :3]), narrowed(w)), "cpu", {}),
        # the generated kernel lays it out
        (lambda x, w: convolve(x, narrowed(w)), "cuda", {}),
        (lambda x, w: convolve(x, narrowed(w)), "cpu", {"layout_optimization": False}),
        (lambda x, w: convolve(x, narrowed(w)), "cpu", {"freezing": True}),
    ],
    ids=["a computed weight", "no weight", "on cuda", "layouts are kept", "weights are packed"],
)
def test_other_casts_are_left_alone(program: Program, device: str, inductor: dict[str, Any]) -> None:
    gm = traced(program, (IMAGE, {"device": device, **LOW}), (WEIGHT, {"device": device}))
    before = targets(gm)
    with inductor_config.patch(inductor):
        LayOutWeights().call(gm, PassContext())
    assert targets(gm) == before


def backward(transform: Program = widened) -> Program:
    """A convolution and its backward, what becomes of the gradient of the weight."""

    def program(x: Tensor, w: Tensor, grad: Tensor) -> tuple[object, ...]:
        low = narrowed(w)
        result = aten.convolution_backward(
            grad, x, low, [0], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )
        return convolve(x, low), result[0], transform(result[1])

    return program


def test_the_gradient_of_a_weight_is_widened_into_the_layout_of_the_weight() -> None:
    # the image's layout is that of the gradient, as mkldnn computes it
    image = {**LOW, "memory_format": CHANNELS_LAST}
    gm = traced(backward(), (IMAGE, image), (WEIGHT, {}), (IMAGE, image))
    assert not output_nodes(gm)[2].meta["val"].is_contiguous()
    LayOutGradients().call(gm, PassContext())
    assert targets(gm).count(convert_op()) == 1
    gradient = output_nodes(gm)[2]
    assert gradient.target is convert_op()
    assert gradient.meta["val"].dtype is torch.float32
    assert gradient.meta["val"].is_contiguous()


@pytest.mark.parametrize(
    ("transform", "how"),
    [
        (lambda grad: grad, {}),
        (lambda grad: grad / 2, {}),
        (lambda grad: prims.convert_element_type(grad, torch.float64), {}),
        (widened, {"memory_format": CHANNELS_LAST}),
        (widened, {"device": "cuda"}),
    ],
    ids=["stays low", "is scaled", "to fp64", "weight is channels last", "cuda"],
)
def test_other_gradients_are_left_alone(transform: Program, how: dict[str, Any]) -> None:
    device = {"device": how.get("device", "cpu")}
    gm = traced(backward(transform), (IMAGE, {**LOW, **device}), (WEIGHT, how), (IMAGE, {**LOW, **device}))
    LayOutGradients().call(gm, PassContext())
    assert convert_op() not in targets(gm)
