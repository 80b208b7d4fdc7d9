"""Which copies of weights are made once: marked to be kept across calls, or to be stored with a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from amp_fx.graphs.keys import KEPT_META, Kept
from amp_fx.passes import (
    MarkCopies,
    MarkStored,
    PassContext,
    PassSelection,
    captured_passes,
    run_in_order,
    run_passes,
)
from amp_fx.runtime.weights.lift import kept_copies
from support.tracing.captured_graphs import captured

BF16 = torch.bfloat16

X = torch.randn(8, 16)


class Net(nn.Module):
    """A linear with a table beside it; ``read`` is what is done with both."""

    def __init__(self, read: Callable[[Net, Tensor], Any], *, tied: bool = False) -> None:
        super().__init__()
        self.linear, self.table, self.read = nn.Linear(16, 16), nn.Embedding(16, 16), read
        if tied:
            self.table.weight = self.linear.weight

    def forward(self, x: Tensor) -> Any:
        return self.read(self, x)


def with_casts(model: nn.Module) -> tuple[fx.GraphModule, PassContext, dict[str, str]]:
    """The graph of a model with its casts, what passes are told, and the names of its inputs by those of parameters."""
    with torch.no_grad():
        gm = captured(model, X)
    inputs = gm.graph.find_nodes(op="placeholder")
    weights = [node for node in inputs if isinstance(node.meta.get("example_value"), nn.Parameter)]
    context = PassContext(folded=frozenset(node.name for node in weights))
    run_passes(gm, captured_passes(PassSelection()), context)
    own = ("linear.weight", "linear.bias", "table.weight")
    names = {
        name: node.name
        for node in weights
        for name in own
        if all(part in node.name for part in name.split("."))
    }
    # of tied weights, a graph has one input
    return gm, context, {"linear.weight": names.get("table.weight", ""), **names}


def marked(gm: fx.GraphModule) -> set[Kept]:
    return {node.meta[KEPT_META] for node in kept_copies(gm.graph)}


def test_casts_of_weights_are_kept_and_other_casts_are_not() -> None:
    gm, context, names = with_casts(Net(lambda net, x: net.linear(x)))
    before = [node.name for node in gm.graph.nodes]
    run_in_order(gm, (MarkCopies(),), context)
    assert marked(gm) == {Kept(names[own], "_bfloat16", BF16) for own in ("linear.weight", "linear.bias")}
    # only marks are new
    assert [node.name for node in gm.graph.nodes] == before


LEFT: dict[str, Callable[[Net, Tensor], Any]] = {
    "a weight that is written to": lambda net, x: net.linear(x) + net.linear.weight.mul_(1.5).sum(),
    "a cast that is returned": lambda net, x: (w := net.linear.weight.to(BF16), w.float() @ x.t()),
    "a cast that is written to": lambda net, x: net.linear.weight.to(BF16).mul_(2.0).float() @ x.t(),
}


@pytest.mark.parametrize("read", LEFT.values(), ids=[*LEFT])
def test_what_others_may_write_to_is_not_kept(read: Callable[[Net, Tensor], Any]) -> None:
    gm, context, names = with_casts(Net(read))
    run_in_order(gm, (MarkCopies(),), context)
    assert names["linear.weight"] not in {kept.weight for kept in marked(gm)}


STORED: dict[str, tuple[Callable[[Net, Tensor], Any], bool, str, bool]] = {
    "read by products": (lambda net, x: net.linear(x), False, "tied", True),
    "read in fp32, too": (lambda net, x: net.linear(x) + net.linear.weight.exp().sum(), False, "tied", False),
    "a table, too": (lambda net, x: net.linear(net.table(x.argmax(-1))), True, "tied", True),
}


@pytest.mark.parametrize(("read", "tied", "tables", "is_stored"), STORED.values(), ids=[*STORED])
def test_a_weight_is_stored_low_where_every_reader_takes_it_so(
    read: Callable[[Net, Tensor], Any], tied: bool, tables: str, is_stored: bool
) -> None:
    gm, context, names = with_casts(Net(read, tied=tied))
    run_in_order(gm, (MarkStored(((names["linear.weight"],),), tables),), context)
    assert marked(gm) == ({Kept(names["linear.weight"], "", BF16)} if is_stored else set())
    if tied and is_stored:
        # rows of the low table are looked up
        [lookup] = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.embedding.default)
        assert lookup.meta["val"].dtype is BF16
