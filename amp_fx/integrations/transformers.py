"""The Trainer of transformers, and what is built on it: TRL's trainers, with or without PEFT; see docs/integrations.md.

Checkpoints have the model's own keys, because it is compiled in place. The state of the scaler is in
``trainer_state.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from amp_fx.errors import ScalerError
from amp_fx.integrations import backend_options, compile_in_place, needed
from amp_fx.integrations.metrics import ScalerMetrics
from amp_fx.runtime.scaling import GradScaler, find_scaler

with needed("accelerate"):
    from accelerate.optimizer import AcceleratedOptimizer

    from amp_fx.integrations.accelerate import AmpFxPlugin, attach

with needed("transformers"):
    from transformers import TrainerCallback, TrainerState
    from transformers.trainer_callback import ExportableState


class AmpFxCallback(TrainerCallback, ExportableState):
    """Compiles the Trainer's model in place, for training, evaluation and generation.

    ``options`` are the backend's (docs/options.md). ``scaler``, for float16, is an :class:`amp_fx.GradScaler` or its
    name. The Trainer steps with it: a step with inf or nan in its gradients is skipped, and the learning rate does not
    advance. A checkpoint has its state. Bad options raise OptionsError, an unknown or a second scaler ScalerError.
    """

    def __init__(
        self,
        options: Mapping[str, Any] | None = None,
        *,
        dtype: str | torch.dtype | None = None,
        scaler: GradScaler | str | None = None,
    ) -> None:
        if isinstance(scaler, str):
            scaler = cast(GradScaler, find_scaler(scaler))
        self.scaler = scaler
        self.options = backend_options(options, dtype=dtype, scaler=self.scaler)

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The Trainer is made: evaluation without training is compiled, too."""
        self._compile(kwargs.get("model"))

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Compiles a model that has come later, and hands the scaler to the optimizer.

        ScalerError for an optimizer that Accelerate has not prepared.
        """
        self._compile(kwargs.get("model"))
        if self.scaler is None:
            return
        optimizer = kwargs.get("optimizer")
        if not isinstance(optimizer, AcceleratedOptimizer):
            raise ScalerError(
                f"The Trainer steps with {type(optimizer).__name__}, which amp_fx's scaler cannot reach; "
                "use dtype='bfloat16', which needs none."
            )
        attach(self.scaler, optimizer)
        states: Any = state.stateful_callbacks
        saved = states.get(type(self).__name__)
        # a Trainer that got its callback by add_callback has nothing here until it is resumed
        if saved is not None:
            self.scaler_state = saved["attributes"]["scaler_state"]

    def _compile(self, model: Any) -> None:
        if model is not None and model._compiled_call_impl is None:
            compile_in_place(model, self.options)

    @property
    def scaler_state(self) -> dict[str, Any]:
        """The scaler's state dict, as JSON takes it; empty without a scaler."""
        return {} if self.scaler is None else self.scaler.state_dict()

    @scaler_state.setter
    def scaler_state(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)

    def state(self) -> dict[str, Any]:
        """The state that the Trainer writes into a checkpoint."""
        options = {key: str(value) if key == "dtype" else value for key, value in self.options.items()}
        args = {"options": options, "scaler": None if self.scaler is None else self.scaler.name}
        return {"args": args, "attributes": {"scaler_state": self.scaler_state}}


class AmpFxTrainerMixin:
    """For a Trainer of your own: ``class MyTrainer(AmpFxTrainerMixin, Trainer)``. Accelerate compiles the model."""

    #: of the backend
    amp_fx_options: Mapping[str, Any] | None = None

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        args = super()._build_accelerator_args(**kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        return {**args, "dynamo_plugin": AmpFxPlugin(options=self.amp_fx_options)}


class MetricsCallback(TrainerCallback):
    """Logs a scaler's numbers in the Trainer's steps, as often as the metrics' ``every`` says."""

    def __init__(self, metrics: ScalerMetrics) -> None:
        self.metrics = metrics

    def on_step_end(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """After each step of the optimizer, taken or skipped."""
        self.metrics(state.global_step)
