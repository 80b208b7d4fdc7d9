"""Calibration of programs that write in place: in a graph, and to what an earlier graph has returned."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx


class Widened(nn.Module):
    """Adds to what a layer returns, and a relu of it, in place or not, with a graph break in between or not."""

    def __init__(self, *, in_place: bool, breaks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)
        self.added = nn.Parameter(torch.randn(64))
        self.in_place, self.breaks = in_place, breaks

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.breaks:
            torch._dynamo.graph_break()
        if self.in_place:
            y += self.added
        else:
            y = y + self.added
        return self.down(F.relu(y, inplace=self.in_place)).square().mean()


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("of", ["gradients", "outputs"])
def test_a_value_that_is_written_to_costs_as_much_as_one_that_is_not(of: Any, breaks: bool) -> None:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))

    def sensitivities(*, in_place: bool) -> dict[str, list[float | None]]:
        model = Widened(in_place=in_place, breaks=breaks)
        graphs = amp_fx.calibrate(model, x, of=of, profile="off").sensitivity.graphs
        return {
            call.name.rstrip("_"): [
                call.value,
                call.gradient,
                call.kept,
                *(read.value for read in call.reads.values()),
            ]
            for graph in graphs
            for call in graph.calls
        }

    written, new = sensitivities(in_place=True), sensitivities(in_place=False)
    assert written.keys() == new.keys()
    assert all(written[name] == pytest.approx(new[name], rel=1e-3) for name in new)
    assert all(new[name][0] for name in ("linear", "add", "relu"))


class Cached(nn.Module):
    """Writes what a layer returns to a buffer, which the next graph reads."""

    cache: Tensor

    def __init__(self, *, is_cached: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.is_cached = nn.Linear(32, 32), nn.Linear(32, 8), is_cached
        self.register_buffer("cache", torch.zeros(16, 32))

    def forward(self, x: Tensor) -> Tensor:
        y = self.cache.copy_(self.up(x)) if self.is_cached else self.up(x)
        torch._dynamo.graph_break()
        return self.down(self.cache if self.is_cached else y).square().mean()


@pytest.mark.parametrize("of", ["gradients", "outputs"])
def test_what_a_buffer_hands_to_the_next_graph_counts_and_the_buffer_stays_as_it_was(of: Any) -> None:
    batches = [(torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)),) for seed in (1, 2)]

    def values(model: nn.Module) -> list[float | None]:
        graphs = amp_fx.calibrate(model, batches, of=of, profile="off").sensitivity.graphs
        return [call.value for graph in graphs for call in graph.calls if call.name == "linear"]

    model = Cached(is_cached=True)
    found, wanted = values(model), values(Cached(is_cached=False))
    assert len(found) == len(wanted) == 2
    assert found == pytest.approx(wanted, rel=1e-3)
    assert not model.cache.requires_grad
    assert not model.cache.any()
