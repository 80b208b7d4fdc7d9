"""Which devices a graph and its calls compute on.

PyTorch lets a 0-d CPU tensor take part in what runs on any device, as a number does. It says nothing about where the
arithmetic is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.fx as fx

from amp_fx.graphs.values import numel, tensors

__all__ = ["call_device", "graph_device", "graph_devices"]


def graph_devices(gm: fx.GraphModule) -> frozenset[str]:
    """Device types of the tensors in a Dynamo or captured graph; 0-d CPU tensors only if there is nothing else."""
    values = [value for node in gm.graph.nodes for value in _values(node)]
    placed = [value for value in values if not _is_number(value)]
    return frozenset(value.device.type for value in placed or values)


def graph_device(gm: fx.GraphModule, among: Collection[str]) -> str:
    """The device type that a Dynamo or captured graph is about: where its calls compute the most elements.

    Args:
        gm: the graph.
        among: device types to choose from; none: ``"cpu"``.
    """
    elements: Counter[str] = Counter()
    for node in gm.graph.nodes:
        if node.op in ("call_function", "call_method"):
            for value in _values(node):
                if value.is_floating_point():
                    elements[value.device.type] += numel(value)
    return max(among, key=lambda device: (elements[device], device != "cpu", device), default="cpu")


def call_device(values: Sequence[torch.Tensor], among: Collection[str]) -> str | None:
    """The device type that a call computes on.

    Args:
        values: what it takes and returns.
        among: device types to choose from.

    Returns:
        None if no value is on one of these.
    """
    found = [value for value in values if value.device.type in among]
    placed = [value for value in found if not _is_number(value)]
    return next((value.device.type for value in placed or found), None)


def _values(node: fx.Node) -> list[torch.Tensor]:
    value: Any = node.meta.get("val", node.meta.get("example_value"))
    return tensors(value)


def _is_number(value: torch.Tensor) -> bool:
    return value.ndim == 0 and value.device.type == "cpu"
