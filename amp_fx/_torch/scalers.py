"""Steps that a scaler of torch makes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["before_scaler_steps"]


def before_scaler_steps(
    call: Callable[[torch.amp.GradScaler, torch.optim.Optimizer], None],
) -> Callable[[], None]:
    """From now on ``call`` gets every scaler, and the optimizer, before ``torch.amp.GradScaler.step``.

    Torch has no hook there, and an optimizer's own is not called in a step that is skipped.

    Returns:
        What undoes it.
    """
    kind, step = torch.amp.GradScaler, torch.amp.GradScaler.step
    listener: Any = torch.compiler.disable(call)
    is_listening = True

    @functools.wraps(step)
    def told(
        self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> float | None:
        if is_listening:
            listener(self, optimizer)
        return step(self, optimizer, *args, **kwargs)

    def undo() -> None:
        nonlocal is_listening
        is_listening = False
        # whoever has replaced it since calls on
        if kind.step is told:
            kind.step = step

    kind.step = told
    return undo
