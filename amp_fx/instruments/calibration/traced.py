"""A Dynamo graph that was measured: priced again for any device, rewritten for any weight, here or for a GPU elsewhere.

With a policy below 16 bits, what it multiplies that may run so is read off the graph on which the backend chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from amp_fx._torch import autocast_shield, compile_with_inductor, graph_pass, replace_inner_compile
from amp_fx.compiler.predicting import constrained, with_bodies
from amp_fx.compiler.rewriting import rewrite
from amp_fx.compiler.settings import Options
from amp_fx.graphs.capture import capture
from amp_fx.graphs.regions import Regions, ambient_regions
from amp_fx.graphs.values import graph_device, tensors
from amp_fx.instruments.targets.process import TargetProcess
from amp_fx.instruments.targets.tracing import TracedGraph, on_target
from amp_fx.passes import OUTLINE, PassContext, PlaceLevels, run_passes
from amp_fx.passes.forward.place_by_sensitivity import Placement, PricedGraph, price
from amp_fx.passes.levels.level_problem import level_problem
from amp_fx.precision.placement.cut import Problem
from amp_fx.precision.placement.level_cost import BYTES, LevelCost
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.plans.sensitivity import CallSensitivity
from amp_fx.precision.policy.levels import AUTO, LEVELS
from amp_fx.runtime.weights.lift import weight_inputs


class Second(NamedTuple):
    """The cut of what may run below 16 bits, where autocast's list is low; its variables are (name of the call, role).

    By time, by bytes moved, and the calls that read by measured scales.
    """

    time: Problem
    by_bytes: Problem
    measured: Collection[str] = ()


#: the second cut, given the scales that calls may read by, and the exponents that they are equalised by
Below = Callable[[Mapping[str, tuple[float, int]], Mapping[str, tuple[int, ...]]], Second]


def read_matmuls(
    gm: fx.GraphModule,
    inputs: Sequence[Any],
    ambient: Regions,
    opts: Options,
    wide: DeviceProfile | None,
    cost: LevelCost,
    names: Mapping[str, str],
    *,
    training: bool,
) -> Below:
    """Rewrites a graph as the policy has it without the level, and reads what may run in that; no code is generated.

    It is Dynamo's graph with real inputs, in a call of a backend. In training, forward and backward are traced
    together; the result is empty where AOTAutograd makes no joint graph. ``wide``: the profile by which it stays in
    fp32, or None. ``names``: call in this graph -> its name in the result.
    """
    plain = replace(opts, profile="off", plan=None, sensitivity=None)
    level = LEVELS[opts.level]
    placed = PlaceLevels(level, graph_device(gm, ambient), cost, joint=training, keeps_weights=not training)
    found: list[Second] = []

    def read(
        graph: fx.GraphModule,
        context: PassContext,
        scales: Mapping[str, tuple[float, int]],
        equalisations: Mapping[str, tuple[int, ...]],
    ) -> Second:
        here = {there: here for here, there in names.items()}
        chosen = replace(
            placed,
            scales=tuple((here[name], scale) for name, scale in scales.items()),
            equalisations=tuple((here[name], each) for name, each in equalisations.items() if each),
        )
        matmuls = {
            replace(matmul, name=names[matmul.name]): way
            for matmul, way in chosen.allowed(graph, context).items()
        }
        measured = {matmul.name for matmul, way in matmuls.items() if way.measured}
        return Second(level_problem(matmuls, level, cost), level_problem(matmuls, level, BYTES), measured)

    if not training:
        # policies below 16 bits differ from autocast in the level alone
        plain = replace(plain, policy=replace(opts.policy, base="autocast"), level=AUTO, weights="cast")
        captured, _ = rewrite(gm, ambient, replace(plain, profile=wide or "off"))
        context = PassContext(opts.policy, opts.numerics, wide, folded=weight_inputs(captured))
        return functools.partial(read, captured, context)
    rewritten, _ = rewrite(gm, ambient, plain, training=True)
    joint = graph_pass(
        "joint", "amp_fx.calibrate", lambda graph: found.append(read(graph, PassContext(), {}, {})), {}
    )
    # nobody runs the code
    with replace_inner_compile(lambda gm, example_inputs, **_: gm.forward), autocast_shield():
        compile_with_inductor(rewritten, inputs, joint)
    return lambda *_: found[0] if found else Second(Problem(), Problem())


@dataclass
class MeasuredGraph:
    """One graph of a model, as Dynamo made it, with the autocast state at its entry."""

    gm: fx.GraphModule
    ambient: Regions
    name: str
    #: False where what is planned is called without gradients, with weights of which copies are kept
    training: bool = True
    #: the profile by which what the level leaves is in fp32, as the device is slower in 16 bits; else None
    wide: DeviceProfile | None = None
    #: none under policies that are not about levels
    below: Below = lambda *_: Second(Problem(), Problem())

    @property
    def device_type(self) -> str:
        """Type of the device that it runs on."""
        return graph_device(self.gm, self.ambient)

    def priced(
        self, opts: Options, profile: DeviceProfile | None, rows: Mapping[str, CallSensitivity]
    ) -> list[PricedGraph]:
        """The graph and the bodies inside it, each with its prices; without a profile, time is bytes moved."""
        context = PassContext(opts.policy, opts.numerics, profile, self.training)
        captured = self._run(constrained, context)
        if not self.training:
            is_here = opts.profile == "auto"
            context = replace(context, folded=weight_inputs(captured), times_calls=is_here)
        found = (price(body, inside, rows) for body, inside in with_bodies(captured, context))
        return [each for each in found if each is not None]

    def outline(self, opts: Options) -> Plan:
        """The graph's calls as ``classify`` labels them."""
        outline = self._run(_outline, PassContext(opts.policy, training=self.training))
        outline.graph, outline.training = self.name, self.training
        return outline

    def plan(self, opts: Options, placement: Placement | None = None) -> Plan:
        """The plan of the backend with these options; see :func:`amp_fx.compiler.rewriting.rewrite`."""
        plan = self._run(_plan, opts, placement, self.training)
        plan.graph = self.name
        return plan

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """A function of this module, of Dynamo's graph and the autocast state, where the device is."""
        return function(self.gm, self.ambient, *args)


