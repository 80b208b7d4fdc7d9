"""Runs of one step: compiled as the options say, or op by op, with or without values taken out of the graphs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx._torch import autocast_disabled, compile_id
from amp_fx.calibration.meter import sample_stride
from amp_fx.comparison.taps import SAMPLES, Taps, handed_on, tap
from amp_fx.compiling import Call
from amp_fx.errors import CaptureError
from amp_fx.graphs.capture import capture
from amp_fx.graphs.regions import Region, ambient_regions, not_ours
from amp_fx.graphs.values import graph_devices, tensors
from amp_fx.plans.plan import Plan
from amp_fx.policy.table import supported_devices
from amp_fx.reports.histograms import loss_of
from amp_fx.reports.untouched import plain, repeatable
from amp_fx.rewriting import rewrite
from amp_fx.settings import Options

__all__ = ["Compiled", "Key", "OneByOne", "Program", "ProgramGraph", "Taken", "untapped", "without_scaler"]

logger = logging.getLogger(__name__)

#: graph, value, how often the graph had run before
Key = tuple[int, str, int]


@dataclass(frozen=True)
class Program:
    """A model, a batch and the way to a loss.

    Attributes:
        model: as it is.
        call: positional and keyword arguments.
        loss: what the model returns -> 0-d tensor; None: it returns that itself.
        differentiated: False where there is no loss, so that gradients are not compared.
        seed: of the random numbers that model and loss draw.
        dynamic: as in ``torch.compile``.
    """

    model: nn.Module
    call: tuple[tuple[Any, ...], dict[str, Any]]
    loss: Callable[[Any], Tensor] | None
    differentiated: bool
    seed: int
    dynamic: bool


@dataclass
class Taken:
    """What one run has handed out.

    Attributes:
        values: samples in fp32, flat.
        largest: magnitude in each value, 0-d.
        gradients: samples of the gradients, true to scale.
        largest_gradients: magnitude in each gradient, 0-d.
        results: the gradients of the parameters by their names; without a loss, what the model returned, by place.
        loss: of the step, or None.
    """

    values: dict[Key, Tensor] = field(default_factory=dict)
    largest: dict[Key, Tensor] = field(default_factory=dict)
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    largest_gradients: dict[Key, Tensor] = field(default_factory=dict)
    results: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor | None = None
    #: inputs of the graphs whose gradients are those of values
    _zeros: list[Tensor] = field(default_factory=list)
    _runs: dict[int, int] = field(default_factory=dict)
    _scale: float = 1.0

    def call(
        self, graph: int, taps: Taps, compiled: Callable[..., Sequence[Any]], args: Sequence[Any]
    ) -> Sequence[Any]:
        """Calls a graph that hands out values; returns what the program's own graph would return."""
        ordinal = self._runs[graph] = self._runs.get(graph, -1) + 1
        expanded = list[Tensor]()
        for name, (zero, size) in taps.make_zeros(args).items():
            expanded.append(zero.expand(size))
            expanded[-1].register_hook(partial(self._keep, (graph, name, ordinal)))
            self._zeros.append(zero)
        returned = compiled(*args, *expanded)
        own = len(returned) - 2 * len(taps.values)
        for place, name in enumerate(taps.values):
            key = graph, name, ordinal
            self.values[key], self.largest[key] = returned[own + 2 * place : own + 2 * place + 2]
        return returned[:own]

    def differentiate(self, loss: Tensor, parameters: Mapping[str, Tensor], scale: float) -> None:
        """Takes the gradients of the parameters and of the values.

        Args:
            loss: of the step.
            parameters: that require a gradient, by name.
            scale: of the loss; taken out again.
        """
        self.loss, self._scale = loss.detach(), scale
        # one number each: the gradient of a value is seen on its way there, and kept no longer
        zeros, self._zeros = self._zeros, []
        with autocast_disabled():
            found = torch.autograd.grad(loss * scale, [*parameters.values(), *zeros], allow_unused=True)
        named = zip(parameters, found, strict=False)
        self.results = {name: grad.float() / scale for name, grad in named if grad is not None}

    def _keep(self, key: Key, gradient: Tensor) -> None:
        sample = gradient.reshape(-1)[:: sample_stride(gradient.shape, SAMPLES)]
        self.gradients[key] = sample.float() / self._scale
        self.largest_gradients[key] = gradient.abs().amax().float() / self._scale


