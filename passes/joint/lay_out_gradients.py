"""Gradients of convolutions' weights leave the backward in the layout of the weights."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx._torch import lays_out_convolutions
from amp_fx.passes.base import JOINT, Pass, PassContext
from amp_fx.placement.layout import CAST, lay_out, relaid_weight

__all__ = ["LayOutGradients"]

aten = torch.ops.aten


@dataclass(frozen=True)
class LayOutGradients(Pass):
    """Runs on Inductor's joint graph (forward and backward together), on CPU.

    A convolution's backward returns the gradient of its weight channels last. Widened as it lies, it has another
    layout than the parameter, and autograd copies it once more, element by element: 8 bytes moved per weight
    that this pass saves (``AccumulateGrad``, "Gradient Layout Contract").

    Before::

        backward = torch.ops.aten.convolution_backward.default(grad, x_16, w_16, ...)
        grad_w = backward[1]                                                             # bf16[O, I, 3, 3]
        wide = torch.ops.prims.convert_element_type.default(grad_w, torch.float32)

    After::

        wide = torch.ops.amp_fx.convert.default(grad_w, torch.float32, [I * 9, 9, 3, 1])
    """

    name: ClassVar[str] = "lay-out-gradients"
    needs: ClassVar[frozenset[str]] = frozenset({JOINT})

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        """See the class."""
        if not lays_out_convolutions():
            return "Inductor keeps the layout of convolutions"
        changed = 0
        for backward in gm.graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
            weight = relaid_weight(backward.args[2])
            if weight is None:
                continue
            for cast in _widened(backward):
                lay_out(cast, weight.meta["val"].stride())
                changed += 1
        return f"{changed} gradients are laid out as their weights"


def _widened(backward: fx.Node) -> list[fx.Node]:
    """Casts of the weight's gradient to fp32."""
    return [
        cast
        for result in backward.users
        if result.target is operator.getitem and result.args[1] == 1
        for cast in result.users
        if cast.target is CAST and cast.meta["val"].dtype is torch.float32
    ]
