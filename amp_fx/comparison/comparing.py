"""``amp_fx.compare(model, *batch)``: a compiled run beside a reference, module by module."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from amp_fx._torch import unwrapped_errors
from amp_fx.calibration.step import loss_scale
from amp_fx.comparison.comparison import Comparison
from amp_fx.comparison.looking import Setting, look, look_again
from amp_fx.comparison.rows import coloured, module_errors
from amp_fx.comparison.running import Program
from amp_fx.comparison.text import verdict
from amp_fx.errors import AmpFxError, InputError, OptionsError, did_you_mean
from amp_fx.graphs.batches import arguments_of
from amp_fx.notices import only_looking
from amp_fx.plans.plan import dtype_name
from amp_fx.reports.histograms import loss_of
from amp_fx.reports.untouched import repeatable
from amp_fx.settings import Options

__all__ = ["AGAINST", "compare"]

#: references that have a name
AGAINST = ("fp32", "autocast", "eager")


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
    to module, and their gradients; a run without that says whether it changed a number. At most 16,384 elements of each
    value are compared, all are searched for inf and nan.

    The model is not changed: parameters, buffers, gradients and the states of the random generators are what they were.
    Code compiled earlier in this process is compiled again when it is next called.

    Args:
        model: in the mode that it is used in. One that is compiled, or inside ``DistributedDataParallel``, is taken as
            it was before; of a process group, one process may call this by itself.
        *batch: arguments of the model; or one batch as :func:`amp_fx.calibrate` takes it: a tuple or list of positional
            arguments, or a mapping of keyword arguments.
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
        OptionsError: bad options, or an unknown reference.
        InputError: the model cannot be called with the batch.
        AmpFxError: not a module, a loss that is none, or Dynamo made no graph that could be compared.
    """
    if not isinstance(against, Mapping) and (not isinstance(against, str) or against not in AGAINST):
        raise OptionsError(
            f"against must be {', '.join(map(repr, AGAINST))} or options of the backend; got {against!r}."
            + did_you_mean(str(against), AGAINST)
        )
    asked = Options.parse(None, options)
    program = _program(model, batch, kwargs, loss, seed, dynamic)
    low = asked.low_dtype(next((p.device.type for p in program.model.parameters()), "cpu"))
    first_scale = loss_scale(scale, low, asked.scaler or "default") if program.differentiated else 1.0
    setting = Setting(program, options or {}, against, first_scale, scale is None)
    with only_looking(), unwrapped_errors(AmpFxError):
        first = look(setting)
        second = look_again(setting, first, calls=calls)
    culprit, plans = first.culprit, first.plans
    not_finite = [each.module for each in first.findings if math.isinf(each.error)]
    if second.call is not None and math.isinf(second.call.error):
        not_finite.append(second.call.module)
    not_finite += [name.rpartition(".")[0] for name in first.not_finite]
    return Comparison(
        title=type(program.model).__name__,
        against=against if isinstance(against, str) else f"options={dict(against)}",
        worst=module_errors(program.model, list(zip(first.graphs, plans, strict=True)), first.found),
        calls=second.calls,
        first_nonfinite=not_finite[0] if not_finite else None,
        culprit=None if culprit is None else culprit.module,
        culprit_call=second.call,
        healthy=culprit is None and not first.is_disturbed and not not_finite,
        verdict=verdict(first, second),
        remedy=second.remedy,
        result_error=first.result_error,
        disturbance=first.disturbance,
        calls_disturbance=second.disturbance,
        loss_scale=first.scale,
        left_out=first.left_out,
        plans=tuple(plans),
        errors={plan.graph: coloured(number, plan, first.found) for number, plan in enumerate(plans)},
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
    call = arguments_of(module, batch, kwargs)
    with (
        repeatable(module, *call, seed) as (given, keywords),
        torch.set_grad_enabled(loss is not None or torch.is_grad_enabled()),
    ):
        returned = _called(module, given, keywords)
        differentiated = loss is not None
        if loss is not None:
            loss_of(returned, loss)
        else:
            with contextlib.suppress(AmpFxError):
                differentiated = loss_of(returned, None).requires_grad
    return Program(module, call, loss, differentiated, seed, dynamic)


def _called(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    try:
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
