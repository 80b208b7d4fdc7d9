"""torch.autocast with the results that amp_fx has: what a report compares with.

What users have today differs in two ways that are no merit of either: autocast leaves some outputs in the low dtype,
and stock ``torch.compile`` traces the backward under autocast, which rounds more than eager autocast does
(pytorch#153044).
Both would move fewer bytes for other results. Here outputs have the dtypes of the program, and the backward is traced
without autocast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.fx as fx

from amp_fx._torch import autocast_shield, compile_with_inductor
from amp_fx.graphs.fallback import under_autocast
from amp_fx.graphs.regions import ambient_regions
from amp_fx.graphs.values import graph_devices
from amp_fx.policy.table import supported_devices
from amp_fx.settings import Options

__all__ = ["autocast_backend"]


def autocast_backend(options: Mapping[str, Any] | None) -> Callable[..., Callable[..., Any]]:
    """A backend for ``torch.compile``: torch.autocast's own casts, then Inductor.

    Args:
        options: of amp_fx; the low dtype is taken from them.
    """
    opts = Options.parse(None, options)

    def compile_graph(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        devices = graph_devices(gm).intersection(supported_devices())
        ambient = ambient_regions({device: opts.low_dtype(device) for device in devices})
        with autocast_shield():
            return compile_with_inductor(under_autocast(gm, ambient), example_inputs, {})

    return compile_graph
