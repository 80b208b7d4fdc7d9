"""A Dynamo graph that was measured: priced again for any device, rewritten for any weight."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx as fx

from amp_fx.calibration.fp8_graph import Fp8Graph
from amp_fx.graphs.capture import capture
from amp_fx.graphs.devices import graph_device
from amp_fx.graphs.regions import Region
from amp_fx.options import Options
from amp_fx.passes import OUTLINE, Classify, Constrain, PassContext, PinDtypes, run_in_order, run_passes
from amp_fx.passes.base import bodies
from amp_fx.passes.forward.place_by_harm import Placement, PricedGraph, price
from amp_fx.placement.profile import DeviceProfile
from amp_fx.plans.harm import CallHarm
from amp_fx.plans.plan import Plan
from amp_fx.rewriting import rewrite
from amp_fx.targets.moving import move
from amp_fx.targets.tracing import Tracer

__all__ = ["TracedGraph"]


@dataclass
class TracedGraph:
    """One graph of a model.

    Attributes:
        gm: Dynamo's graph; not changed.
        ambient: autocast state at its entry, per device type.
        name: Dynamo's id.
        fp8: under policy fp8: the matmuls that may run in fp8.
    """

    gm: fx.GraphModule
    ambient: Mapping[str, Region]
    name: str
    fp8: Fp8Graph | None = None

    @classmethod
    def on_target(
        cls, gm: fx.GraphModule, inputs: Sequence[Any], ambient: Mapping[str, Region], low: torch.dtype
    ) -> TracedGraph:
        """The same graph on a GPU, with that device's op lists; the GPU need not be in this machine.

        Args:
            gm: on the CPU; not changed.
            inputs: real ones.
            ambient: autocast state at its entry, per device type.
            low: the low dtype.
        """
        tracer = Tracer()
        tracer(gm, inputs)
        (kept,) = tracer.graphs
        for node in kept.gm.graph.find_nodes(op="placeholder"):
            if isinstance(value := node.meta["example_value"], torch.Tensor):
                # autograd would ask for the device, and ends the process where there is none
                value.requires_grad_(False)
        region = ambient.get("cpu", Region(True, low, by_user=False))
        return cls(move(kept.gm, torch.device("cuda", 0)), {"cuda": region}, kept.name)

    @property
    def device_type(self) -> str:
        """Type of the device that it runs on."""
        return graph_device(self.gm, self.ambient)

    def priced(
        self, opts: Options, profile: DeviceProfile | None, rows: Mapping[str, CallHarm]
    ) -> list[PricedGraph]:
        """The graph and the bodies inside it, each with its prices.

        Args:
            opts: policy and rules.
            profile: rates by which time is counted; None: bytes moved.
            rows: what was measured, by the call's name.
        """
        context = PassContext(opts.policy, opts.numerics, profile, training=True)
        return list(_priced(capture(self.gm, self.ambient), context, rows))

    def outline(self, opts: Options) -> Plan:
        """The graph's calls as ``classify`` labels them."""
        outline = run_passes(capture(self.gm, self.ambient), OUTLINE, PassContext(opts.policy, training=True))
        outline.graph, outline.training = self.name, True
        return outline

    def plan(self, opts: Options, placement: Placement | None = None) -> Plan:
        """What the backend would do with these options; see :func:`amp_fx.rewriting.rewrite`."""
        _, plan = rewrite(self.gm, self.ambient, opts, training=True, placement=placement)
        plan.graph = self.name
        return plan


def _priced(gm: fx.GraphModule, context: PassContext, rows: Mapping[str, CallHarm]) -> Iterator[PricedGraph]:
    for name, body in bodies(gm):
        yield from _priced(body, replace(context, path=f"{context.path}{name}."), rows)
    run_in_order(gm, (PinDtypes(), Classify(), Constrain()), context)
    if (found := price(gm, context, rows)) is not None:
        yield found
