"""What the cost model charges for casts of a graph's inputs, beside what Inductor would launch for an H100."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amp_fx.passes import Classify, Constrain, PassContext, PinDtypes, run_passes
from amp_fx.placement.cost import CostModel
from graphs import captured, rewrite
from targets import OFF, needs_a_target, process, traced
from versions import UP_TO_2_13

pytestmark = [needs_a_target, pytest.mark.xdist_group("targets")]


class Program(nn.Module):
    """Parameters, and what is done with them."""

    def __init__(self, run: Callable[..., Tensor], *parameters: Tensor) -> None:
        super().__init__()
        self.run = run
        self.own = nn.ParameterList(parameters)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, *self.own).square().mean()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape)


def attention(x: Tensor, *projections: Tensor) -> Tensor:
    q, k, v = (F.linear(x, weight).unflatten(-1, (4, 16)).transpose(1, 2) for weight in projections)
    return F.scaled_dot_product_attention(q, k, v)


WEIGHT, BIAS = normal(64, 64), normal(64)
PROGRAMS: dict[str, tuple[Program, Tensor]] = {
    "biases": (
        Program(lambda x, v, b, w, c: F.linear(F.linear(x, v, b).relu(), w, c), WEIGHT, BIAS, WEIGHT, BIAS),
        normal(128, 64),
    ),
    "three readers of one input": (Program(attention, WEIGHT, WEIGHT, WEIGHT), normal(2, 128, 64)),
    "a weight of two matmuls": (
        Program(lambda x, w: F.linear(F.linear(x, w).relu(), w), WEIGHT),
        normal(128, 64),
    ),
    "a transposed weight": (Program(lambda x, w: x @ w.t(), WEIGHT), normal(128, 64)),
    "a batch of matmuls": (Program(lambda x, w: x @ w, normal(2, 64, 64)), normal(2, 128, 64)),
    "a convolution": (
        Program(lambda x, w, b: F.conv2d(x, w, b, padding=1), normal(16, 16, 3, 3), normal(16)),
        normal(4, 16, 32, 32),
    ),
    "attention on inputs": (
        Program(F.scaled_dot_product_attention, normal(2, 4, 128, 64), normal(2, 4, 128, 64)),
        normal(2, 4, 128, 64),
    ),
}


def charged(program: Program, x: Tensor) -> int:
    """Bytes, by the cost model: one byte is one unit."""
    gm = captured(program, x, device="cuda")
    run_passes(gm, (PinDtypes(), Classify(), Constrain()), PassContext())
    cost = CostModel(gm.graph, None, training=True)
    nodes = {node.name: node for node in gm.graph.nodes}
    casts = rewrite(program, x, device="cuda").plan.casts
    read = [nodes[cast.value] for cast in casts if cast.to_dtype is torch.bfloat16]
    return sum(cost.cast_kernel(node, torch.bfloat16) for node in read if cost.is_stored(node))


@pytest.mark.parametrize("name", PROGRAMS)
def test_casts_of_inputs_cost_what_is_charged_for_them(name: str) -> None:
    program, x = PROGRAMS[name]
    x = x.clone().requires_grad_()
    facts = process().call("targets:compiled", traced(program, x), OFF)
    assert set(facts.casts) <= {"input", "gradient"}
    # from torch 2.14 on, the second matmul adds the first one's result, which is then widened by itself
    added_by_matmul = name == "a weight of two matmuls" and not UP_TO_2_13
    assert facts.counts.cast_bytes == charged(program, x) + added_by_matmul * 6 * WEIGHT.numel()
