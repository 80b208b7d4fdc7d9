"""``amp_fx.calibrate(model, batches)``: from a model and data to what each rounding costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from amp_fx.compiler.settings import Options
from amp_fx.errors import AmpFxError, OptionsError, ScalerError
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.instruments.batches import call_of, uncompiled
from amp_fx.instruments.calibration.calibration import Calibration
from amp_fx.instruments.calibration.graphs import Graphs, run_graphs
from amp_fx.instruments.step import Step
from amp_fx.instruments.targets import find_target
from amp_fx.instruments.targets.process import TargetProcess
from amp_fx.precision.placement.level_cost import auto_level
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.sensitivity import GRADIENTS, OF, OUTPUTS, Sensitivity
from amp_fx.precision.policy.levels import levels_of
from amp_fx.runtime.scaling import find_scaler

#: where a scaler starts
FIRST_SCALE = 65536.0


@torch.inference_mode(False)
def calibrate(
    model: nn.Module,
    batches: Any,
    loss: Callable[[Any], torch.Tensor] | None = None,
    *,
    of: str | Callable[[Any], Any] = GRADIENTS,
    dtype: str | torch.dtype = "auto",
    profile: str | DeviceProfile = "auto",
    target: str | None = None,
    scale: float | None = None,
    policy: Any = "autocast",
    fp8: str = "auto",
    probes: int = 1,
    seed: int = 0,
) -> Calibration:
    """Measures what each rounding to the low dtype does to the gradient of a model, or to what it returns.

    One forward, backward and, of gradients, double backward per batch, in the precision of the model's weights. The
    model and the states of the random generators are afterwards what they were. Code compiled earlier in this process
    is compiled again when it is next called.

    Args:
        model: fp32, in the mode it is trained in; a checkpoint that has been trained for a while, since sensitivities
            of the first steps say little about later ones. One that is compiled is taken as it was before.
        batches: a batch or an iterable of them, of any sizes, whose sensitivities are averaged. A batch is a tuple of
            positional arguments, a mapping of keyword arguments, or the only argument, a tensor.
        loss: what the model returns -> 0-d tensor. None: the model returns the loss, or has it in ``.loss``.
        of: ``"gradients"``, or ``"outputs"`` for a model that is called without gradients: then there is no loss, and
            what is judged is the relative L2 error of the floating tensors that the model returns, each weighing the
            same. A function: what the model returns -> those of them that count.
        dtype: the low dtype, as in ``options=`` of the backend.
        profile: rates by which time is counted, as in ``options=`` of the backend.
        target: a GPU to plan for, ``"cuda:h100"``, which need not be in this machine: its rates and its op lists count,
            and what its kernels round. The model is on the CPU, and compiled steps are checked there.
        scale: loss scale of fp16; None: that of the :class:`amp_fx.GradScaler` named "default", or 65536.
        policy: base list and rules; rules hold, whatever is measured. With base ``"fp8"``, what each matmul of linears
            would cost in fp8 is measured, too; with ``"int8"``, which is about outputs, what it would cost in int8.
        fp8: how policy fp8 scales, as in ``options=`` of the backend.
        probes: vectors of random signs per batch, each a double backward; the gradient's own direction is one more.
            More of them, or more batches, make the numbers surer where few values decide, as in a classifier's head.
        seed: of the random signs, and of random numbers that the step itself draws, as for dropout.

    Raises:
        OptionsError: bad options, or a loss that is no function.
        AmpFxError: not a module, no loss, a gradient that is zero or not finite, or an op without a second derivative.
    """
    program = uncompiled(model)
    if not isinstance(program, nn.Module):
        raise AmpFxError(f"calibrate needs a torch.nn.Module; got {type(model).__name__}.")
    given = {"dtype": dtype, "policy": policy, "fp8": fp8}
    if not callable(of) and of not in OF:
        raise OptionsError(f"of must be {', '.join(map(repr, OF))} or a function; got {of!r}.")
    training = of == GRADIENTS
    if not training and loss is not None:
        raise OptionsError("calibrate of outputs takes no loss; of=function picks what counts of them.")
    opts = Options.parse(None, given if not isinstance(profile, str) else {**given, "profile": profile})
    if opts.policy.sensitivity is not None:
        raise OptionsError(f"calibrate measures sensitivity; take 'sensitivity' out of policy {policy!r}.")
    parameters = [parameter for parameter in program.parameters() if parameter.requires_grad or not training]
    if not parameters:
        raise AmpFxError(f"the model has no parameter{' that requires a gradient' * training}.")
    device = parameters[0].device.type
    low = opts.low_dtype(device if target is None else "cuda")
    level = _level(opts, device, target, training=training)
    if target is not None and profile != "auto":
        raise OptionsError(f"target={target!r} and profile={profile!r} both say which rates count; drop one.")
    rates = profile if target is None else find_target(target).profile
    opts = replace(opts, dtype=low, profile=rates, level=level)
    scale = loss_scale(scale, low) if training else 1.0
    if isinstance(probes, bool) or not isinstance(probes, int) or probes < 1:
        raise OptionsError(f"probes must be an integer from 1 on; got {probes!r}.")
    pick = of if callable(of) else loss
    steps = [
        Step(program, call_of(program, batch), pick, seed + number, of_outputs=not training)
        for number, batch in enumerate(_each(batches))
    ]
    if not steps:
        raise AmpFxError("calibrate needs at least one batch; got none.")
    process = None if target is None else TargetProcess(target)
    graphs = run_graphs(lambda: Graphs(opts, low, process, training=training), steps, scale, probes)
    found = graphs.sensitivities()
    # a value is continuous where its derivative jumps
    jumps = [row for graph in found for row in graph.outline.nodes if has_trait(row.op, Trait.KINK)]
    sensitivity = Sensitivity(
        type(program).__name__,
        low,
        scale,
        len(steps),
        kinks=len(jumps) if training else 0,
        of=GRADIENTS if training else OUTPUTS,
        level="" if graphs.level is None else graphs.level.name,
        graphs=found,
    )
    return Calibration(sensitivity, graphs.traced, opts, steps)


def _each(batches: Any) -> list[Any]:
    if isinstance(batches, (tuple, Mapping, torch.Tensor)):
        return [batches]
    if not isinstance(batches, Iterable):
        raise AmpFxError(
            f"batches should be a tuple, a mapping, a tensor or an iterable of them; got {type(batches).__name__}."
        )
    return list(batches)


def _level(opts: Options, device: str, target: str | None, *, training: bool) -> str:
    """How matmuls are measured below 16 bits: ``"auto"`` settled for the device that is planned for."""
    base = opts.policy.base
    if not levels_of(base):
        return opts.level
    if not levels_of(base, training=training):
        raise OptionsError(
            f"policy {base!r} is about graphs without gradients; calibrate them with of='outputs'."
        )
    if target is None:
        level = auto_level(base, opts.level, device)
    else:
        level = auto_level(base, opts.level, "cuda", find_target(target).gpu.capability)
    return level.name if training else level.evaluated or level.name


def loss_scale(scale: float | None, low: torch.dtype, name: str = "default") -> float:
    """The loss scale that was given for a low dtype, else that of a scaler, else where such a scaler starts.

    OptionsError for a scale that is no positive number.
    """
    if low is torch.bfloat16:
        return 1.0
    if scale is None:
        try:
            return float(find_scaler(name).get_scale())
        except ScalerError:
            return FIRST_SCALE
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise OptionsError(f"scale must be a positive number; got {scale!r}.")
    return float(scale)
