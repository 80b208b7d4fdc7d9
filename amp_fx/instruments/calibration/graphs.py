"""The graphs of a model, run in each step so that every value is observed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from amp_fx._torch import compile_id, graph_break, unwrapped_errors
from amp_fx.compiler.rewriting import outline_of
from amp_fx.compiler.settings import Options
from amp_fx.errors import AmpFxError, CaptureError, OptionsError, TargetError
from amp_fx.graphs.capture import capture
from amp_fx.graphs.regions import ambient_regions, not_ours
from amp_fx.graphs.values import listed_devices
from amp_fx.instruments.batches import compiling
from amp_fx.instruments.calibration.equalising import Chosen, Products, Way, first_ways, narrowed
from amp_fx.instruments.calibration.measuring import run_measured
from amp_fx.instruments.calibration.meter import Meter
from amp_fx.instruments.calibration.probing import CutOffError, differentiable, measure
from amp_fx.instruments.calibration.ranges import CallId, Ranges
from amp_fx.instruments.calibration.traced import MeasuredGraph, TargetGraph, read_matmuls
from amp_fx.instruments.progress import progress
from amp_fx.instruments.step import Step, apart
from amp_fx.instruments.targets.process import TargetProcess
from amp_fx.instruments.targets.tracing import Tracer
from amp_fx.passes import PassContext
from amp_fx.precision.placement.devices import resolve
from amp_fx.precision.placement.level_cost import OPERATIONS, LevelCost
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.matching import match
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.plans.sensitivity import GraphSensitivity, combined
from amp_fx.precision.policy.levels import Level, levels_of

logger = logging.getLogger(__name__)


def run_graphs(make: Callable[[], Graphs], steps: Sequence[Step], scale: float, probes: int) -> Graphs:
    """The graphs of a model, run in each step.

    Outputs are those of calls without gradients. Where code that is not traced then cuts graphs off from the outputs,
    the calls are run again with gradients, so that this code is differentiated as well.
    """
    graphs, reason = make(), None
    try:
        graphs.run(steps, scale, probes)
    except CutOffError as error:
        reason = error
    if reason is None and not graphs.cut_off():
        return graphs
    again = make()
    try:
        again.run([replace(step, grad=True) for step in steps], scale, probes)
    except AmpFxError as error:
        if reason is not None:
            raise reason from error
        logger.debug("calls with gradients cannot be measured: %s", error)
    else:
        if reason is not None or len(again.cut_off()) < len(graphs.cut_off()):
            graphs = again
    for graph in sorted(graphs.cut_off()):
        logger.warning(
            "no traced code leads from graph number %d to an output: what its rounding does is not known, and it is "
            "planned as under torch.autocast",
            graph,
        )
    return graphs


class Graphs:
    """The graphs of a model, in the order of their compilation, and what was measured of them."""

    def __init__(
        self, opts: Options, low: torch.dtype, process: TargetProcess | None, *, training: bool
    ) -> None:
        self._opts, self._low, self._process, self._training = opts, low, process, training
        self.level = levels_of(opts.policy.base).get(opts.level)
        #: one a step
        self._meters: list[Meter] = []
        #: the graphs, and their calls here and there, on the device that is planned for
        self.traced: list[MeasuredGraph] = []
        self._outlines: list[tuple[Plan, Plan]] = []
        #: numbers of the graphs that have the same calls and weights, as for batches of several sizes: what is measured
        #: of one of them counts for all, under the first number
        self._same: dict[Hashable, list[int]] = {}

    def run(self, steps: Sequence[Step], scale: float, probes: int) -> None:
        """Runs every step with each value observed; scale is that of the loss.

        AmpFxError where Dynamo makes no graph that is rewritten.
        """
        with apart(), unwrapped_errors(AmpFxError):
            # a function: Lightning's torch.compile copies what it is given, and would copy a method's graphs
            compiled = torch.compile(
                steps[0].model, backend=lambda *given: self._backend(*given), dynamic=False
            )
            is_ranged = self.level is not None and not self.level.dtype.is_floating_point
            with progress("calibrate", len(steps) * (1 + is_ranged)) as say:
                products, ways = Products(), dict[CallId, list[Way]]()
                if is_ranged:
                    ways = self._ways(steps, compiled, products, say)
                chosen = dict[CallId, Chosen]()
                for step in steps:
                    say("what roundings do")
                    meter = Meter(
                        self._low, scale, of_outputs=not self._training, level=self.level, ways=ways
                    )
                    self._meters.append(meter)
                    with compiling(step.model, step.call):
                        measure(step, meter, compiled, probes)
                    # the first batch that a value counts in decides
                    chosen = products.chosen(ways, meter.tried) | chosen
                    ways = ways | {call: narrowed(each) for call, each in chosen.items()}
                    say("what roundings do", 1)
        for meter in self._meters:
            meter.chosen = first_ways(meter.ways) | chosen
        if not self.traced:
            raise AmpFxError(
                "Dynamo made no graph that amp_fx rewrites; nothing was measured. "
                "amp_fx.explain(model, *args) says why."
            )

    def cut_off(self) -> set[int]:
        """Numbers of the graphs of which a step has returned values, none of which reached an output."""
        return set[int]().union(*(meter.returned - meter.reached for meter in self._meters))

    def _ways(
        self, steps: Sequence[Step], compiled: Any, products: Products, say: Callable[..., None]
    ) -> dict[CallId, list[Way]]:
        """The ways to read what calls multiply in integers; in one forward of each step, which the products see."""
        assert self.level is not None
        device = "cuda" if self._process is not None else next(steps[0].model.parameters()).device.type
        measured = any(each.measured and each.device in (None, device) for each in self.level.kernels)
        ranges = Ranges()
        meter = Meter(self._low, 1.0, of_outputs=True, level=self.level, ranges=ranges, products=products)
        self._meters.append(meter)
        say("ranges of values")
        for step in steps:
            with differentiable(meter), compiling(step.model, step.call), step.returned(compiled):
                pass
            say("ranges of values", 1)
        self._meters.pop()
        return products.ways(ranges.scales() if measured else {})

    def sensitivities(self) -> list[GraphSensitivity]:
        """The means over the steps, by the names that calls have where they are planned."""
        found = []
        same_as = {number: same for same in self._same.values() for number in same}
        for number, (measured, outline) in enumerate(self._outlines):
            first, times = same_as[number][0], len(same_as[number])
            # errors of all graphs are added up: each of these has its share of what was found in all
            rows = combined(
                [meter.rows(first) for meter in self._meters],
                lambda parts, times=times: fmean(parts) / times,
            )
            calls = GraphSensitivity(measured, rows).renamed(outline)
            found.append(GraphSensitivity(outline, calls))
        return found

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """A backend of ``torch.compile`` that observes each value."""
        devices = listed_devices(gm)
        if reason := not_ours(gm):
            logger.debug("graph is not measured: %s", reason)
            return self._unmeasured(gm)
        ambient = ambient_regions(dict.fromkeys(devices, self._low))
        try:
            captured = capture(gm, ambient)
        except CaptureError as error:
            logger.warning("graph %s is not measured: %s", compile_id(), error)
            return self._unmeasured(gm)
        measured = outline_of(captured, PassContext(self._opts.policy, training=self._training))
        measured.graph_break = graph_break(gm)
        number = len(self.traced)
        graph, outline = MeasuredGraph(gm, ambient, measured.graph, self._training), measured
        if self._process is not None and "cuda" not in devices:
            tracer = Tracer()
            tracer(gm, example_inputs)
            (traced,) = tracer.graphs
            graph = TargetGraph(traced, self._training, self._process, self._low)
            outline = graph.outline(self._opts)
            outline.graph_break = measured.graph_break
            if moved := match(measured, outline).moved:
                raise TargetError(
                    f"graph {measured.graph} has other calls on the target than here, where it is measured: "
                    f"{'; '.join(moved[:4])}. Calibrate on that device, or leave target out."
                )
        asks = (value.requires_grad for value in example_inputs if isinstance(value, torch.Tensor))
        if self.level is not None and (not self._training or any(asks)):
            names = {here.name: row.name for here, row in match(measured, outline).pairs}
            profile = resolve(self._opts.profile, graph.device_type)
            if not self._training and profile is not None and profile.is_slower_in(self._low):
                graph.wide = profile
            costs = graph.wide, _cost(profile, self._low, self.level)
            graph.below = read_matmuls(
                gm, example_inputs, ambient, self._opts, *costs, names, training=self._training
            )
        self.traced.append(graph)
        self._outlines.append((measured, outline))
        calls = tuple((row.name, row.module_path, row.op, row.traced, row.low) for row in measured.nodes)
        weights = tuple(id(value) for value in example_inputs if isinstance(value, nn.Parameter))
        same = self._same.setdefault((calls, weights or number), [])
        same.append(number)
        return lambda *args: run_measured(captured, self._meters[-1], same[0], args)

    def _unmeasured(self, gm: fx.GraphModule) -> Callable[..., Any]:
        """The graph as it is; what follows from it has gradients, as in a measured one."""

        def forward(*args: Any) -> Any:
            meter = self._meters[-1]
            with torch.set_grad_enabled(
                torch.is_grad_enabled() or (meter.of_outputs and meter.ranges is None)
            ):
                return gm.forward(*args)

        return forward


def _cost(profile: DeviceProfile | None, low: torch.dtype, level: Level) -> LevelCost:
    """The times of matmuls and copies on the device that is planned for."""
    if profile is None:
        return OPERATIONS
    if (cost := LevelCost.of(profile, low, level)) is None:
        what = f"{profile.device_type} {profile.name} has no {level.policy} rate"
        raise OptionsError(
            f"policy {level.policy!r} has nothing to choose: {what}. Plan for a GPU that has one (target='cuda:h100'), "
            f"give a profile with {level.rate!r} in its peak, or profile='off'."
        )
    return cost
