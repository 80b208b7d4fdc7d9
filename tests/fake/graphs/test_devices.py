"""Which device a graph, and a call in it, is about."""

from __future__ import annotations

import pytest
import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx.graphs.values import call_device, graph_device, graph_devices


def graph(*given: tuple[str, str, tuple[int, ...]]) -> fx.GraphModule:
    """A graph whose nodes have one value each: op, device and shape."""
    made, mode = fx.Graph(), FakeTensorMode()
    for position, (op, device, shape) in enumerate(given):
        node = made.create_node(op, f"x{position}" if op == "placeholder" else torch.relu, ())
        with mode:
            node.meta["example_value"] = torch.empty(shape, device=device)
    made.output(())
    return fx.GraphModule({}, made)


@pytest.mark.parametrize("device", ["xpu", "mps", "mtia", "cuda"])
def test_a_number_on_the_cpu_says_nothing_about_the_device(device: str) -> None:
    gm = graph(("placeholder", "cpu", ()), ("placeholder", device, (8,)), ("call_function", device, (8,)))
    assert graph_devices(gm) == {device}
    assert graph_device(gm, {"cpu", device}) == device


def test_a_graph_of_numbers_alone_is_about_the_cpu() -> None:
    assert graph_devices(graph(("placeholder", "cpu", ()), ("call_function", "cpu", ()))) == {"cpu"}


@pytest.mark.parametrize(("large", "small"), [("cpu", "cuda"), ("cuda", "cpu"), ("cpu", "xpu")])
def test_a_graph_is_about_the_device_that_computes_most(large: str, small: str) -> None:
    gm = graph(
        ("placeholder", small, (512,)), ("call_function", large, (64,)), ("call_function", small, (4,))
    )
    assert graph_devices(gm) == {large, small}
    assert graph_device(gm, {large, small}) == large


def test_a_graph_that_computes_nothing_is_about_one_of_its_devices() -> None:
    gm = graph(("placeholder", "cpu", (8,)), ("placeholder", "xpu", (8,)))
    assert graph_device(gm, {"cpu", "xpu"}) == "xpu"
    assert graph_device(gm, ()) == "cpu"


def test_a_call_is_on_the_device_of_what_is_more_than_a_number() -> None:
    with FakeTensorMode():
        number, x = torch.empty(()), torch.empty(8, device="cuda")
    assert call_device([number, x], ("cpu", "cuda")) == "cuda"
    assert call_device([number], ("cpu", "cuda")) == "cpu"
    assert call_device([number, x], ("cpu",)) == "cpu"
    assert call_device([x], ("cpu",)) is None
