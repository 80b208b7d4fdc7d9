"""A scaler's numbers as metrics: for TensorBoard, and for anything that logs a dict. See docs/integrations.md."""

from __future__ import annotations

from typing import Any

from amp_fx.errors import OptionsError
from amp_fx.runtime.scaling import GradScaler


class ScalerMetrics:
    """Call it with the step after each ``scaler.update()``; it logs in steps that ``every`` divides.

    It logs ``loss_scale``, ``skipped_steps`` (all since the scaler was made) and, if the last step was skipped,
    ``first_nonfinite``: the name of the parameter with inf or nan in its gradient that is nearest to the loss. ``log``
    has a method ``log(dict)``, is a function of a dict, or a ``SummaryWriter`` of TensorBoard, which gets numbers as
    scalars, the name as text. The host waits for the device in the calls that log only.
    """

    def __init__(self, scaler: GradScaler, log: Any, *, every: int = 1, prefix: str = "amp_fx/") -> None:
        write = getattr(log, "log", log)
        if not callable(write) and not hasattr(write, "add_scalar"):
            raise OptionsError(
                f"log must have log(dict), be a function of it, or a SummaryWriter; got {log!r}."
            )
        if every < 1:
            raise OptionsError(f"every must be 1 or more; got {every}.")
        self._scaler, self._write, self._every, self._prefix = scaler, write, every, prefix

    def __call__(self, step: int) -> None:
        """Logs, if this is a step to log."""
        if step % self._every:
            return
        scaler = self._scaler
        values: dict[str, Any] = {"loss_scale": scaler.get_scale(), "skipped_steps": scaler.skipped_steps}
        if scaler.last_found_inf.item():
            # none where no graph uses the scaler, or another process found it
            values.update(zip(["first_nonfinite"], scaler.first_nonfinite(), strict=False))
        named = {self._prefix + name: value for name, value in values.items()}
        if callable(self._write):
            self._write(named)
            return
        for tag, value in named.items():
            write = self._write.add_text if isinstance(value, str) else self._write.add_scalar
            write(tag, value, step)