def without_scaler(options: Mapping[str, Any]) -> Options:
    """Options of a run outside a training: the loss is scaled from outside, and random numbers are eager PyTorch's."""
    given = {key: value for key, value in options.items() if key != "scaler"}
    return Options.parse(None, {**given, "fallback_random": True})


def _run(program: Program, compiled: Callable[..., Any], scale: float, taken: Taken) -> None:
    """Runs one step of what was compiled of the model; nothing has changed after."""
    with repeatable(program.model, *program.call, program.seed) as (given, named):
        if not program.differentiated:
            returned = compiled(*given, **named)
            taken.results = {
                str(place): value.detach().float()
                for place, value in enumerate(tensors(plain(returned)))
                if value.is_floating_point()
            }
            return
        with torch.enable_grad():
            loss = loss_of(compiled(*given, **named), program.loss)
        parameters = {name: p for name, p in program.model.named_parameters() if p.requires_grad}
        taken.differentiate(loss, parameters, scale)


def untapped(program: Program, opts: Options, scale: float) -> Taken:
    """What a compiled step gives that hands out nothing."""
    from amp_fx.backend import compile_graph

    taken = Taken()
    compiled = torch.compile(
        program.model, backend=lambda gm, given: compile_graph(gm, given, opts), dynamic=program.dynamic
    )
    _run(program, compiled, scale, taken)
    return taken


@dataclass(frozen=True)
class ProgramGraph:
    """A graph of the model as Dynamo made it.

    Attributes:
        gm: not changed.
        ambient: autocast state at its entry, per device type.
        results: name of a value that is taken -> paths of the modules whose result it is.
        training: True if it will be differentiated.
    """

    gm: fx.GraphModule
    ambient: Mapping[str, Region]
    results: dict[str, tuple[str, ...]]
    training: bool


def _devices(gm: fx.GraphModule) -> frozenset[str]:
    return graph_devices(gm).intersection(supported_devices())


def _is_ours(gm: fx.GraphModule) -> bool:
    if reason := not_ours(gm, _devices(gm)):
        logger.debug("graph is not compared: %s", reason)
    return not reason