class TargetGraph(MeasuredGraph):
    """A measured graph on a GPU, with that device's op lists; the GPU need not be in this machine.

    What is done with it is done where :func:`amp_fx.explain` does it: in the process that compiles for the target.
    """

    def __init__(self, traced: TracedGraph, training: bool, process: TargetProcess, low: torch.dtype) -> None:
        super().__init__(traced.gm, {}, traced.name, training)
        self.traced, self.process, self.low = traced, process, low

    @property
    def device_type(self) -> str:
        """The device type of all targets."""
        return "cuda"

    def _run(self, function: Callable[..., Any], *args: Any) -> Any:
        """As above, by way of :func:`there`. TargetError: the graph cannot be sent."""
        found = self.process.call(f"{__name__}:there", function, self.traced, self.low, *args)
        return found.gm if isinstance(found, TracedGraph) else found


def there(function: Callable[..., Any], traced: TracedGraph, low: torch.dtype, *args: Any) -> Any:
    """The part of :class:`TargetGraph` in the process that compiles for the target."""
    with on_target(traced) as (gm, inputs, _):
        for value in tensors(inputs):
            # what is sent back is read where autograd would ask for the device, and there is none
            value.requires_grad_(False)
        found = function(gm, ambient_regions({"cuda": low}), *args)
        return replace(traced, gm=found) if isinstance(found, fx.GraphModule) else found


def _outline(gm: fx.GraphModule, ambient: Regions, context: PassContext) -> Plan:
    return run_passes(capture(gm, ambient), OUTLINE, context)


def _plan(
    gm: fx.GraphModule, ambient: Regions, opts: Options, placement: Placement | None, training: bool
) -> Plan:
    with torch.set_grad_enabled(training):
        return rewrite(gm, ambient, opts, training=training, placement=placement)[1]
