"""Arms compiled for a GPU that is not in the machine, as far as counts go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import stock_inductor
from amp_fx.backend import amp_fx
from amp_fx.errors import OptionsError
from amp_fx.targets.compiling import InnerCompile, compile_graph
from amp_fx.targets.tracing import Tracer
from benchmarks.arms import Arm, prepare
from benchmarks.workloads import Workload

__all__ = ["ASSUMED", "compile_arm"]

#: what counts for a target take for granted, as nothing runs
ASSUMED = (
    "16-bit attention without a mask runs in FlashAttention, other attention in the memory-efficient kernel",
    "matmuls are not padded (Inductor would time them on the card)",
    "nothing is tuned on the card",
    "programs are traced without autocast: where a program reads a dtype, it reads that of the fp32 program",
)


def compile_arm(workload: Workload, arm: Arm, mode: str, inner_compile: InnerCompile) -> None:
    """Compiles a workload as an arm does, for this process's target.

    Raises:
        OptionsError: the arm needs a device.
    """
    if arm.backend is None or arm.env:
        raise OptionsError(f"arm {arm.name!r} needs a device.")
    tracer = Tracer()
    prepare(workload, replace(arm, backend=tracer, options=None, autocast=False), mode).forward()

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if arm.backend == "amp_fx":
            return amp_fx(gm, inputs, options=arm.options)
        with torch.autocast("cuda", arm.dtype, enabled=arm.autocast):
            return stock_inductor(gm, inputs)

    for graph in tracer.graphs:
        compile_graph(graph, backend, inner_compile)
