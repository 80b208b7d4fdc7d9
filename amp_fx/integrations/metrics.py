"""A scaler's numbers as metrics: for TensorBoard, and for anything that logs a dict. See docs/integrations.md."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from amp_fx.errors import OptionsError
from amp_fx.scaling import GradScaler

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["ScalerMetrics", "TensorBoardMetrics"]


class ScalerMetrics:
    """Call it with the step after each ``scaler.update()``; it logs in steps that ``every`` divides.

    It logs ``loss_scale``, ``skipped_steps`` (all since the scaler was made) and, if the last step was skipped,
    ``first_nonfinite``: the name of the parameter with inf or nan in its gradient that is nearest to the loss. ``log``
    has a method ``log(dict)``, or is a function of a dict. The host waits for the device in the calls that log only.
    """

    def __init__(self, scaler: GradScaler, log: Any, *, every: int = 1, prefix: str = "amp_fx/") -> None:
        write: Callable[[dict[str, Any]], Any] = getattr(log, "log", log)
        if not callable(write):
            raise OptionsError(f"log must have a method log(dict), or be a function of a dict; got {log!r}.")
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
        self._log({self._prefix + name: value for name, value in values.items()}, step)

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._write(values)


class TensorBoardMetrics(ScalerMetrics):
    """:class:`ScalerMetrics` for a ``SummaryWriter`` of TensorBoard: numbers as scalars, the name as text."""

    def __init__(
        self, scaler: GradScaler, writer: SummaryWriter, *, every: int = 1, prefix: str = "amp_fx/"
    ) -> None:
        self._writer = writer
        super().__init__(scaler, writer.add_scalar, every=every, prefix=prefix)

    def _log(self, values: dict[str, Any], step: int) -> None:
        for tag, value in values.items():
            write = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            write(tag, value, step)
