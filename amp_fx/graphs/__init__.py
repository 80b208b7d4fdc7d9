"""A program as a graph: how Dynamo's and torch.export's graphs become the form that passes work on.

Here: capture to pre-dispatch ATen, exported programs in the same form, autocast state as facts about nodes, questions
that passes ask about nodes, and the fallback for graphs that cannot be captured.
Not here: which precision a node gets (``amp_fx.policy``, ``amp_fx.placement``), and anything that changes a dtype
(``amp_fx.passes``).
Open ``capture.py`` first.
"""

from __future__ import annotations

from amp_fx.graphs.capture import capture
from amp_fx.graphs.devices import graph_device, graph_devices
from amp_fx.graphs.exported import adopt, ambient_dtype
from amp_fx.graphs.fallback import under_autocast, warn_fallback
from amp_fx.graphs.regions import Region, ambient_regions, node_regions

__all__ = [
    "Region",
    "adopt",
    "ambient_dtype",
    "ambient_regions",
    "capture",
    "graph_device",
    "graph_devices",
    "node_regions",
    "under_autocast",
    "warn_fallback",
]
