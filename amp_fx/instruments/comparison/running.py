"""Runs of one step whose values are observed: compiled, or op by op."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from amp_fx._torch import autocast_disabled, compile_id
from amp_fx.compiler.compiling import Invocation
from amp_fx.compiler.rewriting import rewrite
from amp_fx.compiler.settings import Options
from amp_fx.errors import CaptureError
from amp_fx.graphs.capture import capture
from amp_fx.graphs.regions import Region, ambient_regions, not_ours
from amp_fx.graphs.values import listed_devices
from amp_fx.instruments.calibration.ranges import sample_stride
from amp_fx.instruments.comparison.taps import SAMPLES, Sample, Taps, boundary_values, tap
from amp_fx.instruments.step import Results, Step
from amp_fx.precision.plans.plan import Plan

logger = logging.getLogger(__name__)

#: graph, value, how often the graph had run before
Key = tuple[int, str, int]


@dataclass
class Observed:
    """The observations of one run: values, their gradients true to scale, and the results to judge."""

    values: dict[Key, Sample] = field(default_factory=dict)
    gradients: dict[Key, Sample] = field(default_factory=dict)
    results: Results = field(default_factory=dict)
    scale: float = 1.0
    #: inputs of the graphs whose gradients are those of values: one number each, so that the gradient is seen on its
    #: way there and kept no longer
    zeros: list[Tensor] = field(default_factory=list)
    _runs: dict[int, int] = field(default_factory=dict)

    def call(self, graph: int, taps: Taps, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Calls a graph that returns more values; returns what the program's own graph would return."""
        ordinal = self._runs[graph] = self._runs.get(graph, -1) + 1
        expanded = list[Tensor]()
        for name, (zero, size) in taps.make_zeros(args).items():
            expanded.append(zero.expand(size))
            expanded[-1].register_hook(partial(self._keep, (graph, name, ordinal)))
            self.zeros.append(zero)
        returned = compiled(*args, *expanded)
        own = len(returned) - 2 * len(taps.values)
        for place, name in enumerate(taps.values):
            at = own + 2 * place
            self.values[graph, name, ordinal] = Sample(*returned[at : at + 2])
        return returned[:own]

    def _keep(self, key: Key, gradient: Tensor) -> None:
        elements = gradient.reshape(-1)[:: sample_stride(gradient.shape, SAMPLES)].float() / self.scale
        self.gradients[key] = Sample(elements, gradient.abs().amax().float() / self.scale)


def without_scaler(options: Mapping[str, Any]) -> Options:
    """Options of a run outside a training: the loss is scaled from outside, and random numbers are eager PyTorch's."""
    given = {key: value for key, value in options.items() if key != "scaler"}
    return Options.parse(None, {**given, "fallback_random": True})


@dataclass(frozen=True)
class ProgramGraph:
    """A graph of the model as Dynamo made it."""

    gm: fx.GraphModule
    #: autocast state at its entry, per device type
    ambient: Mapping[str, Region]
    #: name of a value that is observed -> paths of the modules whose result it is
    results: dict[str, tuple[str, ...]]
    #: True if it will be differentiated
    training: bool


class _Run:
    """A step whose graphs are made by a backend."""

    def __init__(self, step: Step, backend: Callable[..., Any], *, dynamic: bool) -> None:
        self.step = step
        #: of the last run, or of the one that goes on
        self.observed = Observed()
        # a function to torch.compile
        self._compiled = torch.compile(step.model, backend=lambda *given: backend(*given), dynamic=dynamic)

    def run(self, scale: float = 1.0) -> Observed:
        """The results of one step; ``scale`` of the loss is taken out again."""
        self.observed = observed = Observed(scale=scale)
        with self.step.returned(self._compiled) as returned:
            observed.results = self.step.judged(returned, scale, observed.zeros)
        observed.zeros.clear()
        return observed


