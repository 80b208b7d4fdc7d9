"""Lightning and Fabric: plugins that leave the precision to amp_fx, and compile with it; see docs/integrations.md.

``precision=`` of the Trainer and of Fabric stays unset: its "16-mixed" runs the model under torch.autocast, and scales
outside of the graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amp_fx.errors import one_of
from amp_fx.integrations import backend_options, compile_in_place, needed
from amp_fx.integrations.metrics import ScalerMetrics
from amp_fx.runtime.scaling import GradScaler

with needed("lightning"):
    from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
    from lightning.pytorch import Callback, LightningModule
    from lightning.pytorch.plugins import MixedPrecision
    from lightning.pytorch.plugins.precision import Precision as PlainPrecision

_DTYPES = {"16-mixed": "float16", "bf16-mixed": "bfloat16"}


class _AmpFx:
    """The common part of the plugins of both libraries, in front of the library's own class.

    ``precision`` is "16-mixed" or "bf16-mixed". For "16-mixed" a ``scaler`` is made on ``device`` if none is given;
    checkpoints of the Trainer have its state, with Fabric save ``plugin.state_dict()``. ``options`` are the backend's
    (docs/options.md); the attribute has what modules are compiled with. ``compile=False`` leaves compiling to you.
    """

    def __init__(
        self,
        precision: str,
        device: str | None = None,
        scaler: GradScaler | None = None,
        *,
        options: Mapping[str, Any] | None = None,
        compile: bool = True,
    ) -> None:
        dtype = _DTYPES[one_of("precision", _DTYPES, precision)]
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if precision == "16-mixed" and scaler is None:
            scaler = GradScaler(device)
        self.options = backend_options(options, dtype=dtype, scaler=scaler)
        self._compile = compile
        super().__init__(precision, device, scaler)  # pyright: ignore[reportCallIssue]  # of the library's class

    def forward_context(self) -> AbstractContextManager[Any]:
        """Nothing: precision is decided inside the graphs."""
        return nullcontext()


class AmpFxPrecision(_AmpFx, MixedPrecision):
    """``Trainer(plugins=[AmpFxPrecision("16-mixed")])``: the LightningModule is compiled by amp_fx, in place.

    Compiled are its ``forward`` and each of its children: what a step calls, ``self(x)`` or ``self.net(x)``, is one
    graph. The steps themselves are not, as Dynamo cannot trace ``self.log`` (lightning 2.6.6, torch 2.13: an
    InternalTorchDynamoError, with every backend). A LightningModule that is compiled already, whole or in part, stays
    as it is; give it ``options=plugin.options``.
    """

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Compiles what the steps of a LightningModule call."""
        if self._compile and isinstance(module, LightningModule) and not _is_compiled(module):
            if type(module).forward is not LightningModule.forward:
                # not module.compile(): under DDP, Lightning calls the module for a step
                forward = torch.compile(module.forward, backend="amp_fx", options=self.options)
                module.__dict__["forward"] = forward
            for child in _called(module):
                compile_in_place(child, self.options)
        return module

    def clip_gradients(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        """Clips, for fused optimizers too: gradients are true to scale as they are."""
        PlainPrecision.clip_gradients(self, optimizer, *args, **kwargs)


class AmpFxFabricPrecision(_AmpFx, FabricMixedPrecision):
    """``Fabric(plugins=[AmpFxFabricPrecision("16-mixed")])``: ``fabric.setup`` compiles with amp_fx, in place.

    Inputs and outputs of a model keep their dtypes. A model that is compiled already stays as it is, as for
    ``fabric.setup(torch.compile(model, ...))``; give it ``options=plugin.options``.
    """

    def convert_input(self, data: Any) -> Any:
        """The data, as it is."""
        return data

    convert_output = convert_input

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Compiles a module in place."""
        if self._compile and not _is_compiled(module):
            compile_in_place(module, self.options)
        return module

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        """Finds inf and nan before clipping, for fused optimizers too."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)


class MetricsCallback(Callback):
    """Logs a scaler's numbers in the Trainer's steps, as often as the metrics' ``every`` says."""

    def __init__(self, metrics: ScalerMetrics) -> None:
        self._metrics = metrics
        self._step = 0

    def on_train_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        """After each batch; with gradient accumulation, after those that step."""
        if trainer.global_step != self._step:
            self._step = trainer.global_step
            self._metrics(self._step)


def _is_compiled(module: nn.Module) -> bool:
    """True for a module that the user has compiled, whole or in part."""
    if isinstance(module, LightningModule) and module._compiler_ctx is not None:
        return True
    return any(part._compiled_call_impl is not None for part in module.modules())


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """The children with parameters, and what is inside of lists and dicts of modules."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)
        elif next(child.parameters(), None) is not None:
            yield child
