"""A scaler's numbers as metrics: for TensorBoard, and for anything that logs a dict.

metrics = ScalerMetrics(scaler, wandb.run, every=50)  # or accelerator.log, fabric.log_dict, print
metrics = TensorBoardMetrics(scaler, SummaryWriter(), every=50)

scaler.step(optimizer)
scaler.update()
metrics(step)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from amp_fx.errors import OptionsError
from amp_fx.scaling import GradScaler

__all__ = ["Log", "ScalerMetrics", "TensorBoardMetrics", "Writer"]


class Log(Protocol):
    """An object with ``log(dict)``."""

    def log(self, data: dict[str, Any], /) -> Any:
        """Takes names and values."""
        ...


class Writer(Protocol):
    """What is used of ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None, /) -> Any:
        """Takes a number."""
        ...

    def add_text(self, tag: str, text_string: str, global_step: Any = None, /) -> Any:
        """Takes a text."""
        ...


class ScalerMetrics:
    """Call it with the step after each ``scaler.update()``.

    It logs ``loss_scale``, ``skipped_steps`` (all since the scaler was made) and, if the last step was skipped,
    ``first_nonfinite``: the name of the parameter with inf or nan in its gradient that is nearest to the loss. The
    host waits for the device in the calls that log, and only then.

    Args:
        scaler: read, never changed.
        log: an object with ``log(dict)``, or a function of a dict.
        every: logs in steps that this divides.
        prefix: of the names.

    Raises:
        OptionsError: ``every`` is below 1, or ``log`` is neither.
    """

    def __init__(
        self,
        scaler: GradScaler,
        log: Log | Callable[[dict[str, Any]], Any],
        *,
        every: int = 1,
        prefix: str = "amp_fx/",
    ) -> None:
        write = getattr(log, "log", log)
        if not callable(write):
            raise OptionsError(f"log must have a method log(dict), or be a function of a dict; got {log!r}.")
        if every < 1:
            raise OptionsError(f"every must be 1 or more; got {every}.")
        self._scaler, self._every, self._prefix = scaler, every, prefix
        self._write: Callable[[dict[str, Any]], Any] = write

    def __call__(self, step: int) -> None:
        """Logs, if this is a step to log.

        Args:
            step: the number of the optimizer's step.
        """
        if step % self._every == 0:
            self._log({self._prefix + name: value for name, value in self._values().items()}, step)

    def _values(self) -> dict[str, Any]:
        values: dict[str, Any] = {
            "loss_scale": self._scaler.get_scale(),
            "skipped_steps": self._scaler.skipped_steps,
        }
        if self._scaler.last_found_inf.item():
            # none where no graph uses the scaler, or another process found it
            values.update(zip(["first_nonfinite"], self._scaler.first_nonfinite(), strict=False))
        return values

    def _log(self, values: dict[str, Any], step: int) -> None:
        self._write(values)


class TensorBoardMetrics(ScalerMetrics):
    """:class:`ScalerMetrics` for TensorBoard: numbers as scalars, the name as text.

    Args:
        scaler: read, never changed.
        writer: a ``SummaryWriter``.
        every: logs in steps that this divides.
        prefix: of the tags.
    """

    def __init__(
        self, scaler: GradScaler, writer: Writer, *, every: int = 1, prefix: str = "amp_fx/"
    ) -> None:
        self._writer = writer
        super().__init__(scaler, lambda values: None, every=every, prefix=prefix)

    def _log(self, values: dict[str, Any], step: int) -> None:
        for tag, value in values.items():
            write = self._writer.add_text if isinstance(value, str) else self._writer.add_scalar
            write(tag, value, step)
