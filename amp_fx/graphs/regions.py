"""Autocast state as plain facts about nodes: the ambient state and the regions inside the model.

``torch.autocast`` leaves no trace in an FX graph when it is entered outside the compiled call, and a pair of
``_enter_autocast`` / ``_exit_autocast`` calls when it is entered inside. Both become a :class:`Region` per
node, so that no later stage has to know about autocast's thread-local state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

__all__ = ["Region", "ambient_regions", "is_autocast_call", "node_regions"]

_ENTER = torch.amp.autocast_mode._enter_autocast
_EXIT = torch.amp.autocast_mode._exit_autocast


@dataclass(frozen=True)
class Region:
    """The autocast state of one device type at one node.

    Attributes:
        enabled: False inside ``torch.autocast(..., enabled=False)``: the node runs as it was written.
        dtype: the low dtype of the region.
        by_user: the user's own autocast set this state; otherwise it is amp_fx's default.
    """

    enabled: bool
    dtype: torch.dtype
    by_user: bool


def ambient_regions(defaults: Mapping[str, torch.dtype]) -> dict[str, Region]:
    """The state at graph entry: the user's ambient autocast where there is one, else amp_fx's own.

    Args:
        defaults: device type -> low dtype that amp_fx would use by itself.
    """
    regions = {}
    for device_type, low in defaults.items():
        if torch.is_autocast_enabled(device_type):
            regions[device_type] = Region(True, torch.get_autocast_dtype(device_type), by_user=True)
        else:
            regions[device_type] = Region(True, low, by_user=False)
    return regions


def is_autocast_call(node: fx.Node) -> bool:
    """True for the two calls that open and close an autocast region in a Dynamo graph."""
    return node.op == "call_function" and node.target in (_ENTER, _EXIT)


def node_regions(
    nodes: Iterable[fx.Node], ambient: Mapping[str, Region]
) -> dict[fx.Node, Mapping[str, Region]]:
    """The region every node stands in, per device type.

    A region without a dtype has the device's autocast dtype, as ``torch.autocast`` does.
    """
    result: dict[fx.Node, Mapping[str, Region]] = {}
    current = dict(ambient)
    saved: dict[fx.Node, dict[str, Region]] = {}
    for node in nodes:
        if node.op == "call_function" and node.target is _ENTER:
            saved[node] = current
            device_type, dtype, enabled = str(node.args[0]), node.args[1], bool(node.args[2])
            low = dtype if isinstance(dtype, torch.dtype) else torch.get_autocast_dtype(device_type)
            current = {**current, device_type: Region(enabled, low, by_user=True)}
        elif node.op == "call_function" and node.target is _EXIT:
            current = saved[node.all_input_nodes[0]]
        result[node] = current
    return result
