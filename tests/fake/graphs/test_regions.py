"""Autocast state as facts: what the user set around and inside the graph."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from amp_fx._torch import enable_autocast
from amp_fx.graphs.regions import Region, ambient_regions, node_regions
from graphs import dynamo_graph

BF16, FP16 = torch.bfloat16, torch.float16
OURS = Region(True, BF16, by_user=False)


def regions_of(gm: fx.GraphModule, ambient: Region = OURS) -> list[Region]:
    """The CPU region of every matmul, in order."""
    found = node_regions(gm.graph.nodes, {"cpu": ambient})
    return [found[n]["cpu"] for n in gm.graph.nodes if n.target is torch.matmul]


def test_devices_have_regions_of_their_own() -> None:
    with enable_autocast("cuda", True, FP16):
        assert ambient_regions({"cpu": BF16, "cuda": BF16}) == {
            "cpu": OURS,
            "cuda": Region(True, FP16, by_user=True),
        }


def test_an_ambient_autocast_that_is_disabled_is_no_autocast() -> None:
    with torch.autocast("cpu", enabled=False):
        assert ambient_regions({"cpu": BF16}) == {"cpu": OURS}


def test_a_region_without_a_dtype_has_the_devices_autocast_dtype() -> None:
    def program(x: Tensor, w: Tensor) -> Tensor:
        with torch.autocast("cpu"):
            return torch.matmul(x, w)

    gm = dynamo_graph(program, torch.randn(4, 4), torch.randn(4, 4))
    assert regions_of(gm, Region(True, FP16, by_user=False)) == [Region(True, BF16, by_user=True)]


def test_a_region_of_another_device_leaves_this_one_alone() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    mode = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cuda", FP16, True, None))
    product = graph.call_function(torch.matmul, (x, x))
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (mode,))
    graph.output(product)
    found = node_regions(graph.nodes, {"cpu": OURS})
    assert found[product] == {"cpu": OURS, "cuda": Region(True, FP16, by_user=True)}
