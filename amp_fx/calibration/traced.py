"""A Dynamo graph that was measured: priced again for any device, rewritten for any weight."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from amp_fx.calibration.below import MatmulsBelow
from amp_fx.graphs.capture import capture
from amp_fx.graphs.regions import Region, ambient_regions
from amp_fx.graphs.values import graph_device, tensors
from amp_fx.passes import OUTLINE, Classify, Constrain, PassContext, PinDtypes, run_in_order, run_passes
from amp_fx.passes.base import bodies
from amp_fx.passes.forward.place_by_sensitivity import Placement, PricedGraph, price
from amp_fx.placement.profile import DeviceProfile
from amp_fx.plans.plan import Plan
from amp_fx.plans.sensitivity import CallSensitivity
from amp_fx.rewriting import rewrite
from amp_fx.settings import Options
from amp_fx.targets import tracing
from amp_fx.targets.process import TargetProcess
from amp_fx.weights.inference import weight_inputs

__all__ = ["MeasuredGraph", "TargetGraph", "there"]


@dataclass
class MeasuredGraph:
    """One graph of a model.

    Attributes:
        gm: Dynamo's graph; not changed.
        ambient: autocast state at its entry, per device type.
        name: Dynamo's id.
        training: False where what is planned is called without gradients, with weights of which copies are kept.
        below: the matmuls that may run below 16 bits; none under other policies.
    """

    gm: fx.GraphModule
    ambient: Mapping[str, Region]
    name: str
    training: bool = True
    below: MatmulsBelow = field(default_factory=MatmulsBelow)

    @property
    def device_type(self) -> str:
        """Type of the device that it runs on."""
        return graph_device(self.gm, self.ambient)

    def priced(
        self, opts: Options, profile: DeviceProfile | None, rows: Mapping[str, CallSensitivity]
    ) -> list[PricedGraph]:
        """The graph and the bodies inside it, each with its prices.

        Args:
            opts: policy and rules.
            profile: rates by which time is counted; None: bytes moved.
            rows: what was measured, by the call's name.
        """
        context = PassContext(opts.policy, opts.numerics, profile, self.training)
        captured = self._run(_constrained, context)
        if not self.training:
            context = replace(context, folded=weight_inputs(captured))
        return list(_priced(captured, context, rows))

    def outline(self, opts: Options) -> Plan:
        """The graph's calls as ``classify`` labels them."""
        outline = self._run(_outline, PassContext(opts.policy, training=self.training))
        outline.graph, outline.training = self.name, self.training
        return outline

    def plan(self, opts: Options, placement: Placement | None = None) -> Plan:
        """What the backend would do with these options; see :func:`amp_fx.rewriting.rewrite`."""
        plan = self._run(_plan, opts, placement, self.training)
        plan.graph = self.name
        return plan

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """A function of Dynamo's graph and the autocast state, where the device is."""
        return function(self.gm, self.ambient, *args)


@dataclass
class TargetGraph(MeasuredGraph):
    """The same graph on a GPU, with that device's op lists; the GPU need not be in this machine.

    What is done with it is done where :func:`amp_fx.explain` does it: in the process that compiles for the target.

    Attributes:
        traced: on the CPU, as data.
        process: that compiles for the target.
        low: the low dtype.
    """

    traced: tracing.TracedGraph = field(kw_only=True)
    process: TargetProcess = field(kw_only=True)
    low: torch.dtype = field(kw_only=True)

    @classmethod
    def of(
        cls,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        low: torch.dtype,
        process: TargetProcess,
        *,
        training: bool,
    ) -> TargetGraph:
        """A graph of Dynamo's on the CPU, in a call of a backend.

        Args:
            gm: not changed.
            inputs: real ones.
            low: the low dtype.
            process: that compiles for the target.
            training: as the attribute.
        """
        tracer = tracing.Tracer()
        tracer(gm, inputs)
        (traced,) = tracer.graphs
        return cls(traced.gm, {}, traced.name, training, traced=traced, process=process, low=low)

    @property
    def device_type(self) -> str:
        """That of all targets."""
        return "cuda"

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """As above, with what can be sent from process to process.

        Raises:
            TargetError: the graph cannot be sent.
        """
        found = self.process.call(f"{__name__}:there", function.__name__, self.traced, self.low, *args)
        return found.gm if isinstance(found, tracing.TracedGraph) else found


def there(name: str, traced: tracing.TracedGraph, low: torch.dtype, *args: Any) -> Any:
    """The part of :class:`TargetGraph` in the process that compiles for the target."""
    # late: only the other process needs Inductor
    from amp_fx.targets.compiling import on_target

    with on_target(traced) as (gm, inputs, _):
        for value in tensors(inputs):
            # what is sent back is read where autograd would ask for the device, and there is none
            value.requires_grad_(False)
        found = globals()[name](gm, ambient_regions({"cuda": low}), *args)
        return replace(traced, gm=found) if isinstance(found, fx.GraphModule) else found


def _outline(gm: fx.GraphModule, ambient: Mapping[str, Region], context: PassContext) -> Plan:
    return run_passes(capture(gm, ambient), OUTLINE, context)


def _plan(
    gm: fx.GraphModule,
    ambient: Mapping[str, Region],
    opts: Options,
    placement: Placement | None,
    training: bool,
) -> Plan:
    with torch.set_grad_enabled(training):
        return rewrite(gm, ambient, opts, training=training, placement=placement)[1]


def _constrained(gm: fx.GraphModule, ambient: Mapping[str, Region], context: PassContext) -> fx.GraphModule:
    """The graph and the bodies inside it, classified, with hazards pinned."""
    captured = capture(gm, ambient)
    _constrain(captured, context)
    return captured


def _constrain(gm: fx.GraphModule, context: PassContext) -> None:
    for name, body in bodies(gm):
        _constrain(body, _inside(context, name))
    run_in_order(gm, (PinDtypes(), Classify(), Constrain()), context)


def _priced(
    gm: fx.GraphModule, context: PassContext, rows: Mapping[str, CallSensitivity]
) -> Iterator[PricedGraph]:
    for name, body in bodies(gm):
        yield from _priced(body, _inside(context, name), rows)
    if (found := price(gm, context, rows)) is not None:
        yield found


def _inside(context: PassContext, name: str) -> PassContext:
    """What passes read in a body."""
    return replace(context, path=f"{context.path}{name}.")
