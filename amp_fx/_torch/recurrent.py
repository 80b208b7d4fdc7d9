"""Recurrent layers in frames of this backend.

Dynamo gives up a function that touches an ``nn.LSTM``, ``nn.GRU`` or ``nn.RNN``. Its switch ``allow_rnn`` takes them
all, and Inductor then writes most of them out, time step by time step: a GRU of 50 steps takes it two minutes. An LSTM
without gradients on a CPU is one call of oneDNN for each layer and direction, whatever the length.

Under a frame of another backend Dynamo does as before.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from amp_fx._torch.grouped import is_foreign
from amp_fx._torch.tracing import onednn_computes

__all__ = ["take_recurrent", "without_onednn"]


def take_recurrent(_: object) -> None:
    """From now on Dynamo traces functions that call a recurrent layer, and some of the layers with them."""
    # all of Dynamo takes more than a second to import
    from torch._dynamo import config
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.misc import DelayGraphBreakVariable
    from torch._dynamo.variables.nn_module import UnspecializedBuiltinNNModuleVariable as Layer

    # what looks an attribute up; the other name is that of torch 2.14 on
    lookup = "tp_getattro_impl" if hasattr(Layer, "tp_getattro_impl") else "var_getattr"

    class Recurrent(Layer):
        """A recurrent layer, of which Dynamo knows all attributes. A call that would be written out ends the graph."""

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            if _is_one_kernel(self.value):
                return super().call_function(tx, args, kwargs)
            return left_out(self.source).call_function(tx, args, kwargs)

        def look_up(self, tx: Any, name: str) -> Any:
            """In place of torch's own, which has one of two names."""
            if name == "forward" and not _is_one_kernel(self.value):
                owner: Any = self.source
                return left_out(AttrSource(owner, name))
            return getattr(super(), lookup)(tx, name)

    setattr(Recurrent, lookup, Recurrent.look_up)

    def left_out(source: Any) -> DelayGraphBreakVariable:
        # the words of torch 2.15, which does so for every backend
        return DelayGraphBreakVariable(source=source, msg="Dynamo does not support RNN, GRU, or LSTM")

    wrap_module = getattr(VariableBuilder, "wrap_module", None)
    if wrap_module is None:
        # a version that looks at modules elsewhere: recurrent layers stay as it has them
        return

    @functools.wraps(wrap_module)
    def wrap(self: VariableBuilder, value: nn.Module) -> Any:
        is_own = type(value) in (nn.LSTM, nn.GRU, nn.RNN) and not hasattr(value, "_is_fsdp_managed_module")
        if not is_own or config.allow_rnn or is_foreign():
            return wrap_module(self, value)
        # for this thread; in torch 2.11 for all, of which Dynamo's lock lets no other trace meanwhile
        with config.patch(allow_rnn=True):
            found = wrap_module(self, value)
        if type(found) is Layer:
            found.__class__ = Recurrent
        return found

    VariableBuilder.wrap_module = wrap


@contextlib.contextmanager
def without_onednn() -> Iterator[None]:
    """Inside, torch has no oneDNN, as on a GPU."""
    was_on = torch._C._get_mkldnn_enabled()
    # torch.backends.mkldnn.flags sets precisions as well
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(was_on)


def _is_one_kernel(layer: Any) -> bool:
    """Whether Inductor calls a recurrent layer as a whole, and the call runs."""
    return (
        isinstance(layer, nn.LSTM)
        and not layer.proj_size
        # torch's decomposition drops nothing between layers (2.11 to 2.14)
        and not (layer.training and layer.dropout)
        and not torch.is_grad_enabled()
        and torch.backends.mkldnn.enabled
        and all(
            weight.device.type == "cpu"
            and (
                weight.dtype is torch.float32
                or (weight.dtype is torch.bfloat16 and onednn_computes(weight.dtype))
            )
            for weight in layer.parameters()
        )
    )
