"""Parameters whose gradients one scaler has scaled inside a backward, and another scaler steps.

The obvious slip of a loop that had ``torch.amp.GradScaler``, or that has two scalers: the loss is scaled outside, and
its gradient once more inside, which is more than fp16 holds. So while a scaler of amp_fx scales graphs, every step of
any scaler is looked at before it is made.
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from amp_fx._torch import SCALER_STEPS
from amp_fx.errors import ScalerError
from amp_fx.scaling.registry import Scaler, scaler_of

__all__ = ["parameters_of", "watch_steps"]


#: scalers that scale graphs, as many as live
_scalers = 0


def watch_steps(scaler: Scaler) -> None:
    """From now on, and while this scaler lives, no other steps what it scales; said once of each scaler."""
    global _scalers
    _scalers += 1
    SCALER_STEPS.listen(_refuse_other)
    weakref.finalize(scaler, _leave).atexit = False


def _leave() -> None:
    global _scalers
    _scalers -= 1
    if not _scalers:
        SCALER_STEPS.leave(_refuse_other)


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All that an optimizer steps."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _refuse_other(stepping: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Raises if another scaler's graphs have scaled what this one steps, and none of its own have.

    Raises:
        ScalerError: names both, and what to write.
    """
    if not stepping.is_enabled():
        return
    parameters = parameters_of(optimizer)
    own = isinstance(stepping, Scaler)
    if own and stepping.scales(parameters):
        return
    scaler = scaler_of(parameters)
    if scaler is None:
        return
    inside = f"gradients are scaled inside the compiled backward by amp_fx.GradScaler {scaler.name!r}"
    if not own:
        raise ScalerError(
            f"{type(stepping).__module__}.{type(stepping).__qualname__} steps an optimizer whose {inside}: the loss is "
            "scaled twice. Scale, step and update with that one in its place, scaler = amp_fx.GradScaler(device"
            f"{'' if scaler.name == 'default' else f', name={scaler.name!r}'}), or leave 'scaler' out of the options."
        )
    if stepping.name == scaler.name:
        raise ScalerError(
            f"Two scalers are called {scaler.name!r}. Graphs use the later one, and this loop the earlier: the loss is "
            "scaled twice, or the scale never adapts. Make one, and hand it to whoever needs it; or give the other a "
            "name=."
        )
    raise ScalerError(
        f"amp_fx.GradScaler {stepping.name!r} steps an optimizer whose {inside}: the loss is scaled twice, or the "
        f"scale never adapts. Compile the model with options={{'scaler': {stepping.name!r}}}, or scale, step and "
        f"update with {scaler.name!r}."
    )