class OneByOne(_Run):
    """A model that is traced once and run op by op, without Inductor, in any precision.

    With ``every_call`` values of all calls are observed, not only those that leave a module.
    """

    def __init__(self, step: Step, *, every_call: bool, dynamic: bool) -> None:
        super().__init__(step, self._backend, dynamic=dynamic)
        self._every_call = every_call
        #: in the order of their compilation
        self.graphs: list[ProgramGraph] = []
        #: why a graph of floating tensors is not among them
        self.left_out: list[str] = []
        self._opts: Options | None = None
        self._as_written = False
        #: of the graphs, in order: those by which the last run has rounded
        self.plans: list[Plan] = []
        self._tapped: dict[int, tuple[fx.GraphModule, Taps]] = {}

    def run_with(self, opts: Options | None, scale: float = 1.0, *, as_written: bool = False) -> Observed:
        """The results of one step with options of the backend; None: no call is rounded, whatever autocast says.

        ``as_written``: only the program's own autocast counts, and what is on around the call.
        """
        self._opts, self._as_written, self._tapped = opts, as_written, {}
        return self.run(scale)

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if not _is_ours(gm):
            return gm.forward
        number = len(self.graphs)
        self.plans.append(Plan())
        ambient = ambient_regions(dict.fromkeys(listed_devices(gm), torch.bfloat16))
        try:
            results = boundary_values(capture(gm, ambient), every_call=self._every_call)
        except CaptureError as error:
            self.left_out.append(f"graph {compile_id()}: {error}")
            self.graphs.append(ProgramGraph(gm, ambient, {}, training=False))
            return gm.forward
        training = Invocation(gm, example_inputs, ambient, Options()).training
        self.graphs.append(ProgramGraph(gm, ambient, results, training))
        return lambda *args: self._call(number, args)

    def _call(self, number: int, args: Sequence[Any]) -> Any:
        if number not in self._tapped:
            graph, rewritten = self.graphs[number], self._rewritten(number)
            gradients = graph.training and not self.step.of_outputs
            self._tapped[number] = rewritten, tap(rewritten, graph.results, args, gradients=gradients)
        rewritten, taps = self._tapped[number]
        with autocast_disabled():
            return self.observed.call(number, taps, rewritten, args)

    def _rewritten(self, number: int) -> fx.GraphModule:
        graph = self.graphs[number]
        if self._opts is None:
            return capture(graph.gm, graph.ambient)
        opts = replace(self._opts, weights="cast")
        ambient = {
            device: region
            if region.by_user
            else Region(not self._as_written, opts.low_dtype(device), by_user=False)
            for device, region in graph.ambient.items()
        }
        rewritten, self.plans[number] = rewrite(graph.gm, ambient, opts, training=graph.training)
        return rewritten


class Compiled(_Run):
    """The traced graphs, compiled by the backend, with observed values."""

    def __init__(self, step: Step, opts: Options, graphs: Sequence[ProgramGraph], *, dynamic: bool) -> None:
        super().__init__(step, self._backend, dynamic=dynamic)
        self._opts, self.graphs = opts, graphs
        #: of the graphs, in order
        self.plans: list[Plan] = []

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # late: it listens to Dynamo as soon as it is loaded
        from amp_fx.compiler.backend import compile_graph

        if not _is_ours(gm):
            return compile_graph(gm, example_inputs, self._opts)
        number = len(self.plans)
        try:
            compiled = compile_graph(gm, example_inputs, self._opts, self)
        except Exception:
            # Inductor may ask Dynamo to trace again: then this graph never runs
            del self.plans[number:]
            raise
        if len(self.plans) == number:
            self.plans.append(Plan(compile_id()))
        return compiled

    def add(self, invocation: Invocation, rewritten: fx.GraphModule, plan: Plan) -> Sequence[Tensor]:
        """The next graph returns its values, and they are kept; see :class:`amp_fx.compiler.compiling.Watch`."""
        self._number = len(self.plans)
        self.plans.append(plan)
        names = self.graphs[self._number].results if self._number < len(self.graphs) else ()
        gradients = invocation.training and not self.step.of_outputs
        self._taps = tap(rewritten, names, invocation.example_inputs, gradients=gradients)
        return list(self._taps.zeros.values())

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        """The graph that :meth:`add` was called with last."""
        number, taps = self._number, self._taps
        return lambda *args: self.observed.call(number, taps, compiled, args)


def _is_ours(gm: fx.GraphModule) -> bool:
    if reason := not_ours(gm):
        logger.debug("graph is not compared: %s", reason)
    return not reason
