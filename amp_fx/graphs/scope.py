"""Which Dynamo graphs are mixed precision's business."""

from __future__ import annotations

import os
from collections.abc import Collection

import torch
import torch.fx as fx

from amp_fx._torch import in_compiled_autograd
from amp_fx.graphs.calls import is_gradient_call
from amp_fx.graphs.devices import graph_devices
from amp_fx.graphs.values import tensors

__all__ = ["not_ours", "takes_own_gradients"]

#: what a stack trace names when an optimizer of torch computes
_OPTIMIZERS = os.path.join(os.path.dirname(torch.optim.__file__), "")


def not_ours(gm: fx.GraphModule, devices: Collection[str]) -> str:
    """Why a graph is compiled as it stands, or an empty string.

    Args:
        gm: Dynamo's graph.
        devices: types of the devices that have op lists.
    """
    if in_compiled_autograd():
        return "compiled autograd's backward: its casts are already those of the forward"
    if _is_optimizer(gm):
        return "an optimizer's graph"
    if not any(
        isinstance(value := node.meta.get("example_value"), torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        for node in gm.graph.nodes
    ):
        return "no floating tensor below fp64"
    if not graph_devices(gm).intersection(devices):
        return f"autocast has no op list for {', '.join(sorted(graph_devices(gm)))}"
    return ""


def takes_own_gradients(gm: fx.GraphModule) -> bool:
    """True for a train step in one graph: it calls ``torch.autograd.grad``, and nothing it returns has a gradient."""
    if not any(map(is_gradient_call, gm.graph.nodes)):
        return False
    returned = gm.graph.output_node().all_input_nodes
    return not any(
        value.requires_grad for node in returned for value in tensors(node.meta.get("example_value"))
    )


def _is_optimizer(gm: fx.GraphModule) -> bool:
    """True for what torch.optim computes, and for the foreach ops that other optimizers are made of."""
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    if any(getattr(node.target, "__name__", "").startswith("_foreach_") for node in calls):
        return True
    return bool(calls) and all(_OPTIMIZERS in node.meta.get("stack_trace", "") for node in calls)
