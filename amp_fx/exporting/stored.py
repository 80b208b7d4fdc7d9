"""The weights of a program: which there are, which are tied, and what is stored of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.export.graph_signature import InputKind, InputSpec

from amp_fx.errors import OptionsError
from amp_fx.graphs.keys import COPY_META, RECIPE_META
from amp_fx.graphs.values import is_eligible
from amp_fx.policy.levels import LEVELS
from amp_fx.weights.recipes import Scaled
from amp_fx.widened import identity

__all__ = ["Weight", "beyond_range", "scale_target", "store_low", "stored_weights", "tied"]

_WEIGHT_KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


@dataclass(frozen=True)
class Weight:
    """One input of the graph that is stored with the program."""

    name: str
    spec: InputSpec
    value: torch.Tensor

    def kept_as(self, value: torch.Tensor, *, requires_grad: bool = False) -> torch.Tensor:
        """Another value for it: a parameter if this is one."""
        is_parameter = isinstance(self.value, torch.nn.Parameter)
        return torch.nn.Parameter(value, requires_grad) if is_parameter else value


def scale_target(target: str, recipe: Scaled) -> str:
    """The name under which the factors of a weight below 16 bits are stored."""
    return f"{target}_{LEVELS[recipe.level].policy}_scale"


def stored_weights(ep: torch.export.ExportedProgram) -> list[Weight]:
    """Floating tensors that are stored with the program and that it does not write to."""
    signature = ep.graph_signature
    written = {*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values()}
    found = []
    for spec in signature.input_specs:
        if spec.kind not in _WEIGHT_KINDS or spec.target is None or spec.target in written:
            continue
        value = ep.state_dict.get(spec.target, ep.constants.get(spec.target))
        if is_eligible(value):
            found.append(Weight(spec.arg.name, spec, value))
    return found


def tied(weights: Iterable[Weight]) -> list[list[Weight]]:
    """The weights, those that are one tensor together."""
    groups: dict[tuple[Any, ...], list[Weight]] = {}
    for weight in weights:
        groups.setdefault(identity(weight.value), []).append(weight)
    return list(groups.values())


def beyond_range(weights: Iterable[Weight], low: torch.dtype) -> list[Weight]:
    """Weights with finite values that the low dtype cannot hold."""
    return [weight for weight in weights if bool(_overflows(weight.value.detach(), low).any())]


def _overflows(value: torch.Tensor, low: torch.dtype) -> torch.Tensor:
    """Where a finite value is infinite in the low dtype."""
    return value.isfinite() & value.to(low).isinf()


def store_low(
    gm: fx.GraphModule, groups: Iterable[Sequence[Weight]], when_beyond: str
) -> dict[str, dict[str, torch.Tensor]]:
    """What takes the place of weights, by their names in the state dict or among the constants.

    Below 16 bits, a weight's factors are beside it. The inputs of ``gm`` have the dtypes to store, in ``groups`` tied
    weights are together, ``when_beyond`` is the option ``weights_beyond_range``.

    Raises:
        OptionsError: values that the low dtype cannot hold.
    """
    inputs = {node.name: node for node in gm.graph.find_nodes(op="placeholder")}
    scaled = {
        node.meta[COPY_META] for node in inputs.values() if node.meta.get(RECIPE_META, (None, 0))[1] == 1
    }
    stored: dict[str, dict[str, torch.Tensor]] = {}
    refused: list[str] = []
    for group in groups:
        node, value = inputs[group[0].name], group[0].value.detach()
        if RECIPE_META in node.meta:
            recipe, _ = node.meta[RECIPE_META]
            data, factors = recipe.made(value)
            for weight in group:
                target = str(weight.spec.target)
                stored[target] = {target: weight.kept_as(data)}
                if weight.name in scaled:
                    stored[target][scale_target(target, recipe)] = weight.kept_as(factors)
            continue
        dtype = node.meta["val"].dtype
        if value.dtype is dtype:
            continue
        beyond = _overflows(value, dtype)
        low = value.to(dtype)
        if bool(beyond.any()):
            names = " = ".join(str(weight.spec.target) for weight in group)
            refused.append(f"{names} (largest magnitude {value[beyond].abs().max().item():g})")
            low = torch.where(beyond, value.sign().to(dtype) * torch.finfo(dtype).max, low)
        for weight in group:
            target = str(weight.spec.target)
            stored[target] = {target: weight.kept_as(low, requires_grad=weight.value.requires_grad)}
    if refused and when_beyond == "raise":
        raise OptionsError(
            f"weights beyond the range of the low dtype: {', '.join(refused)}. Use dtype='bfloat16', or say what to do "
            "with weights_beyond_range='clamp' or 'keep' (in fp32, with the ops that read them)."
        )
    return stored
