"""Sizes that are not known are nodes of a graph, and neither values that a call reads nor kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from amp_fx.passes import Classify, Constrain, PassContext, PinDtypes, run_passes
from amp_fx.passes.levels.matmuls import additions_of
from amp_fx.passes.levels.place_levels import last_calls
from amp_fx.precision.placement.cost import CostModel
from support.tracing.captured_graphs import captured


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_arithmetic_of_sizes_is_no_kernel_between_two_calls(dynamic: bool) -> None:
    def program(x: Tensor) -> Tensor:
        y = torch.sin(x)
        return torch.cos(y.view(x.shape[0] * x.shape[1], x.shape[2])).view(x.shape) + y

    gm = captured(program, torch.randn(2, 6, 8), dynamic=dynamic)
    run_passes(gm, (PinDtypes(), Classify(), Constrain()), PassContext())
    nodes = {node.name: node for node in gm.graph.nodes}
    assert not CostModel(gm.graph, None, training=False).reads_memory(nodes["add"], nodes["sin"])


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_size_that_is_added_is_no_residual_stream(dynamic: bool) -> None:
    net = nn.Linear(8, 8)
    gm = captured(lambda x: net(x) + x.shape[0], torch.randn(6, 8), dynamic=dynamic)
    [linear] = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.linear.default)
    assert last_calls(gm, set()) == {None}
    assert additions_of(linear) == []
