"""Times of a graph's placements by the cost model: as its plan has it, as torch.autocast would, and in fp32."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.fx as fx

from amp_fx.compiler.settings import Options
from amp_fx.errors import CaptureError, PassError
from amp_fx.graphs.capture import capture
from amp_fx.graphs.regions import Region
from amp_fx.graphs.values import graph_device
from amp_fx.passes import Classify, Constrain, PassContext, PinDtypes
from amp_fx.passes.base import bodies, run_in_order
from amp_fx.passes.forward.place_by_sensitivity import price
from amp_fx.precision.placement.devices import resolve
from amp_fx.precision.plans.plan import Plan
from amp_fx.runtime.weights.lift import weight_inputs


def constrained(gm: fx.GraphModule, ambient: Mapping[str, Region], context: PassContext) -> fx.GraphModule:
    """The graph and the bodies inside it, captured, classified, with hazards pinned."""
    captured = capture(gm, ambient)
    for body, inside in with_bodies(captured, context):
        run_in_order(body, (PinDtypes(), Classify(), Constrain()), inside)
    return captured


def with_bodies(gm: fx.GraphModule, context: PassContext) -> Iterator[tuple[fx.GraphModule, PassContext]]:
    """The bodies inside a graph, and then the graph, each with what passes read there."""
    for name, body in bodies(gm):
        yield from with_bodies(body, replace(context, path=f"{context.path}{name}."))
    yield gm, context


def add_times(
    plan: Plan, gm: fx.GraphModule, ambient: Mapping[str, Region], opts: Options, *, training: bool
) -> None:
    """Writes into a plan the seconds that its graph takes by the device profile, forward and backward.

    Beside them those of torch.autocast, which casts weights in each call, and of fp32. Nothing is written without a
    profile, with matmuls below 16 bits, which the model of the first cut does not price, and where a graph has no
    single low dtype. What fails here is a line of the report.
    """
    device = graph_device(gm, ambient)
    profile = resolve(opts.profile, device)
    if profile is None or any(row.levels_below for row in plan.nodes):
        return
    context = PassContext(opts.policy, opts.numerics, profile, training, times_calls=opts.profile == "auto")
    rows = {row.name: row for row in plan.nodes}
    found = {"amp_fx": 0.0, "torch.autocast": 0.0, "fp32": 0.0}
    try:
        captured = constrained(gm, ambient, context)
        keeps = opts.weights != "cast" and not torch.is_grad_enabled()
        kept = replace(context, folded=weight_inputs(captured) if keeps else frozenset())
        parts = zip(with_bodies(captured, kept), with_bodies(captured, context), strict=True)
        for (body, ours), (_, theirs) in parts:
            own, stock = price(body, ours, {}), price(body, theirs, {})
            if own is None or stock is None:
                return
            found["amp_fx"] += own.priced.time(own.sides_in(rows)) * 1e-12
            found["torch.autocast"] += stock.priced.time(stock.autocast) * 1e-12
            found["fp32"] += own.priced.time({}) * 1e-12
    except (CaptureError, PassError) as error:
        # the graph itself is compiled as its plan says
        plan.unknown.append(f"predicted times: {error}")
        return
    plan.seconds = found
