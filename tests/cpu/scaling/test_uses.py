"""A scaler knows parameters by their ids, while they are there, and keeps them for a step at most."""

from __future__ import annotations

import torch
from torch import nn

from amp_fx.scaling.uses import Uses


class Graph:
    names = ("weight",)
    device = torch.device("cpu")


def test_a_graph_is_known_where_its_parameters_get_other_memory() -> None:
    uses, graph, parameter = Uses(), Graph(), nn.Parameter(torch.randn(3))
    uses.enter(graph, [parameter])
    uses.end_step()
    # sharded training does so in each step
    parameter.data = torch.randn(3)
    uses.enter(graph, [parameter])
    assert len(list(uses)) == 1
    assert uses.names() == {id(parameter): "weight"}


def test_parameters_are_kept_until_the_step_ends_and_forgotten_when_they_are_gone() -> None:
    uses, graph, parameter = Uses(), Graph(), nn.Parameter(torch.randn(3))
    uses.enter(graph, [parameter])
    (use,) = uses
    assert use.leaves == [parameter]
    uses.end_step()
    del parameter
    assert (use.leaves, use.is_dead(), uses.names()) == ((), True, {})
    other = nn.Parameter(torch.randn(3))
    uses.enter(graph, [other])
    # it may have the id of the first
    assert [found.ids for found in uses] == [(id(other),)]
