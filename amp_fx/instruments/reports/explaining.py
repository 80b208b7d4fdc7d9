"""``amp_fx.explain(model, *args)``: a report of forward and backward, without compiling or changing the model.

The model goes through Dynamo, amp_fx and Inductor up to and including fusion, once with amp_fx and once with
``torch.autocast`` and the same results to compare with; the graphs are then run op by op, so that code after a graph
break is reached. No code is generated. For a GPU that is not in the machine, Dynamo traces here and another process
goes on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from amp_fx._torch import (
    breaks_since_reset,
    given_up,
    is_left_out_in_place,
    replace_inner_compile,
    unwrapped_errors,
    without_onednn,
)
from amp_fx.compiler.notices import only_looking
from amp_fx.compiler.settings import Options
from amp_fx.errors import AmpFxError
from amp_fx.graphs.values import program_device
from amp_fx.instruments.batches import arguments_of, compiling, initialised, uncompiled
from amp_fx.instruments.progress import progress
from amp_fx.instruments.reports.advice import (
    NOT_COMPILED,
    Advice,
    autocast_fails,
    layout_advice,
    outside_advice,
    scaling_advice,
    weight_advice,
)
from amp_fx.instruments.reports.lowered import LoweredGraphs, autocast_backend, casts_by_module
from amp_fx.instruments.reports.report import Report, record
from amp_fx.instruments.reports.saved import add_saved
from amp_fx.instruments.step import apart, entry_of, plain, untouched
from amp_fx.instruments.targets import find_target
from amp_fx.instruments.targets.process import TargetProcess
from amp_fx.instruments.targets.tracing import (
    Backend,
    TracedGraph,
    Tracer,
    compile_graph,
    differentiate,
    without_data,
)
from amp_fx.precision.plans.plan import Plan
from amp_fx.precision.plans.sensitivity import Sensitivity, add_sensitivities
from amp_fx.precision.policy.table import DEVICES

#: how Dynamo's message about recurrent layers begins, and what to do. Its own hint is torch._dynamo.config.allow_rnn,
#: with which Inductor fails on an LSTM in training (torch 2.13, CPU)
_RECURRENT, _LEFT_OUT = "Attempted to wrap RNN, GRU, or LSTM", "Dynamo does not support RNN, GRU, or LSTM"
_RECURRENT_REMEDY = (
    "Call the layer in a method of its own with @torch.compiler.disable: what is around it is compiled then"
)

#: one line of the first screen, whole
_IN_PLACE = "Use torch.compile(module, backend='amp_fx') instead, or a subclass with a forward of your own"

_NO_REASON = (
    "Dynamo makes no graph of it and gives no reason: look for torch.compiler.disable, torch.compiler.set_stance and"
    " TORCHDYNAMO_DISABLE"
)


def explain(
    model: Callable[..., Any],
    *args: Any,
    options: Mapping[str, Any] | None = None,
    target: Any = None,
    sensitivity: Any = None,
    **kwargs: Any,
) -> Report:
    """Says what amp_fx would do to a model, forward and backward, on one call; every subgraph is in the report.

    Nothing that Inductor generates is run, the arguments are not written to, and the model and the states of the
    random generators are afterwards what they were. As after ``torch._dynamo.explain``, code compiled earlier in this
    process is compiled again when it is next called.

    Args:
        model: a module or a function. What ``torch.compile`` returned is taken as it was before; after
            ``module.compile()`` the module is compiled in place here, too, which Dynamo does not do for all modules.
            With a target it may be on the ``meta`` device: then nothing of its size is held in memory.
        *args: of one call. One tuple or mapping is a batch, whose parts are the arguments.
        options: as in ``torch.compile(model, backend="amp_fx", options=...)``.
        target: a GPU that need not be in this machine, ``"cuda:h100"``; ``amp-fx targets`` lists them. None: the device
            that the model is on. Any other value is passed to the model as ``target``.
        sensitivity: what :func:`amp_fx.calibrate` found, or the path of its file: every call's reason says what
            rounding it costs, and pictures are coloured by it. Anything else is passed to the model as ``sensitivity``.
        **kwargs: of one call.

    Raises:
        InputError: the model does not take the arguments.
        OptionsError: bad options.
        TargetError: no such target, or this machine has no compiler for it; MissingLibraryError without Triton.
        CaptureError, PassError: with ``strict``, a graph cannot be rewritten.
        PlanError: a graph was not calibrated.
    """
    measured = getattr(sensitivity, "sensitivity", None)
    if isinstance(sensitivity, (str, os.PathLike)):
        measured = Sensitivity.load(sensitivity)
    elif sensitivity is not None and not isinstance(measured, Sensitivity):
        kwargs["sensitivity"] = sensitivity
        measured = None
    if target is not None and not isinstance(target, str):
        kwargs["target"] = target
        target = None
    parsed = Options.parse(None, options)
    program = uncompiled(model)
    # a scaler belongs to a training that is not going on here
    given = {key: value for key, value in (options or {}).items() if key != "scaler"}
    arguments = arguments_of(program, args, kwargs)
    call = _Call(initialised(program, arguments), *arguments, given)
    title = getattr(program, "__name__", type(program).__name__)
    with progress("explain") as say:
        report = _here(call, say) if target is None else _on_target(call, target, say)
    plans, weights = report.plans, call.parameters
    notes = [
        *report.notes,
        *call.left_out(plans),
        *weight_advice(plans, weights),
        *layout_advice(plans, weights),
    ]
    if parsed.scaler is None:
        notes += scaling_advice(plans)
    # with a model on the meta device there is nothing to ask autocast about
    if report.outside and not (torch.is_autocast_enabled(call.device) or parsed.is_slower_low(call.device)):
        notes += outside_advice(report.outside, call.device, parsed.low_dtype(call.device))
    return replace(
        report,
        title=title if target is None else f"{title} on {find_target(target).name}",
        notes=notes,
        sensitivities={} if measured is None else add_sensitivities(plans, measured),
        device="cuda" if target else call.device,
    )


@dataclass(frozen=True)
class _Call:
    """The call to explain: a module or a function, its arguments, and the options of the backend."""

    program: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    options: Mapping[str, Any]
    #: why Dynamo gave up functions as a whole, or from some line on
    given_up: list[str] = field(default_factory=list)
    #: every graph break, also where there was no graph yet
    breaks: list[str] = field(default_factory=list)

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.program.named_parameters()) if isinstance(self.program, nn.Module) else {}

    @property
    def device(self) -> str:
        return program_device(self.program, (self.args, self.kwargs))

    @contextlib.contextmanager
    def traced_anew(self) -> Iterator[None]:
        """Inside, Dynamo compiles everything anew, and forgets it afterwards; what it does not compile is noted."""
        with apart():
            before = given_up()
            yield
            self.breaks.extend(breaks_since_reset())
            self.given_up.extend(text for text, times in given_up().items() if times > before.get(text, 0))

    def left_out(self, plans: Sequence[Plan]) -> list[Advice]:
        """A note for everything that runs eagerly although it was to be compiled."""
        found = [*_in_place(self.program), *map(_not_compiled, dict.fromkeys(self.given_up))]
        # before a break without a graph nothing was to compile: it counts if it is all that is known, or is of a layer
        is_all, told = not (plans or self.given_up), {plan.graph_break for plan in plans}
        breaks = dict.fromkeys(self.breaks)
        early = [text for text in breaks if is_all or (_LEFT_OUT in text and text not in told)]
        if not plans and not found and not early:
            found.append(Advice(NOT_COMPILED, _NO_REASON))
        return [*found, *(Advice("graph break", text) for text in early)]


def _not_compiled(message: str) -> Advice:
    """Reads a message of Dynamo's: the cause is its first line, hints have lines of their own."""
    lines = [line.strip() for line in message.strip().splitlines()]
    cause = lines[0].rstrip(".")
    hints = [line.removeprefix("Hint: ").rstrip(".") for line in lines if line.startswith("Hint: ")]
    remedy = _RECURRENT_REMEDY if cause.startswith(_RECURRENT) else [*hints, ""][0]
    return Advice(NOT_COMPILED, cause, remedy=remedy)


