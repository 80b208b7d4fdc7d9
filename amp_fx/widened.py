"""Parameters that a module holds in a low dtype and reads in fp32, as :func:`amp_fx.store_low` leaves them.

Eager code computes with the widened values. In a graph, widening is all that happens to such an input: what is narrowed
again reads the parameter as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.nn.utils import parametrize

from amp_fx.errors import WeightsError
from amp_fx.graphs.calls import is_cast

__all__ = ["Widened", "identity", "refuse_training", "replace_parameter", "widenings"]


class Widened(nn.Module):
    """What a module reads of a parameter that it holds low: a parametrization."""

    def forward(self, stored: Tensor) -> Tensor:
        """The values in fp32."""
        wide = stored.to(torch.float32)
        if wide.requires_grad and not torch.compiler.is_compiling():
            wide.register_hook(_refuse)
        return wide


def identity(value: Tensor) -> tuple[Any, ...]:
    """Equal for tied weights."""
    storage = value.untyped_storage()._cdata
    return storage, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype


def replace_parameter(module: nn.Module, name: str, low: nn.Parameter) -> None:
    """Puts a low parameter in the place of one in fp32; ``state_dict`` has it under the name it had.

    Args:
        module: that has the parameter itself.
        name: of its attribute.
        low: holds the same values, rounded.
    """
    module.register_parameter(name, low)
    # it changes the dtype, which torch calls unsafe
    parametrize.register_parametrization(module, name, Widened(), unsafe=True)
    module.register_state_dict_post_hook(functools.partial(_name_saved, name))
    module.register_load_state_dict_pre_hook(functools.partial(_name_loaded, name))


def widenings(gm: fx.GraphModule) -> list[fx.Node]:
    """The casts that :class:`Widened` has put into a captured graph."""
    return [node for node in gm.graph.nodes if is_cast(node) and _is_widening(node)]


def refuse_training(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Looks for gradients of parameters that are stored low.

    Args:
        gm: Dynamo's graph, which is going to be differentiated.
        example_inputs: one per placeholder.

    Raises:
        WeightsError: there are some.
    """
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if isinstance(value, nn.Parameter) and value.requires_grad and any(map(_is_widening, node.users)):
            _refuse()


def _is_widening(node: fx.Node) -> bool:
    """True for what :class:`Widened` computes."""
    modules = list(node.meta.get("nn_module_stack", {}).values())
    return bool(modules) and modules[-1][1] in (Widened, f"{Widened.__module__}.{Widened.__qualname__}")


def _refuse(_gradient: Tensor | None = None) -> None:
    raise WeightsError(
        "a gradient is asked for of weights that amp_fx.store_low has stored low; their fp32 values are gone. Call "
        "the model under torch.inference_mode() or torch.no_grad(); to train, load fp32 weights into a new model."
    )


def _name_saved(name: str, _module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    state[f"{prefix}{name}"] = state.pop(_original(prefix, name))


def _name_loaded(name: str, _module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    if (own := f"{prefix}{name}") in state:
        state[_original(prefix, name)] = state.pop(own)


def _original(prefix: str, name: str) -> str:
    """The name that torch gives to what is parametrized."""
    return f"{prefix}parametrizations.{name}.original"
