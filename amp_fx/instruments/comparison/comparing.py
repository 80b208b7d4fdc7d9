"""``amp_fx.compare(model, *batch)``: a compiled run beside a reference, module by module.

First the values that go from module to module are compared, as they are compiled. Where one stands out, all calls are,
op by op, and rules that would mend it are tried.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_fx._torch import unwrapped_errors
from amp_fx.compiler.notices import only_looking
from amp_fx.compiler.settings import Options
from amp_fx.errors import AmpFxError, OptionsError, did_you_mean
from amp_fx.instruments.batches import arguments_of, called, uncompiled
from amp_fx.instruments.calibration.calibrating import loss_scale
from amp_fx.instruments.comparison.comparison import (
    Comparison,
    call_errors,
    culprit_call,
    module_errors,
    verdict,
)
from amp_fx.instruments.comparison.judging import Culprit, distances, findings, remedy
from amp_fx.instruments.comparison.running import Compiled, Observed, OneByOne, without_scaler
from amp_fx.instruments.progress import progress
from amp_fx.instruments.step import Step, apart, loss_of, relative_error, zeroed

#: references that have a name
AGAINST = ("fp32", "autocast", "eager")
#: by which a scaler that finds inf makes its scale smaller, four steps at once
_BACK_OFF = 16.0
#: by which results may move when values are taken; what rounds otherwise in bf16 moves them less
_DISTURBED = 0.05
#: what is said where gradients could be compared
_NO_LOSS = "gradients, as there is no loss: give loss=function"


def compare(
    model: nn.Module,
    *batch: Any,
    loss: Callable[[Any], Tensor] | None = None,
    against: str | Mapping[str, Any] = "fp32",
    options: Mapping[str, Any] | None = None,
    calls: bool = False,
    scale: float | None = None,
    dynamic: bool = False,
    seed: int = 0,
    **kwargs: Any,
) -> Comparison:
    """Says where a compiled run departs from a reference: how far results and gradients of every module are from it.

    The model is compiled as ``torch.compile(model, backend="amp_fx", options=options)`` compiles it, but for random
    numbers, which are those of eager PyTorch (``fallback_random``). Its graphs return the values that go from module
    to module, too, and their gradients; a run without that says whether it changed a number.

    The model and the states of the random generators are afterwards what they were. Code compiled earlier in this
    process is compiled again when it is next called.

    Args:
        model: in the mode that it is used in. One that is compiled, or inside ``DistributedDataParallel``, is taken as
            it was before; of a process group, one process may call this by itself.
        *batch: arguments of the model, or one batch as :func:`amp_fx.calibrate` takes it.
        loss: what the model returns -> 0-d tensor. None: the model returns the loss, or has it in ``.loss``; where it
            has none, only results are compared, in the grad mode of the caller.
        against: what to compare with. ``"fp32"``: the same graphs op by op, and nothing is rounded, whatever autocast
            says; ``"autocast"``: op by op under torch.autocast; ``"eager"``: op by op as the program runs without
            amp_fx, under its own autocast if it has one; options: compiled with these.
        options: of the run, as for the backend. The scaler that they name gives the loss scale.
        calls: also compare the result of every call. Then hardly anything is fused.
        scale: loss scale of fp16. None: that of the :class:`amp_fx.GradScaler` in the options, or named "default", else
            65536; divided by 16 while gradients are not finite and values are, as a scaler would.
        dynamic: sizes are symbols, as in ``torch.compile``.
        seed: of random numbers that model and loss draw; the same in every run.
        **kwargs: more arguments of the model; those whose names are taken here go into a mapping as the batch.

    Raises:
        OptionsError: bad options, an unknown reference, or a loss that is no function.
        InputError: the model cannot be called with the batch.
        AmpFxError: not a module, a loss that is none, or Dynamo made no graph that could be compared.
    """
    if not isinstance(against, Mapping) and (not isinstance(against, str) or against not in AGAINST):
        raise OptionsError(
            f"against must be {', '.join(map(repr, AGAINST))} or options of the backend; got {against!r}."
            + did_you_mean(str(against), AGAINST)
        )
    asked = Options.parse(None, options)
    step = _step(model, batch, kwargs, loss, seed)
    low = asked.low_dtype(next((p.device.type for p in step.model.parameters()), "cpu"))
    first_scale = 1.0 if step.of_outputs else loss_scale(scale, low, asked.scaler or "default")
    given = options or {}
    with progress("compare") as say, only_looking(), unwrapped_errors(AmpFxError):
        adapts = scale is None
        first = _Boundaries(step, dynamic, given, without_scaler(given), against, first_scale, adapts, say)
        culprit, call, mended, every, calls_disturbance = first.culprit, None, {}, (), 0.0
        if culprit is not None or calls:
            with apart():
                say("runs every call op by op")
                traced, reference = first.traced(every_call=True)
                if culprit is not None:
                    say("looks for a rule that mends it")
                    mended = remedy(culprit, first.options, traced, reference, first.scale)
                    run = traced.run_with(first.opts, first.scale)
                    call = culprit_call(culprit, first.plans, distances(run, reference))
            if calls:
                with apart():
                    say("compiles the model with all results of calls, and runs it")
                    compiled = Compiled(step, first.opts, traced.graphs, dynamic=dynamic)
                    run = compiled.run(first.scale)
                every = call_errors(compiled.plans, distances(run, reference))
                calls_disturbance = relative_error(run.results, first.unobserved)
    not_finite = [each.module for each in first.findings if math.isinf(each.error)]
    if call is not None and math.isinf(call.error):
        not_finite.append(call.module)
    # a gradient is that of a module's parameter, a result that of the model
    not_finite += ["" if step.of_outputs else name.rpartition(".")[0] for name in first.not_finite]
    moved = first.disturbance if first.disturbance > _DISTURBED else 0.0
    return Comparison(
        title=type(step.model).__name__,
        against=against if isinstance(against, str) else f"options={dict(against)}",
        worst=module_errors(step.model, first.graphs, first.plans, first.found),
        calls=every,
        first_nonfinite=not_finite[0] if not_finite else None,
        culprit=None if culprit is None else culprit.module,
        culprit_call=call,
        healthy=culprit is None and not moved and not not_finite and not first.zeroed,
        verdict=verdict(culprit, call, first.not_finite, first.zeroed, moved, step.of_outputs),
        remedy=mended,
        result_error=first.result_error,
        disturbance=first.disturbance,
        calls_disturbance=calls_disturbance,
        loss_scale=first.scale,
        left_out=(*([_NO_LOSS] if step.of_outputs and step.grad else []), *first.left_out),
        plans=tuple(first.plans),
        errors={
            plan.graph: {
                row.name: None if math.isinf(here.error) else here.error
                for row in plan.nodes
                if (here := first.found.get((number, row.name))) is not None
            }
            for number, plan in enumerate(first.plans)
        },
    )


def _step(
    model: object, batch: Any, kwargs: dict[str, Any], loss: Callable[[Any], Tensor] | None, seed: int
) -> Step:
    """The model and its call, which is tried once: it says whether there is a loss."""
    module = uncompiled(model)
    if isinstance(module, DistributedDataParallel):
        module = module.module
    if not isinstance(module, nn.Module):
        raise AmpFxError(f"compare needs a torch.nn.Module; got {type(model).__name__}.")
    grad = loss is not None or torch.is_grad_enabled()
    step = Step(module, arguments_of(module, batch, kwargs), loss, seed, of_outputs=True, grad=grad)
    with step.returned(functools.partial(called, module)) as returned:
        if loss is not None:
            loss_of(returned, loss)
            return replace(step, of_outputs=False)
        with contextlib.suppress(AmpFxError):
            loss_of(returned, None)
            return replace(step, of_outputs=False)
    return step


@dataclass
class _Boundaries:
    """Compares reference and run between modules, and the results of a run of which nothing is observed."""

    step: Step
    dynamic: bool
    options: Mapping[str, Any]
    #: the same outside a training
    opts: Options
    against: str | Mapping[str, Any]
    #: at which gradients are computed; then that with which they are finite, if any
    scale: float
    #: True where it becomes smaller while gradients are not finite, as by a scaler
    adapts: bool
    #: is told each part of the work
    say: Callable[[str], object]

    def __post_init__(self) -> None:
        # late: it listens to Dynamo as soon as it is loaded
        from amp_fx.compiler.backend import compile_graph

        self.say("runs the reference")
        with apart():
            traced, reference = self.traced(every_call=False)
        self.graphs = traced.graphs
        if not self.graphs:
            raise AmpFxError(
                "Dynamo made no graph that amp_fx rewrites; nothing was compared. "
                "amp_fx.explain(model, *args) says why."
            )
        if isinstance(self.against, Mapping):
            with apart():
                opts = without_scaler(self.against)
                reference = Compiled(self.step, opts, self.graphs, dynamic=self.dynamic).run(self.scale)
        self.say("compiles the model, and runs it")
        with apart():
            compiled = Compiled(self.step, self.opts, self.graphs, dynamic=self.dynamic)
            run = compiled.run(self.scale)
            while self.adapts and self.scale > 1 and _overflows(run):
                self.scale /= _BACK_OFF
                run = compiled.run(self.scale)
        self.plans = compiled.plans
        if len(self.plans) != len(self.graphs):
            raise AmpFxError(
                f"Dynamo made {len(self.graphs)} graphs of the model, and of an equal call {len(self.plans)}: "
                "nothing can be compared. The model should do the same twice: keep no state outside it."
            )
        self.found = distances(run, reference)
        #: the values in order of execution, then their gradients
        self.findings = list(findings(self.plans, self.found))
        backend = lambda gm, given: compile_graph(gm, given, self.opts)  # noqa: E731  # a function to torch.compile
        self.say("compiles the model unobserved, and runs it")
        with apart():
            program = torch.compile(self.step.model, backend=backend, dynamic=self.dynamic)
            self.unobserved, exact = self.step.results(program, self.scale), reference.results
        self.result_error = relative_error(self.unobserved, exact)
        #: by how much observing has moved the results
        self.disturbance = relative_error(run.results, self.unobserved)
        #: parameters without a gradient; it is hardly seen in the error of all together
        self.zeroed = [] if self.step.of_outputs else zeroed(self.unobserved, exact)
        observed = {graph for graph, _ in self.found}
        #: graphs that are not compared, and why
        self.left_out = traced.left_out + [
            f"graph {plan.graph}: it is not rewritten, and hands out nothing"
            for number, (plan, graph) in enumerate(zip(self.plans, self.graphs, strict=True))
            if graph.results and number not in observed
        ]
        #: results that are not finite where those of the reference are
        self.not_finite = [
            name
            for name, each in self.unobserved.items()
            if not _is_finite(each) and (name not in exact or _is_finite(exact[name]))
        ]

    def traced(self, *, every_call: bool) -> tuple[OneByOne, Observed]:
        """The model op by op, and what the reference computes so; of other options, what one in fp32 does."""
        traced = OneByOne(self.step, every_call=every_call, dynamic=self.dynamic)
        if not isinstance(self.against, str) or self.against == "fp32":
            return traced, traced.run_with(None)
        autocast = replace(Options(), dtype=self.opts.dtype, numerics="eager", profile="off")
        return traced, traced.run_with(autocast, as_written=self.against == "eager")

    @property
    def culprit(self) -> Culprit | None:
        """The first fault: a value that is not finite, then the result that has grown most, then the gradient."""
        wrong = [each for each in self.findings if each.stands_out]
        first = [each for each in wrong if math.isinf(each.error)][:1]
        results = [each for each in wrong if each.of == "result"]
        return max(first or results or wrong, key=lambda each: each.growth, default=None)


def _is_finite(value: Tensor) -> bool:
    return bool(value.isfinite().all())


def _overflows(run: Observed) -> bool:
    """True where gradients are not finite, and all values are."""
    gradients = [sample.largest for sample in run.gradients.values()] + [*run.results.values()]
    are_values_finite = all(_is_finite(sample.largest) for sample in run.values.values())
    return are_values_finite and not all(map(_is_finite, gradients))