def _in_place(program: Callable[..., Any]) -> Iterator[Advice]:
    """Modules of torch's own that were compiled in place, by class."""
    names: dict[str, list[str]] = {}
    for name, module in program.named_modules() if isinstance(program, nn.Module) else ():
        if entry_of(module) is not module and is_left_out_in_place(module):
            names.setdefault(type(module).__name__, []).append(name)
    for kind, paths in names.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        where = next((f" ({path}{more})" for path in paths if path), "")
        text = f"{kind}.compile(){where} compiles nothing: Dynamo skips functions of torch's own modules"
        yield Advice(NOT_COMPILED, text, remedy=_IN_PLACE)


def _compared(
    lower: Callable[[Backend], LoweredGraphs],
    options: Mapping[str, Any],
    say: Callable[[str], object],
    *,
    with_autocast: bool = True,
) -> Report:
    """Plans, costs and casts by module: of amp_fx, and of torch.autocast with the same results."""
    # late: it listens to Dynamo as soon as it is loaded
    from amp_fx.compiler.backend import amp_fx

    say("compiles as far as fusion with amp_fx")
    with record() as recording, only_looking(), unwrapped_errors(AmpFxError):
        ours = lower(partial(amp_fx, options=options))
    ours.complete(recording.plans)
    add_saved(ours, recording.plans)
    outside = dict(ours.outside.flops)
    if not with_autocast:
        return Report(recording.plans, costs={"amp_fx": ours.cost}, outside=outside)
    failed: dict[str, None] = {}
    say("compiles as far as fusion with torch.autocast")
    try:
        theirs = lower(autocast_backend(options, failed))
    except RuntimeError:
        # a kernel refuses the low dtype, which fake values do not say: torch.complex of two linears
        theirs = lower(autocast_backend(options, failed, fails=True))
    notes = [autocast_fails(failed)] if failed else []
    graphs = {"torch.autocast": theirs.graphs, "amp_fx": ours.graphs}
    costs = {"amp_fx": ours.cost, "torch.autocast": theirs.cost}
    modules = casts_by_module(graphs, recording.plans)
    return Report(recording.plans, costs=costs, notes=notes, modules=modules, outside=outside)


