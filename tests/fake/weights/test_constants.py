"""What is computed from weights is computed once, shared, and follows those weights that have changed."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx.weights.constants import Constants, folded_bytes
from amp_fx.weights.watch import look_at

aten = torch.ops.aten


def doubled_and_summed() -> Constants:
    """``2 * a`` and ``a + b``."""
    graph = fx.Graph()
    a, b = graph.placeholder("a"), graph.placeholder("b")
    nodes = [graph.call_function(aten.mul.Tensor, (a, 2)), graph.call_function(aten.add.Tensor, (a, b))]
    graph.output(tuple(nodes))
    return Constants(fx.GraphModule(nn.Module(), graph), nodes)


def packed(batch: int) -> Constants:
    """A matrix in bf16, packed for a batch size."""
    graph = fx.Graph()
    low = graph.call_function(aten.to.dtype, (graph.placeholder("weight"), torch.bfloat16))
    node = graph.call_function(torch.ops.mkldnn._reorder_linear_weight.default, (low, batch))
    graph.output((node,))
    return Constants(fx.GraphModule(nn.Module(), graph), [node])


def values(*numbers: float) -> list[Tensor]:
    return [torch.full((4,), number) for number in numbers]


def tensors_of(constants: Constants, weights: Sequence[Tensor]) -> list[Tensor]:
    found = constants.of(weights, [*map(look_at, weights)])
    return [constant.tensor for constant in found if constant.tensor is not None]


class Holding:
    """Keeps constants, as a frozen graph does."""

    def __init__(self, constants: Constants, weights: Sequence[Tensor]) -> None:
        self.gave_up = False
        self.constants = constants.of(weights, [*map(look_at, weights)])
        for constant in self.constants:
            constant.holders.add(self)

    def give_up(self) -> None:
        self.gave_up = True


def test_only_what_depends_on_a_changed_weight_is_computed_again() -> None:
    constants, weights = doubled_and_summed(), values(1.0, 10.0)
    holding = Holding(constants, weights)
    first = tensors_of(constants, weights)
    assert [value[0].item() for value in first] == [2.0, 11.0]
    assert all(map(operator.is_, tensors_of(constants, weights), first))
    weights[1].fill_(20.0)
    second = tensors_of(constants, weights)
    assert [value[0].item() for value in second] == [2.0, 21.0]
    assert second[0] is first[0]
    # who holds the old values is told
    assert holding.gave_up


def test_graphs_that_compute_the_same_share_it() -> None:
    one, other, weights = doubled_and_summed(), doubled_and_summed(), values(1.0, 10.0)
    before = folded_bytes()
    kept = Holding(one, weights), Holding(other, weights)
    assert all(map(operator.is_, kept[0].constants, kept[1].constants))
    assert folded_bytes() == before + 32
    # other weights have constants of their own, and do not disturb these
    others = Holding(one, values(3.0, 3.0))
    assert folded_bytes() == before + 64
    assert not kept[0].gave_up
    del kept, others
    assert folded_bytes() == before


def test_the_order_of_the_inputs_does_not_matter_their_roles_do() -> None:
    graph = fx.Graph()
    b, a = graph.placeholder("b"), graph.placeholder("a")
    node = graph.call_function(aten.sub.Tensor, (a, b))
    graph.output((node,))
    swapped = Constants(fx.GraphModule(nn.Module(), graph), [node])
    graph = fx.Graph()
    node = graph.call_function(aten.sub.Tensor, (graph.placeholder("a"), graph.placeholder("b")))
    graph.output((node,))
    straight = Constants(fx.GraphModule(nn.Module(), graph), [node])
    a, b = values(5.0, 3.0)
    keep = Holding(straight, [a, b])
    assert tensors_of(swapped, [b, a])[0] is tensors_of(straight, [a, b])[0]
    assert tensors_of(swapped, [a, b])[0][0].item() == -2.0
    del keep


def test_what_is_packed_alike_for_two_batch_sizes_is_one_tensor() -> None:
    weight, before = torch.randn(64, 64), folded_bytes()
    one, other = Holding(packed(16), [weight]), Holding(packed(128), [weight])
    assert one.constants[0] is other.constants[0]
    assert folded_bytes() == before + 2 * 64 * 64


def test_autocast_and_inference_mode_of_the_caller_do_not_matter() -> None:
    graph = fx.Graph()
    product = graph.call_function(aten.mm.default, (graph.placeholder("a"), graph.placeholder("b")))
    graph.output((product,))
    weights = [torch.randn(4, 4), torch.randn(4, 4)]
    constants = Constants(fx.GraphModule(nn.Module(), graph), [product])
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        [value] = tensors_of(constants, weights)
    assert torch.equal(value, weights[0] @ weights[1])
    assert not value.is_inference()
