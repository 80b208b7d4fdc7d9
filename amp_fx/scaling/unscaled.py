"""What users hear about scaling that is missing, and about a scaler that is ignored or not used.

``torch.amp.GradScaler`` works from outside: nothing in a graph tells whether there is one. But an optimizer that it
steps is stepped from inside its ``step``. So a graph that trains in fp16 without loss scaling is remembered by its
parameters, and the first step of an optimizer that has one of them says whether a scaler made it.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from amp_fx._torch import BEFORE_STEP, StorageRef, storage_ref
from amp_fx.errors import ScalingWarning
from amp_fx.graphs.regions import Region
from amp_fx.plans.plan import Plan
from amp_fx.scaling.registry import scaler_of
from amp_fx.scaling.stepping import parameters_of
from amp_fx.state import register

__all__ = [
    "expect_scaler",
    "is_scaled",
    "wait_no_more",
    "warn_ignored",
    "warn_taken_inside",
    "without_scaling",
]

#: True while a model is only looked at
_not_training: ContextVar[bool] = ContextVar("amp_fx_not_training", default=False)

#: code that is not the user's
_NOT_THEIRS = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<")


_MISSING = (
    "amp_fx trains in float16 without loss scaling: gradients below 6e-8 become zero. "
    "Use options={'dtype': 'float16', 'scaler': 'default'} with scaler = amp_fx.GradScaler(device), "
    "or torch.amp.GradScaler, or dtype 'bfloat16', which needs no scaling."
)

_UNUSED = (
    "An optimizer is stepped without amp_fx.GradScaler {0!r}, which scales its gradients inside the compiled backward: "
    "a step with inf or nan is not skipped, and the scale never adapts. Write scaler.step(optimizer); scaler.update() "
    "with that scaler, or use dtype 'bfloat16', which needs none."
)


@dataclass
class _Unscaled:
    """What was said, and what waits for an optimizer's step.

    Attributes:
        parameters: the memory of those of the graphs that wait, by id.
        any_optimizer: a graph waits whose inputs are no parameters, as inside FSDP.
        any_unscaled: a graph waits that has no scaler.
        warned: nothing scales, or nobody asks what does; said once.
        warned_ignored: the scaler is ignored; said once.
    """

    parameters: dict[int, StorageRef] = field(default_factory=dict)
    any_optimizer: bool = False
    any_unscaled: bool = False
    warned: bool = False
    warned_ignored: bool = False


_state = _Unscaled()


def _forget() -> None:
    """Nothing was said, and nothing waits."""
    wait_no_more()
    _state.warned = _state.warned_ignored = False


register("warnings about loss scaling, and graphs that wait for a step", _forget)


def is_scaled(regions: Mapping[str, Region]) -> bool:
    """True for fp16 that is amp_fx's doing: under the user's own autocast the user owns the scaling, too."""
    return any(region.dtype is torch.float16 and not region.by_user for region in regions.values())


@contextlib.contextmanager
def without_scaling() -> Iterator[None]:
    """Inside, models are looked at and not trained: nobody is warned, and the one warning is kept for later."""
    token = _not_training.set(True)
    try:
        yield
    finally:
        _not_training.reset(token)


def warn_ignored(scaler: str, regions: Mapping[str, Region]) -> None:
    """Warns, once in a process, that the user's own fp16 autocast leaves a scaler nothing to do.

    Args:
        scaler: the name in the options.
        regions: autocast state at the entry of a graph with a backward, per device type.
    """
    if _state.warned_ignored or _not_training.get():
        return
    own = [device for device, region in regions.items() if region.dtype is torch.float16 and region.by_user]
    if not own:
        return
    _state.warned_ignored = True
    warnings.warn(
        f"options={{'scaler': {scaler!r}}} is ignored: the model runs under torch.autocast({own[0]!r}, torch.float16) "
        "of your own, or of your trainer, and there the loss is scaled from outside, as torch.amp.GradScaler does. "
        "To scale inside the compiled backward, run the model without that autocast (Lightning: precision "
        "'32-true'; Accelerate and Trainer: no mixed precision) and hand the trainer an amp_fx.GradScaler; "
        "or leave 'scaler' out of the options.",
        ScalingWarning,
        stacklevel=_users_level(),
    )


def warn_taken_inside(scaler: str) -> None:
    """Warns that a graph takes its gradients itself, where no scaler of amp_fx reaches them."""
    warnings.warn(
        f"scaler={scaler!r} does not scale the gradients that a compiled function takes inside itself, with "
        "torch.autograd.grad or backward(): gradients below 6e-8 become zero. Compile the model or the loss and call "
        "backward() outside, or use dtype 'bfloat16', which needs no scaling.",
        ScalingWarning,
        stacklevel=_users_level(),
    )


def expect_scaler(plan: Plan, example_inputs: Sequence[Any], scaler: str | None) -> None:
    """Warns, once in a process, if the first step after a graph's backward is made without a scaler.

    Args:
        plan: of a graph with a backward.
        example_inputs: the values that the graph came with.
        scaler: what scales inside that backward; None: nothing does.
    """
    if _state.warned or _not_training.get() or all(row.dtype is not torch.float16 for row in plan.nodes):
        return
    leaves = [value for value in example_inputs if isinstance(value, nn.Parameter) and value.requires_grad]
    _state.parameters.update({id(leaf): storage_ref(leaf) for leaf in leaves})
    _state.any_optimizer |= not leaves
    _state.any_unscaled |= scaler is None
    BEFORE_STEP.listen(_before_step)


def _before_step(optimizer: torch.optim.Optimizer, args: object, kwargs: object) -> None:
    parameters = parameters_of(optimizer)
    # sharded parameters are not what graphs see
    if not _state.any_optimizer and not any(
        _is_waited_for(p) or type(p) is not nn.Parameter for p in parameters
    ):
        return
    message = _MISSING if _state.any_unscaled else ""
    wait_no_more()
    if any(map(_is_scaler_step, _frames(sys._getframe(1)))):
        return
    scaler = scaler_of(parameters)
    if scaler is not None:
        message = "" if scaler.has_looked else _UNUSED.format(scaler.name)
    if message:
        _state.warned = True
        warnings.warn(message, ScalingWarning, stacklevel=_users_level())


def wait_no_more() -> None:
    """No graph waits for a step."""
    _state.any_optimizer = _state.any_unscaled = False
    _state.parameters.clear()
    BEFORE_STEP.leave(_before_step)


def _is_waited_for(parameter: Tensor) -> bool:
    memory = _state.parameters.get(id(parameter))
    # else the id was that of one that has died
    return memory is not None and memory() is not None


def _frames(innermost: FrameType | None) -> Iterator[FrameType]:
    """A frame and its callers."""
    while innermost is not None:
        yield innermost
        innermost = innermost.f_back


def _is_scaler_step(frame: FrameType) -> bool:
    if frame.f_code.co_name != "step":
        return False
    scaler = frame.f_locals.get("self")
    return isinstance(scaler, torch.amp.GradScaler) and scaler.is_enabled()


def _users_level() -> int:
    """The ``stacklevel`` at which the caller's warning names the user's own line."""
    files = (frame.f_code.co_filename for frame in _frames(sys._getframe(1)))
    return next((level for level, file in enumerate(files, start=1) if not file.startswith(_NOT_THEIRS)), 1)