def _here(call: _Call, say: Callable[[str], object]) -> Report:
    """On the device that the model is on: every graph as Inductor would compile it, run op by op."""
    # before its modules are as they were before Module.compile()
    entry = entry_of(call.program)

    def lower(backend: Backend) -> LoweredGraphs:
        found = LoweredGraphs()

        def compile_or_forget(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
            before = len(found.graphs)
            try:
                return found.outside.leave_out(backend(gm, example_inputs))
            except Exception:
                # Inductor may ask Dynamo to trace again: then this graph never runs
                del found.graphs[before:]
                raise

        with (
            call.traced_anew(),
            untouched(call.program, call.args, call.kwargs) as (given, named),
            compiling(call.program, (call.args, call.kwargs)),
            replace_inner_compile(found.inner_compile),
            found.outside,
        ):
            result = torch.compile(entry, backend=compile_or_forget)(*given, **named)
            # the backward, whose graphs are compiled only then; the caller's autocast has nothing to do with it
            differentiate(plain(result), (given, named, call.parameters), contextlib.nullcontext())
        return found

    return _compared(lower, call.options, say, with_autocast=call.device in DEVICES)


def _on_target(call: _Call, target: str, say: Callable[[str], object]) -> Report:
    """On a GPU that need not be in the machine; the program is on the CPU or on ``meta``."""
    tracer = Tracer()
    say(f"starts a process for {target}")
    # first: it says in a moment if it cannot
    with contextlib.closing(TargetProcess(target)) as process:
        whole = call.program, call.args, call.kwargs
        program, context = call.program, untouched(*whole)
        if (copies := without_data(*whole)) is not None:
            program, context = copies[0], contextlib.nullcontext(copies[1:])
        entry = entry_of(program)
        with (
            only_looking(),
            call.traced_anew(),
            context as (given, named),
            compiling(program, (given, named)),
            without_onednn(),
        ):
            say("traces the model")
            torch.compile(entry, backend=tracer)(*given, **named)
        say(f"compiles for {target} as far as fusion, with amp_fx and with torch.autocast")
        return process.call(
            "amp_fx.instruments.reports.explaining:compiled_graphs", tracer.graphs, dict(call.options)
        )


def compiled_graphs(graphs: Sequence[TracedGraph], options: Mapping[str, Any]) -> Report:
    """The part of a report in the process that compiles for a target."""

    def lower(backend: Backend) -> LoweredGraphs:
        found = LoweredGraphs()
        for graph in graphs:
            compile_graph(graph, backend, found.inner_compile)
        return found

    # in a process of its own, whose parent says what is done
    report = _compared(lower, options, lambda _: None)
    breaks = {graph.name: graph.graph_break for graph in graphs}
    for plan in report.plans:
        plan.graph_break = breaks[plan.graph] if plan.phase == "forward" else ""
    return report
