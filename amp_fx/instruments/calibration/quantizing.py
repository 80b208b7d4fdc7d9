"""``amp_fx.quantize(model, batches)``: static int8 in one call, by the defaults of the documentation."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from amp_fx._torch import called_in
from amp_fx.compiler.settings import OptionNames, compile
from amp_fx.errors import InputError, OptionsError
from amp_fx.instruments.batches import uncompiled
from amp_fx.instruments.calibration.calibrating import calibrate
from amp_fx.instruments.calibration.calibration import Calibration
from amp_fx.precision.plans.sensitivity import OUTPUTS

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

_Model = TypeVar("_Model", bound=nn.Module)
#: a budget that no prediction reaches
_ANY_ERROR = 1e9
#: options that the plan decides
_OF_PLAN = "plan", "policy", "int8", "fp8", "numerics"


def quantize(
    model: _Model,
    batches: Any,
    *,
    of: str | Callable[[Any], Any] = OUTPUTS,
    budget: str | float = 2.0,
    verify: bool = True,
    save: str | os.PathLike[str] | None = None,
    mode: str | None = None,
    dynamic: bool | None = None,
    fullgraph: bool = False,
    **options: Unpack[OptionNames],
) -> _Model:
    """Calibrates a model on batches, plans int8 within an error, and returns the compiled model for inference.

        fast = amp_fx.quantize(model.eval(), batches)

    The same in three steps, for more choices: :func:`amp_fx.calibrate`, :meth:`amp_fx.Calibration.plan`,
    :func:`amp_fx.compile`.

    Args:
        model: fp32, in evaluation mode. One that is compiled is taken as it was before. Not changed; its weights may
            change, and are quantized again.
        batches: one or several, as in :func:`amp_fx.calibrate`; like those to come.
        of: which of the model's results count, as in :func:`amp_fx.calibrate`.
        budget: error that is allowed, in times of torch.autocast's, or ``"autocast"``.
        verify: run the plan compiled, on the batches, against fp32; without it, the prediction counts.
        save: file that the plan is written to, for ``options={"plan": path}``, ``amp_fx.export(plan=path)``.
        mode: as in ``torch.compile``.
        dynamic: as in ``torch.compile``.
        fullgraph: as in ``torch.compile``.
        options: as in :func:`amp_fx.compile`; ``dtype`` and ``profile`` count for the calibration as well. The plan
            decides ``policy``, ``int8`` and ``numerics``.

    Returns:
        What ``torch.compile`` returns, called inside ``torch.inference_mode()``; its ``amp_fx_plan`` is the
        :class:`amp_fx.CalibratedPlan`, for ``amp_fx.export(plan=...)``. Where no matmul gains by int8 within the
        budget, the log warns, and it runs in 16 bits.

    Raises:
        InputError: a model in training mode, or one that does not take a batch.
        OptionsError: bad options, an option that the plan decides, or a device that does not multiply in int8 faster.
    """
    given: dict[str, Any] = dict(options)
    if decided := next((name for name in _OF_PLAN if name in given), None):
        raise OptionsError(
            f"quantize finds {decided} by measurement; take {decided}={given[decided]!r} out, or use "
            "amp_fx.calibrate(...).plan() and amp_fx.compile(model, plan=...)."
        )
    program: Any = uncompiled(model)
    if program.training:
        raise InputError(
            "quantize takes a model in evaluation mode, and this one is in training mode; call model.eval() first."
        )
    # before the work
    compiled = partial(compile, program, mode=mode, dynamic=dynamic, fullgraph=fullgraph, **given)
    compiled()
    known = {name: given.get(name, "auto") for name in ("dtype", "profile")}
    found = calibrate(program, batches, of=of, policy="int8", dtype=known["dtype"], profile=known["profile"])
    plan = found.plan(budget, verify=verify)
    logger.info("quantize: %s", plan)
    if not plan.lowered[1]:
        logger.warning("quantize: no matmul runs in int8. %s", _why_none(found, budget))
    if save is not None:
        plan.save(save)
    made = called_in(compiled(plan=plan), lambda *_: torch.inference_mode())
    # not by setattr, which would give it to the model inside
    vars(made)["amp_fx_plan"] = plan
    return made


def _why_none(found: Calibration, budget: str | float) -> str:
    """Why no matmul runs in int8 within a budget, and what to do."""
    most = found.plan(_ANY_ERROR, verify=False)
    if not (below := most.lowered[1]):
        return "None would at any budget: in these sizes on this device none gains time, or it is the last linear."
    return (
        f"None gains within budget={budget!r}: {below} would run at a predicted error of {most.point.error:.1e}, "
        f"autocast's is {found.autocast_error:.1e}. Allow a larger budget, or take amp_fx.compile(model, "
        "policy='int8'), which has no budget. print(amp_fx.calibrate(model, batches, of='outputs', policy='int8')) "
        "says what each matmul adds."
    )
