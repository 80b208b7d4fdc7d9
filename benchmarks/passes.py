"""What amp_fx's own work costs: capture and passes of one graph, without Inductor."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.fx as fx

from amp_fx.graphs.regions import ambient_regions
from amp_fx.options import Options
from amp_fx.rewriting import rewrite
from benchmarks.arms import Arm, prepare
from benchmarks.workloads import Workload

__all__ = ["pass_cost"]


def pass_cost(workload: Workload, arm: Arm, mode: str, device: str) -> tuple[float, int]:
    """Seconds of capture and passes over all graphs of a workload, and the nodes of Dynamo's graphs.

    The best of three, for it is a matter of milliseconds.
    """
    options = Options.parse(None, arm.options)
    ambient = ambient_regions({device: options.low_dtype(device)})
    seconds: list[float] = []
    nodes: list[int] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        times = []
        for _ in range(3):
            start = time.perf_counter()
            rewrite(gm, ambient, options, training=mode == "training")
            times.append(time.perf_counter() - start)
        seconds.append(min(times))
        nodes.append(len(gm.graph.nodes))
        return gm.forward

    prepare(workload, Arm("passes", backend), mode, device).forward()
    return sum(seconds), sum(nodes)
