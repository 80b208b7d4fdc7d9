"""``amp_fx.explain`` for a GPU that is not in the machine: Dynamo traces here, another process compiles."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from amp_fx.notices import only_looking
from amp_fx.plans.plan import Cost, ModuleCasts, Plan
from amp_fx.reports.baseline import autocast_backend
from amp_fx.reports.casts import casts_by_module
from amp_fx.reports.left_out import NotCompiled, entry_of
from amp_fx.reports.lowered import LoweredGraphs
from amp_fx.reports.report import record
from amp_fx.reports.untouched import untouched
from amp_fx.targets.process import TargetProcess
from amp_fx.targets.tracing import TracedGraph, Tracer, on_meta, without_data

__all__ = ["compiled_graphs", "explain_for"]

#: what :func:`amp_fx.explain` makes a report of
Explained = tuple[list[Plan], dict[str, Cost], list[ModuleCasts]]


def explain_for(
    target: str,
    program: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Mapping[str, Any],
    not_compiled: NotCompiled,
) -> Explained:
    """Plans, costs and casts by module of one call on a target.

    Args:
        target: ``"cuda:h100"``.
        program: on the CPU or on ``meta``; left as it was.
        args: of the call.
        kwargs: of the call.
        options: of the backend.
        not_compiled: takes what Dynamo says of what it does not compile.

    Raises:
        TargetError: no such target, or this machine lacks what it takes.
        CaptureError, PassError: with ``strict``, a graph cannot be rewritten.
    """
    # first: it says in a moment if it cannot
    with contextlib.closing(TargetProcess(target)) as process:
        with only_looking():
            graphs = _traced(program, args, kwargs, not_compiled)
        return process.call("amp_fx.reports.targeted:compiled_graphs", graphs, dict(options))


def _traced(
    program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], not_compiled: NotCompiled
) -> list[TracedGraph]:
    tracer = Tracer()

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        return tracer(gm, example_inputs)

    if on_meta(program, args, kwargs):
        copy, given, named = without_data(program, args, kwargs)
        context = contextlib.nullcontext((given, named))
    else:
        copy, context = program, untouched(program, args, kwargs)
    entry = entry_of(copy)
    with not_compiled.listen(), context as (given, named):
        torch.compile(entry, backend=backend)(*given, **named)
    return tracer.graphs


def compiled_graphs(graphs: Sequence[TracedGraph], options: Mapping[str, Any]) -> Explained:
    """The part of :func:`explain_for` in the process that compiles for the target."""
    # late: it listens to Dynamo as soon as it is loaded
    from amp_fx.backend import amp_fx

    with record() as recording, only_looking():
        ours = _lowered(graphs, lambda gm, inputs: amp_fx(gm, inputs, options=options))
    ours.complete(recording.plans)
    breaks = {graph.name: graph.graph_break for graph in graphs}
    for plan in recording.plans:
        plan.graph_break = breaks[plan.graph] if plan.phase == "forward" else ""
    theirs = _lowered(graphs, autocast_backend(options))
    costs = {"amp_fx": ours.cost, "torch.autocast": theirs.cost}
    sides = {"torch.autocast": theirs.by_phase, "amp_fx": ours.by_phase}
    return recording.plans, costs, casts_by_module(sides, recording.plans)


def _lowered(
    graphs: Sequence[TracedGraph], backend: Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
) -> LoweredGraphs:
    # late: only the other process needs Inductor
    from amp_fx.targets.compiling import compile_graph

    found = LoweredGraphs()
    for graph in graphs:
        compile_graph(graph, backend, found.inner_compile)
    return found
