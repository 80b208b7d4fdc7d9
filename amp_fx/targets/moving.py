"""A Dynamo graph that was traced on the CPU becomes the graph of the same program on another device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_map_only

from amp_fx._torch import FakeTensor
from amp_fx.graphs.calls import tensor_nodes
from amp_fx.graphs.keys import SOURCE_META

__all__ = ["fresh", "move", "rebuild"]

#: calls that make a tensor of sizes and numbers, on the current device unless told
_FACTORIES = frozenset(
    {
        torch.arange, torch.bartlett_window, torch.blackman_window, torch.empty, torch.empty_permuted,
        torch.empty_strided, torch.eye, torch.full, torch.hamming_window, torch.hann_window, torch.kaiser_window,
        torch.linspace, torch.logspace, torch.normal, torch.ones, torch.rand, torch.randint, torch.randn,
        torch.randperm, torch.range, torch.scalar_tensor, torch.tril_indices, torch.triu_indices, torch.zeros,
    }
)  # fmt: skip

#: calls that make a tensor of Python values, which torch does on the host and copies
_LITERALS = frozenset({torch.as_tensor, torch.asarray, torch.tensor})


@dataclass(frozen=True)
class _Source:
    """Dynamo's name of an input, without the guards that belong to it."""

    name: str


def move(gm: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of a Dynamo graph whose CPU values are on another device.

    Fake values, ``device=`` arguments and calls that make tensors move; numbers and sizes stay. Bodies of
    higher-order ops move, too. Each value has a storage of its own: inputs that are views of each other are not.

    Args:
        gm: as :class:`amp_fx.targets.tracing.Tracer` keeps it; not changed.
        device: where to.
    """

    def change(node: fx.Node) -> None:
        if SOURCE_META in node.meta:
            node._dynamo_source = _Source(node.meta[SOURCE_META])  # type: ignore[attr-defined]  # Dynamo's own
        node.args, node.kwargs = fx.node.map_aggregate(  # type: ignore[assignment]  # as they were
            (node.args, node.kwargs), lambda value: _there(value, device)
        )
        if node.op == "call_function":
            _make_there(node, device)
        if "example_value" in node.meta:
            node.meta["example_value"] = tree_map_only(
                FakeTensor, lambda value: fresh(value, device), node.meta["example_value"]
            )

    return rebuild(gm, change)


def rebuild(gm: fx.GraphModule, change: Callable[[fx.Node], None]) -> fx.GraphModule:
    """A copy of a Dynamo graph, and of the bodies of its higher-order ops, whose nodes ``change`` has seen."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        change(copy)
    built = fx.GraphModule(gm, graph)
    built.meta.update(gm.meta)
    for name, child in list(built.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(built, name, rebuild(child, change))
    return built


def fresh(value: FakeTensor, device: torch.device | None = None) -> torch.Tensor:
    """A fake tensor like another, with a storage of its own; one on the CPU moves to ``device``."""
    there = device if device is not None and value.device.type == "cpu" else value.device
    with value.fake_mode:
        new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=there)
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(new, value.requires_grad)
    return new.requires_grad_(value.requires_grad)


def _there(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.device) and value.type == "cpu":
        return device
    return device.type if isinstance(value, str) and value == "cpu" else value


def _make_there(node: fx.Node, device: torch.device) -> None:
    """A call that makes a tensor on the CPU makes it on the device; one of a list of numbers, without the numbers."""
    made = node.meta.get("example_value")
    if not isinstance(made, torch.Tensor) or made.device.type != "cpu":
        return
    if node.target in _FACTORIES:
        node.kwargs = {**node.kwargs, "device": device}
    elif _makes_literal(node):
        scalar = not made.ndim and not isinstance(node.args[-1], (list, tuple))
        node.op, node.target = "call_function", torch.full if scalar else torch.empty
        node.args = ((), node.args[-1]) if scalar else (tuple(made.shape),)
        node.kwargs = {"dtype": made.dtype, "device": device}


def _makes_literal(node: fx.Node) -> bool:
    given = node.args[1:] if node.target == "new_tensor" else node.args
    values = [each.meta.get("example_value") for each in tensor_nodes(given)]
    return (
        # torch.FloatTensor is not of a class that Python has a name for
        (node.target in (*_LITERALS, "new_tensor") or type(node.target) is type(torch.FloatTensor))
        and bool(given)
        and not any(isinstance(value, torch.Tensor) for value in values)
    )
