"""Tensor parallelism in a graph: DTensors are captured as the plain tensors that they stand for.

A DTensor computes what a plain tensor of its global shape computes, and casts like one. So the graph is captured on
plain fake tensors of the global shapes; what changes a layout (``from_local``, ``redistribute``, ``to_local``) stays as
Dynamo wrote it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import FakeTensor, FakeTensorMode
from amp_fx.graphs.values import tensors

__all__ = ["changes_layout", "fake_mode_of", "is_distributed", "stand_in"]


def is_distributed(value: object) -> bool:
    """True for a DTensor. Nobody has one who has not imported the module."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def fake_mode_of(value: torch.Tensor) -> FakeTensorMode | None:
    """The mode that a fake tensor belongs to, or the one that a DTensor holds."""
    if is_distributed(value):
        value = value.to_local()  # type: ignore[attr-defined]  # a DTensor
    return value.fake_mode if isinstance(value, FakeTensor) else None


def stand_in(value: Any) -> Any:
    """A plain fake tensor for a DTensor, to be made under its fake mode; other values as they are."""
    if not is_distributed(value):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def changes_layout(node: fx.Node) -> bool:
    """True for a call that makes a DTensor of something else, or the reverse, or places it in another way."""
    if node.op not in ("call_function", "call_method"):
        return False
    given = any(map(is_distributed, _values(*node.all_input_nodes)))
    made = any(map(is_distributed, _values(node)))
    return given != made or (made and _name(node) in ("redistribute", "full_tensor"))


def _values(*nodes: fx.Node) -> list[torch.Tensor]:
    return [value for node in nodes for value in tensors(node.meta.get("example_value"))]


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
