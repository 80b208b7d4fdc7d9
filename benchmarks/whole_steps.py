"""A training step in one graph: loss and gradients, compiled together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from amp_fx.targets import TARGETS
from amp_fx.targets.tracing import Tracer
from benchmarks.arms import Arm, prepare
from benchmarks.counts import counting
from benchmarks.on_target import compile_graphs
from benchmarks.workloads import Workload

__all__ = ["whole_step_bytes"]


def whole_step_bytes(workload: Workload, arm: Arm, device: str = "cpu") -> int:
    """Bytes that loss and gradients move in one graph, as Inductor estimates them; what updates parameters is left out.

    Args:
        workload: its model stays as it was.
        arm: how it is compiled.
        device: where, or the target of this process.
    """
    with torch._dynamo.config.patch(trace_autograd_ops=True), counting() as counter:
        if device in TARGETS:
            tracer = Tracer()
            # the target's own autocast comes when the graph is compiled for it
            _run(workload, replace(arm, autocast=False), tracer, None)
            compile_graphs(tracer.graphs, arm, counter.inner_compile)
        else:
            _run(workload, arm, arm.backend, arm.options)
    if len(counter.graphs) != 1:
        raise RuntimeError(f"a whole step is one graph; {workload.name}, {arm.name}: {len(counter.graphs)}")
    return counter.total.bytes_moved


def _run(workload: Workload, arm: Arm, backend: Any, options: Any) -> None:
    prepared = prepare(workload, replace(arm, backend=None), "training")
    parameters = [p for p in prepared.model.parameters() if p.requires_grad]
    loss_of: Callable[..., Tensor] = prepared.loss

    def step(batch: dict[str, Tensor]) -> object:
        # a region where it is off would be one of fp32
        with torch.autocast("cpu", arm.dtype) if arm.autocast else contextlib.nullcontext():
            loss = loss_of(prepared.model, batch)
        return loss.detach(), torch.autograd.grad(loss, parameters)

    chosen = None if options is None else dict(options)
    torch.compile(step, backend=backend, options=chosen, dynamic=False, fullgraph=True)(prepared.batch)
    torch._dynamo.reset()