class OneByOne:
    """A model that is traced once and run op by op, without Inductor, in any precision.

    Args:
        program: the model and its step.
        every_call: values of all calls are taken, not only those that leave a module.

    Attributes:
        graphs: in the order of their compilation.
        left_out: why a graph of floating tensors is not among them.
    """

    def __init__(self, program: Program, *, every_call: bool) -> None:
        self._program, self._every_call = program, every_call
        self.graphs: list[ProgramGraph] = []
        self.left_out: list[str] = []
        self._opts: Options | None = None
        self._as_written = False
        self._plans: dict[int, Plan] = {}
        self._tapped: dict[int, tuple[fx.GraphModule, Taps]] = {}
        self._taken = Taken()
        self._compiled = torch.compile(
            program.model, backend=lambda *given: self._backend(*given), dynamic=program.dynamic
        )

    def run(self, opts: Options | None, scale: float = 1.0, *, as_written: bool = False) -> Taken:
        """What one step hands out.

        Args:
            opts: of the backend; None: no call is rounded, whatever autocast says.
            scale: of the loss; taken out again.
            as_written: only the program's own autocast counts, and what is on around the call.
        """
        self._opts, self._as_written, self._tapped, self._taken = opts, as_written, {}, Taken()
        _run(self._program, self._compiled, scale, self._taken)
        return self._taken

    @property
    def plans(self) -> list[Plan]:
        """Of the graphs, in order: those by which the last run has rounded."""
        return [self._plans.get(number, Plan()) for number in range(len(self.graphs))]

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        if not _is_ours(gm):
            return gm.forward
        number = len(self.graphs)
        ambient = ambient_regions(dict.fromkeys(_devices(gm), torch.bfloat16))
        try:
            results = handed_on(capture(gm, ambient), every_call=self._every_call)
        except CaptureError as error:
            self.left_out.append(f"graph {compile_id()}: {error}")
            self.graphs.append(ProgramGraph(gm, ambient, {}, training=False))
            return gm.forward
        training = Call(gm, example_inputs, ambient, Options()).training
        self.graphs.append(ProgramGraph(gm, ambient, results, training))
        return lambda *args: self._call(number, args)

    def _call(self, number: int, args: Sequence[Any]) -> Any:
        if number not in self._tapped:
            rewritten = self._rewritten(number)
            wants = self._program.differentiated and self.graphs[number].training
            taps = tap(rewritten, self.graphs[number].results, args, gradients=wants)
            self._tapped[number] = rewritten, taps
        rewritten, taps = self._tapped[number]
        with autocast_disabled():
            return self._taken.call(number, taps, rewritten, args)

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
        rewritten, self._plans[number] = rewrite(graph.gm, ambient, opts, training=graph.training)
        return rewritten


class Compiled:
    """The same graphs as the backend compiles them, which hand out values.

    Args:
        program: the model and its step.
        opts: of the backend.
        graphs: as they were traced; their values are taken.

    Attributes:
        plans: of the graphs, in order.
    """

    def __init__(self, program: Program, opts: Options, graphs: Sequence[ProgramGraph]) -> None:
        self._program, self._opts, self._graphs = program, opts, graphs
        self.plans: list[Plan] = []
        self._taken = Taken()
        self._compiled = torch.compile(
            program.model, backend=lambda *given: self._backend(*given), dynamic=program.dynamic
        )

    def run(self, scale: float = 1.0) -> Taken:
        """What one step hands out; ``scale`` of the loss is taken out again."""
        self._taken = Taken()
        _run(self._program, self._compiled, scale, self._taken)
        return self._taken

    def _backend(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        # late: it listens to Dynamo as soon as it is loaded
        from amp_fx.backend import compile_graph

        if not _is_ours(gm):
            return compile_graph(gm, example_inputs, self._opts)
        number = len(self.plans)
        try:
            compiled = compile_graph(gm, example_inputs, self._opts, _Tapping(self))
        except Exception:
            # Inductor may ask Dynamo to trace again: then this graph never runs
            del self.plans[number:]
            raise
        if len(self.plans) == number:
            self.plans.append(Plan(compile_id()))
        return compiled

    def tap(self, call: Call, rewritten: fx.GraphModule, plan: Plan) -> tuple[int, Taps]:
        """The next graph hands out its values; returns its number and what it takes and returns besides."""
        number = len(self.plans)
        self.plans.append(plan)
        names = self._graphs[number].results if number < len(self._graphs) else ()
        wants = self._program.differentiated and call.training
        return number, tap(rewritten, names, call.example_inputs, gradients=wants)

    def call(self, graph: int, taps: Taps, compiled: Callable[..., Any], args: Sequence[Any]) -> Any:
        """Calls a compiled graph, and keeps what it hands out."""
        return self._taken.call(graph, taps, compiled, args)


class _Tapping:
    """Of one graph; see :class:`amp_fx.compiling.Watch`."""

    def __init__(self, owner: Compiled) -> None:
        self._owner = owner

    def add(self, call: Call, rewritten: fx.GraphModule, plan: Plan) -> Sequence[Tensor]:
        self._number, self._taps = self._owner.tap(call, rewritten, plan)
        return list(self._taps.zeros.values())

    def bind(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: self._owner.call(self._number, self._taps, compiled, args)
