"""``amp_fx.compare(model, *batch)``: a compiled run beside a reference, module by module."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_fx._torch import unwrapped_errors
from amp_fx.calibration.step import loss_scale
from amp_fx.comparison.comparison import Comparison
from amp_fx.comparison.distances import distances, relative
from amp_fx.comparison.judging import Finding, Judge
from amp_fx.comparison.mending import mend
from amp_fx.comparison.rows import CallError, call_error, call_errors, coloured, module_errors
from amp_fx.comparison.running import Compiled, Graph, OneByOne, Program, Taken, untapped, without_scaler
from amp_fx.errors import AmpFxError, InputError, OptionsError, did_you_mean
from amp_fx.graphs.uncompiled import not_told
from amp_fx.options import Options
from amp_fx.graphs.source_lines import short_source
from amp_fx.plans.plan import Plan, dtype_name
from amp_fx.reports.histograms import NoLossError, call_of, loss_of
from amp_fx.reports.untouched import repeatable
from amp_fx.scaling import without_scaling

__all__ = ["AGAINST", "compare"]

#: name of a reference -> what it is
AGAINST = {
    "fp32": "the same graphs op by op, and nothing is rounded, whatever autocast says",
    "autocast": "the same graphs op by op under torch.autocast",
    "eager": "the same graphs op by op as the program runs without amp_fx: under its own autocast, if any",
}

#: by which a scaler that finds inf makes its scale smaller, a few steps at once
_BACK_OFF = 16.0


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
    """Says where a compiled run leaves a reference: how far results and gradients of every module are from it.

    The model is compiled as ``torch.compile(model, backend="amp_fx", options=options)`` compiles it, but for random
    numbers, which are those of eager PyTorch (``fallback_random``). Its graphs hand out the values that go from module
    to module, and their gradients; a run without that says whether it changed a number. At most 65,536 elements of each
    value are compared, all are searched for inf and nan.

    The model is not changed: parameters, buffers, gradients and the states of the random generators are what they were.
    Code compiled earlier in this process is compiled again when it is next called.

    Args:
        model: in the mode that it is used in. One that is compiled, or inside ``DistributedDataParallel``, is taken as it
            was before; of a process group, one process may call this by itself.
        *batch: arguments of the model; or one batch as :func:`amp_fx.calibrate` takes it: a tuple or list of positional
            arguments, or a mapping of keyword arguments.
        loss: what the model returns -> 0-d tensor. None: the model returns the loss, or has it in ``.loss``; where it has
            none, only results are compared, in the grad mode of the caller.
        against: what to compare with: a key of :data:`AGAINST`, or other options, with which the model is compiled, too.
        options: of the run, as for the backend. The scaler that they name gives the loss scale.
        calls: also compare the result of every call. Then hardly anything is fused.
        scale: loss scale of fp16. None: that of the :class:`amp_fx.GradScaler` in the options, or named "default", else
            65536; divided by 16 while gradients are not finite and values are, as a scaler would.
        dynamic: sizes are symbols, as in ``torch.compile``.
        seed: of random numbers that model and loss draw; the same in every run.
        **kwargs: more arguments of the model.

    Raises:
        OptionsError: bad options, or an unknown reference.
        InputError: the model cannot be called with the batch.
        AmpFxError: not a module, a loss that is none, or Dynamo made no graph that could be compared.
    """
    program = _program(model, batch, kwargs, loss, seed, dynamic)
    asked, opts = Options.parse(None, options), without_scaler(options or {})
    low = opts.low_dtype(next((p.device.type for p in program.model.parameters()), "cpu"))
    settled = loss_scale(scale, low, asked.scaler or "default") if program.differentiated else 1.0
    with without_scaling(), not_told(), unwrapped_errors(AmpFxError):
        with _apart():
            traced = OneByOne(program, every_call=calls)
            reference = _reference(traced, against, opts)
        if not traced.graphs:
            raise AmpFxError("Dynamo made no graph that mixed precision is about; nothing was compared.")
        if isinstance(against, Mapping):
            with _apart():
                reference = Compiled(program, without_scaler(against), traced.graphs).run(settled)
        with _apart():
            compiled = Compiled(program, opts, traced.graphs)
            taken = compiled.run(settled)
            while scale is None and settled > 1 and _overflows(taken):
                settled /= _BACK_OFF
                taken = compiled.run(settled)
        with _apart():
            disturbance = relative(untapped(program, opts, settled), taken.results)
        found = distances(taken, reference)
        findings = list(Judge(compiled.plans, found).findings())
        finding, close, remedy = _worst(findings), None, dict[str, Any]()
        if finding is not None:
            with _apart():
                again = OneByOne(program, every_call=True)
                exact = _reference(again, against, opts)
                remedy = mend(finding, options or {}, opts, again, exact, settled)
            with _apart():
                closer = _closer(finding, traced.graphs, compiled.plans)
                close = _inside(finding, Compiled(program, opts, closer), exact, settled)
    bad = close.module if close is not None and math.isinf(close.error) else None
    graphs = list(zip(traced.graphs, compiled.plans, strict=True))
    return Comparison(
        title=type(program.model).__name__,
        against=against if isinstance(against, str) else f"options={dict(against)}",
        worst=module_errors(program.model, graphs, found),
        calls=call_errors(compiled.plans, found) if calls else (),
        first_nonfinite=next((each.module for each in findings if math.isinf(each.error)), bad),
        culprit=None if finding is None else finding.module,
        culprit_call=close,
        healthy=finding is None,
        verdict=_verdict(finding, close),
        remedy=remedy,
        result_error=relative(taken.results, reference.results),
        disturbance=disturbance,
        loss_scale=settled,
        left_out=(*traced.left_out, *(f"graph {p.graph}: {p.fallback}" for p in compiled.plans if p.fallback)),
        plans=tuple(compiled.plans),
        errors={plan.graph: coloured(number, plan, found) for number, plan in enumerate(compiled.plans)},
    )


def _program(
    model: object,
    batch: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss: Callable[[Any], Tensor] | None,
    seed: int,
    dynamic: bool,
) -> Program:
    """The model and its call, which is tried once.

    Raises:
        InputError: the model cannot be called so.
        AmpFxError: not a module, or a loss that is none.
    """
    module = getattr(model, "_orig_mod", model)
    if isinstance(module, DistributedDataParallel):
        module = module.module
    if not isinstance(module, nn.Module):
        raise AmpFxError(f"compare needs a torch.nn.Module; got {type(model).__name__}.")
    args, named = batch, {}
    if len(batch) == 1 and isinstance(batch[0], (tuple, list, Mapping)):
        args, named = call_of(batch[0])
    call = args, {**named, **kwargs}
    with repeatable(module, *call, seed) as (given, keywords), torch.set_grad_enabled(
        loss is not None or torch.is_grad_enabled()
    ):
        returned = _called(module, given, keywords)
        differentiated = loss is not None
        if loss is not None:
            loss_of(returned, loss)
        else:
            with contextlib.suppress(NoLossError):
                differentiated = torch.is_grad_enabled() and loss_of(returned, None).requires_grad
    return Program(module, call, loss, differentiated, seed, dynamic)


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
        inspect.signature(module.forward).bind(*args, **kwargs)
        return module(*args, **kwargs)
    except Exception as error:
        # whatever the user's program raises is about what it was called with
        shapes = ", ".join([*map(_described, args), *(f"{k}={_described(v)}" for k, v in kwargs.items())])
        raise InputError(
            f"the model cannot be called with ({shapes}): {type(error).__name__}: {error} Give compare what the model "
            "takes: compare(model, *batch), with a batch of positional arguments, or a mapping of keyword arguments."
        ) from error


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    return type(value).__name__


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Inside, nothing is found that was compiled outside, nor outside what was compiled inside."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def _reference(traced: OneByOne, against: object, opts: Options) -> Taken:
    """What the reference hands out; with options, only the graphs are traced here."""
    if isinstance(against, Mapping):
        without_scaler(against)
    elif not isinstance(against, str) or against not in AGAINST:
        raise OptionsError(
            f"against must be {', '.join(map(repr, AGAINST))} or options of the backend; got {against!r}."
            + did_you_mean(str(against), AGAINST)
        )
    eager = replace(Options(), dtype=opts.dtype, numerics="eager", profile="off")
    is_eager = against == "eager"
    return traced.run(eager if is_eager or against == "autocast" else None, as_written=is_eager)


def _overflows(taken: Taken) -> bool:
    """True where gradients are not finite, and all values are."""
    values, gradients = (
        [largest.isfinite().item() for largest in found.values()]
        for found in (taken.largest, taken.largest_gradients)
    )
    return all(values) and not all(gradients)


def _worst(findings: Sequence[Finding]) -> Finding | None:
    """What is wrong first: what is not finite, then the result that has grown most, then the gradient."""
    wrong = [each for each in findings if each.stands_out]
    for kind in (
        [each for each in wrong if math.isinf(each.error)][:1],
        [each for each in wrong if each.of == "result"],
        wrong,
    ):
        if kind:
            return max(kind, key=lambda each: each.growth)
    return None


def _closer(finding: Finding, graphs: Sequence[Graph], plans: Sequence[Plan]) -> list[Graph]:
    """The graphs, with every call of the module that stands out among what is taken."""
    within = {row.name: () for row in plans[finding.graph].nodes if row.module_path == finding.module}
    return [
        replace(graph, results={**within, **graph.results}) if number == finding.graph else graph
        for number, graph in enumerate(graphs)
    ]


def _inside(finding: Finding, compiled: Compiled, reference: Taken, scale: float) -> CallError | None:
    """The call of the module that stands out at which the error grows most, or that is the first not to be finite."""
    if finding.of == "gradient":
        return None
    found = distances(compiled.run(scale), reference)
    inside = [
        each
        for each in Judge(compiled.plans, found).findings()
        if (each.graph, each.module, each.of) == (finding.graph, finding.module, "result")
    ]
    first = [each for each in inside if math.isinf(each.error)][:1]
    call = max(first or inside, key=lambda each: each.growth)
    rows = {row.name: row for row in compiled.plans[finding.graph].nodes}
    return call_error(rows[call.value], found[call.graph, call.value])


def _verdict(finding: Finding | None, call: CallError | None) -> str:
    if finding is None:
        return (
            "Nothing is wrong: all is finite, and no module is further from the reference than its inputs and its "
            "precision explain."
        )
    name = finding.module or "the model itself"
    if call is not None:
        name += f" (at {short_source(call.source) or call.op})"
    what = "result" if finding.of == "result" else "gradient that goes back through it"
    if math.isinf(finding.error):
        return f"{name} is the first whose {what} is not finite, where that of the reference is."
    if finding.of == "gradient" and finding.underflows:
        return (
            f"{name}: the {what} is {finding.error:.1e} from the reference, and {finding.lost:.1%} of it has become "
            "zero: a larger loss scale keeps it (amp_fx.GradScaler)."
        )
    return (
        f"{name}: the {what} is {finding.error:.1e} from the reference, {finding.growth:.0f} times what its inputs and "
        "its precision explain."
    )
