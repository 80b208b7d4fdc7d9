"""Autocast state as plain facts about nodes, and which Dynamo graphs mixed precision leaves alone.

``torch.autocast`` leaves no trace in an FX graph when it is entered outside the compiled call, and a pair of
``_enter_autocast`` / ``_exit_autocast`` calls when it is entered inside. Both become a :class:`Region` per
node, so that no later stage has to know about autocast's thread-local state.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx._torch import in_compiled_autograd
from amp_fx.graphs.calls import is_gradient_call, start
from amp_fx.graphs.values import graph_devices, listed_devices, tensors

ENTER = torch.amp.autocast_mode._enter_autocast
EXIT = torch.amp.autocast_mode._exit_autocast

#: what a stack trace names when an optimizer of torch computes
_OPTIMIZERS = os.path.join(os.path.dirname(torch.optim.__file__), "")


@dataclass(frozen=True)
class Region:
    """The autocast state of one device type at one node."""

    #: False inside ``torch.autocast(..., enabled=False)``: the node runs as it was written
    enabled: bool
    #: the low dtype of the region
    dtype: torch.dtype
    #: the user's own autocast set this state; otherwise it is amp_fx's default
    by_user: bool


#: of each device type
Regions = Mapping[str, Region]


def ambient_regions(defaults: Mapping[str, torch.dtype]) -> dict[str, Region]:
    """The state at graph entry: the user's ambient autocast, else the low dtype that amp_fx has by default."""
    by_user = {device: torch.is_autocast_enabled(device) for device in defaults}
    return {
        device: Region(True, torch.get_autocast_dtype(device) if by_user[device] else low, by_user[device])
        for device, low in defaults.items()
    }


def is_autocast_call(node: fx.Node) -> bool:
    """True for the two calls that open and close an autocast region in a Dynamo graph."""
    return node.op == "call_function" and node.target in (ENTER, EXIT)


def of_user(regions: Regions) -> Regions:
    """The regions of a state that the user's own autocast has switched on."""
    return {device: region for device, region in regions.items() if region.by_user and region.enabled}


def enter_autocast(graph: fx.Graph, regions: Regions) -> list[fx.Node]:
    """Adds calls that switch autocast to a state; each is what the call that switches it back is given."""
    states = [(device, region.dtype, region.enabled, None) for device, region in regions.items()]
    return [graph.call_function(ENTER, state) for state in states]


def leave_autocast(graph: fx.Graph, entered: Iterable[fx.Node]) -> list[fx.Node]:
    """Adds the calls that switch it back."""
    return [graph.call_function(EXIT, (mode,)) for mode in reversed(list(entered))]


def enclose(graph: fx.Graph, regions: Regions) -> None:
    """Switches autocast to a state for all that a graph computes."""
    with graph.inserting_before(start(graph)):
        entered = enter_autocast(graph, regions)
    with graph.inserting_before(graph.output_node()):
        leave_autocast(graph, entered)


def node_regions(nodes: Iterable[fx.Node], ambient: Regions) -> dict[fx.Node, Regions]:
    """The region every node stands in, per device type.

    A region without a dtype has the device's autocast dtype, as ``torch.autocast`` does.
    """
    result: dict[fx.Node, Regions] = {}
    current = dict(ambient)
    saved: dict[fx.Node, dict[str, Region]] = {}
    for node in nodes:
        if node.op == "call_function" and node.target is ENTER:
            saved[node] = current
            device_type, dtype, enabled = str(node.args[0]), node.args[1], bool(node.args[2])
            low = dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(device_type)
            current = {**current, device_type: Region(enabled, low, by_user=True)}
        elif node.op == "call_function" and node.target is EXIT:
            current = saved[node.all_input_nodes[0]]
        result[node] = current
    return result


def not_ours(gm: fx.GraphModule) -> str:
    """Why a Dynamo graph is compiled as it stands, or an empty string."""
    if in_compiled_autograd():
        return "compiled autograd's backward: its casts are already those of the forward"
    calls = [node for node in gm.graph.nodes if node.op in ("call_function", "call_method")]
    # other optimizers than torch.optim's are made of foreach ops
    is_foreach = any(getattr(node.target, "__name__", "").startswith("_foreach_") for node in calls)
    if is_foreach or (calls and all(_OPTIMIZERS in node.meta.get("stack_trace", "") for node in calls)):
        return "an optimizer's graph"
    if not any(
        isinstance(value := node.meta.get("example_value"), torch.Tensor)
        and value.is_floating_point()
        and value.dtype is not torch.float64
        for node in gm.graph.nodes
    ):
        return "no floating tensor below fp64"
    if not listed_devices(gm):
        return f"autocast has no op list for {', '.join(sorted(graph_devices(gm)))}"
    return ""


def takes_own_gradients(gm: fx.GraphModule) -> bool:
    """True for a train step in one graph: it calls ``torch.autograd.grad``, and nothing it returns has a gradient."""
    if not any(map(is_gradient_call, gm.graph.nodes)):
        return False
    returned = gm.graph.output_node().all_input_nodes
    values = (value for node in returned for value in tensors(node.meta.get("example_value")))
    return not any(value.requires_grad for value in values)
