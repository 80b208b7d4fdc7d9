"""Constants that are computed from weights follow those that have changed."""

from __future__ import annotations

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx.weights.constants import LiveConstants, folded_bytes

aten = torch.ops.aten


def doubled_and_summed() -> tuple[fx.GraphModule, list[fx.Node]]:
    """``2 * a`` and ``a + b``."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    nodes = [graph.call_function(aten.mul.Tensor, (a, 2)), graph.call_function(aten.add.Tensor, (a, b))]
    graph.output(tuple(nodes))
    return fx.GraphModule(nn.Module(), graph), nodes


def values(*numbers: float) -> list[Tensor]:
    return [torch.full((4,), number) for number in numbers]


def test_only_what_depends_on_a_changed_weight_is_computed_again() -> None:
    program, nodes = doubled_and_summed()
    held = values(2.0, 11.0)
    constants = LiveConstants(program, dict(zip(nodes, held, strict=True)), nbytes=32)
    constants.renew(values(5.0, 20.0), [False, True])
    assert [value[0].item() for value in held] == [2.0, 25.0]
    constants.renew(values(5.0, 20.0), [True, False])
    assert [value[0].item() for value in held] == [10.0, 25.0]


def test_autocast_and_inference_mode_of_the_caller_do_not_matter() -> None:
    graph = fx.Graph()
    product = graph.call_function(aten.mm.default, (graph.placeholder("a"), graph.placeholder("b")))
    graph.output((product,))
    held, weights = torch.zeros(4, 4), [torch.randn(4, 4), torch.randn(4, 4)]
    constants = LiveConstants(fx.GraphModule(nn.Module(), graph), {product: held}, nbytes=64)
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        constants.renew(weights, [True, True])
    assert torch.equal(held, weights[0] @ weights[1])
    assert not held.is_inference()


def test_dropped_constants_hold_no_memory() -> None:
    program, nodes = doubled_and_summed()
    held, before = values(2.0, 11.0), folded_bytes()
    constants = LiveConstants(program, dict(zip(nodes, held, strict=True)), nbytes=32)
    assert folded_bytes() == before + 32
    constants.drop()
    assert [value.numel() for value in held] == [1, 1]
    del constants
    assert folded_bytes() == before
