"""Accelerate: a plugin that compiles with amp_fx, and a scaler whose skipped steps Accelerate sees.

``docs/integrations.md`` shows both. With ``mixed_precision="fp16"`` Accelerate would use torch.autocast and
scale by itself. Its ``dynamo_backend`` takes only names of its own enum (accelerate 1.15), so the plugin is the way in.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from amp_fx.compiler.settings import Options
from amp_fx.errors import ScalerError
from amp_fx.integrations import backend_options, needed
from amp_fx.runtime.scaling import scaler as scaling

with needed("accelerate"):
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.utils import DynamoBackend, TorchDynamoPlugin


@dataclass
class AmpFxPlugin(TorchDynamoPlugin):
    """``Accelerator(dynamo_plugin=AmpFxPlugin(options={...}))`` compiles prepared models with amp_fx.

    Args are those of ``accelerate.utils.TorchDynamoPlugin``, with what its environment variables set, but for
    ``backend``, which is "amp_fx". ``options`` are amp_fx's; ``mode`` may be given beside them.
    """

    def __post_init__(self) -> None:
        # Accelerate compiles where the backend is not "no", and has no name for ours
        self.backend = DynamoBackend.INDUCTOR
        super().__post_init__()
        self.options = backend_options(self.options, mode=self.mode)

    def to_kwargs(self) -> dict[str, Any]:
        """The arguments of ``torch.compile``, which does not take a mode beside options."""
        kwargs = super().to_kwargs()
        kwargs.pop("mode", None)
        return {
            **kwargs,
            "backend": "amp_fx",
            "options": {**Options.parse(self.mode).inductor, **(self.options or {})},
        }


class GradScaler(scaling.GradScaler):
    """``amp_fx.GradScaler`` for ``accelerator.scaler``: set it before ``accelerator.prepare``.

    Accelerate takes a step as skipped if ``optimizer.step`` was not called. A fused optimizer is called in any case,
    and finds out on the device. So that ``accelerator.optimizer_step_was_skipped`` and its learning rate schedulers
    are right, fused optimizers, too, are called only for steps that are taken: the host waits once in each step.
    """

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """As ``amp_fx.GradScaler.step``."""
        _skip_on_host(optimizer)
        return super().step(optimizer, *args, **kwargs)


def _skip_on_host(optimizer: Any) -> None:
    """From now on, a scaler does not call the optimizer for a step that it skips, fused or not."""
    optimizer._step_supports_amp_scaling = False


def attach(scaler: scaling.GradScaler, optimizer: AcceleratedOptimizer) -> None:
    """Gives a scaler to an optimizer that was prepared without one; ScalerError where it has another."""
    if optimizer.scaler is scaler:
        return
    if optimizer.scaler is not None:
        raise ScalerError(
            f"The optimizer already steps with another scaler, {optimizer.scaler!r}; "
            "leave fp16=False and mixed_precision='no': amp_fx scales by itself."
        )
    # as for an optimizer that was pickled: sets up what notices a skipped step
    optimizer.__setstate__({**optimizer.__getstate__(), "scaler": scaler})
    inner = optimizer.optimizer
    while isinstance(inner, AcceleratedOptimizer):
        inner = inner.optimizer
    _skip_on_host(inner)
