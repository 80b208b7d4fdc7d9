"""Parameters that a module holds low and reads in fp32, as :func:`amp_fx.store_low` leaves them.

Eager code computes with the widened values. In a graph, widening is all that happens to such an input: what is narrowed
again, or scaled again, reads the parameter as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn
from torch.nn.utils import parametrize

from amp_fx.errors import WeightsError
from amp_fx.graphs.calls import class_name
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.precision.policy.forms import ScaledRows


class Widened(nn.Module):
    """A parametrization: the module holds a parameter low and reads it in fp32."""

    def forward(self, stored: Tensor) -> Tensor:
        """The values in fp32."""
        wide = stored.to(torch.float32)
        # fp32 values that took the place of what was stored are read as they are, and may be trained
        if wide is not stored and wide.requires_grad and not torch.compiler.is_compiling():
            wide.register_hook(_refuse)
        return wide


class Unscaled(nn.Module):
    """A parametrization of two tensors: the module holds a matrix below 16 bits with its factors, and reads it in fp32.

    Args:
        made: what is held of a matrix: data (columns, contracted) and factors (columns, 1).
        scale: what follows the matrix's name in that of its factors.
    """

    def __init__(self, made: ScaledRows, scale: str) -> None:
        super().__init__()
        self.made, self.scale = made, scale
        self._powers = [2.0**-each for each in made.equalisation]

    def forward(self, data: Tensor, factors: Tensor) -> Tensor:
        """The values in fp32."""
        rows = data.to(torch.float32) * factors
        if self._powers:
            # Dynamo traces no function of amp_fx
            rows = rows * torch.tensor(self._powers, dtype=torch.float32, device=rows.device)
        return rows if self.made.in_rows else rows.t()

    def right_inverse(self, matrix: Tensor) -> tuple[Tensor, Tensor]:
        """The tensor that the module holds."""
        return self.made(matrix)


#: equal for tied weights
Identity = tuple[Any, ...]


def identity(value: Tensor) -> Identity:
    """Equal for tied weights."""
    storage = value.untyped_storage()._cdata
    return storage, value.storage_offset(), tuple(value.shape), value.stride(), value.dtype


def replace_parameter(module: nn.Module, name: str, low: nn.Parameter) -> None:
    """Puts a low parameter in the place of a module's own in fp32; ``state_dict`` has it under the name it had."""
    module.register_parameter(name, low)
    # it changes the dtype, which torch calls unsafe
    parametrize.register_parametrization(module, name, Widened(), unsafe=True)
    _keep_names(module, {name: f"parametrizations.{name}.original"})


def replace_by_pair(module: nn.Module, name: str, held: Unscaled, like: nn.Module | None = None) -> nn.Module:
    """Puts a matrix below 16 bits and its factors in the place of a module's own parameter in fp32.

    Returns what holds the pair; ``like`` is that of a parameter that is tied to this one.
    """
    # integers have no gradients
    module.register_parameter(name, nn.Parameter(module.get_parameter(name).detach(), requires_grad=False))
    parametrize.register_parametrization(module, name, held, unsafe=True)
    pair = module.get_submodule(f"parametrizations.{name}")
    parts = ("original0", "original1")
    if like is not None:
        for part in parts:
            pair.register_parameter(part, like.get_parameter(part))
    names = zip((name, f"{name}{held.scale}"), parts, strict=True)
    _keep_names(module, {own: f"parametrizations.{name}.{part}" for own, part in names}, held)
    return pair


def widenings(gm: fx.GraphModule) -> list[fx.Node]:
    """The calls that :class:`Widened` and :class:`Unscaled` have put into a graph, captured or of Dynamo's."""
    calls = ("call_function", "call_method")
    return [node for node in gm.graph.nodes if node.op in calls and _is_widening(node)]


def held_pair(node: fx.Node, equalisation: tuple[int, ...]) -> tuple[fx.Node, fx.Node] | None:
    """The matrix below 16 bits and the factors that a node of a captured graph is the product of, or None.

    They are equalised by these exponents, or the node is no such product.
    """
    if node.target is not torch.ops.aten.mul.Tensor or not _is_widening(node):
        return None
    wide, factors = node.all_input_nodes
    powers = factors.args[0] if factors.target is torch.tensor else []
    if powers != [2.0**-each for each in equalisation]:
        return None
    if powers:
        wide, factors = wide.all_input_nodes
    return wide.all_input_nodes[0], factors


def refuse_training(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raises :class:`WeightsError` where Dynamo's graph will be differentiated by parameters that are stored low."""
    for node, value in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        # what cannot have gradients had them before
        asks = isinstance(value, nn.Parameter) and (value.requires_grad or value.dtype not in LOW_DTYPES)
        # fp32 values may have taken the place of those in 16 bits; factors are in fp32
        kinds = (Unscaled,) if asks and value.dtype is torch.float32 else (Widened, Unscaled)
        if asks and any(_is_widening(user, kinds) for user in node.users):
            _refuse()


def _is_widening(node: fx.Node, kinds: tuple[type, ...] = (Widened, Unscaled)) -> bool:
    """True for what :class:`Widened` and :class:`Unscaled` compute, or one of them."""
    modules = list(node.meta.get("nn_module_stack", {}).values())
    return bool(modules) and class_name(modules[-1][1]) in map(class_name, kinds)


def _refuse(_gradient: Tensor | None = None) -> None:
    raise WeightsError(
        "a gradient is asked for of weights that amp_fx.store_low has stored low; their fp32 values are gone. Call "
        "the model under torch.inference_mode() or torch.no_grad(); to train, load fp32 weights into a new model."
    )


def _keep_names(module: nn.Module, names: Mapping[str, str], held: Unscaled | None = None) -> None:
    """A ``state_dict`` has names of its own for what torch has parametrized: ``names`` there -> in the module.

    ``held`` makes what is held of a matrix in 16 or 32 bits that is loaded.
    """

    def saved(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for own, inner in names.items():
            state[f"{prefix}{own}"] = state.pop(f"{prefix}{inner}")

    def loaded(_module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        given = state.get(f"{prefix}{next(iter(names))}")
        if held is not None and given is not None and given.dtype.itemsize > 1:
            state.update(zip((f"{prefix}{own}" for own in names), held.right_inverse(given), strict=True))
        for own, inner in names.items():
            if f"{prefix}{own}" in state:
                state[f"{prefix}{inner}"] = state.pop(f"{prefix}{own}")

    module.register_state_dict_post_hook(saved)
    module.register_load_state_dict_pre_hook(loaded)
