"""Inputs of a graph: whether they want gradients, and which have dtypes that mixed precision does not mean.

Kernels refuse fp64 and integers beside weights in fp32, and their messages name dtypes that the program does not have.
Weights in the other 16-bit dtype have been rounded once already.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.fx as fx
from torch import nn

from amp_fx.errors import InputError
from amp_fx.graphs.calls import where
from amp_fx.graphs.traits import linear_form
from amp_fx.graphs.values import LOW_DTYPES, PLACED_DTYPES, is_eligible

#: names of Dynamo's inputs: L_x_, L_kwargs_ids_
_PLACEHOLDER = re.compile(r"l_(?:kwargs_)?(\w+?)_?$", re.IGNORECASE)


def differentiates(inputs: Iterable[Any]) -> bool:
    """Whether a graph will be differentiated that is called so with such values; fake ones do not say it."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs if isinstance(x, torch.Tensor))


def refuse_inputs(gm: fx.GraphModule) -> None:
    """Raises InputError where a product of a captured graph has an input in fp64 or in integers beside its weight.

    The message names the input, its dtype and the weight's. Weights in other dtypes than fp32, bf16 and fp16 are a
    program's own business.
    """
    for node in gm.graph.nodes:
        if (form := linear_form(node)) is None:
            continue
        operands: list[Any] = [node.args[form.input], node.args[form.weight]]
        value, weight = (operand.meta["val"] for operand in operands)
        is_other = isinstance(value, torch.Tensor) and value.dtype not in PLACED_DTYPES
        if is_other and is_eligible(weight) and (given := _source_of(operands[0], value.dtype)):
            wanted = str(weight.dtype).removeprefix("torch.")
            raise InputError(
                f"input {given!r} has dtype {value.dtype}, and is multiplied by {weight.dtype} at "
                f"{where(node)}; no kernel takes both. Call the model with {given}.to(torch.{wanted})."
            )


def _source_of(node: fx.Node, dtype: torch.dtype) -> str:
    """The name of an input of this dtype that a value is computed from; empty if there is none."""
    seen, waiting = set[fx.Node](), [node]
    while waiting:
        here = waiting.pop()
        value = here.meta.get("val")
        if here in seen or not isinstance(value, torch.Tensor) or value.dtype is not dtype:
            continue
        seen.add(here)
        if here.op == "placeholder":
            found = _PLACEHOLDER.match(here.name)
            return found[1] if found else here.name
        waiting.extend(here.all_input_nodes)
    return ""


def weights_rounded(values: object, low: torch.dtype) -> dict[torch.dtype, int]:
    """How many parameters among a graph's inputs are in a 16-bit dtype other than ``low``, by dtype."""
    found: dict[torch.dtype, int] = {}
    for value in values if isinstance(values, (list, tuple)) else ():
        if isinstance(value, nn.Parameter) and value.dtype in LOW_DTYPES and value.dtype is not low:
            found[value.dtype] = found.get(value.dtype, 0) + 1
    return found
