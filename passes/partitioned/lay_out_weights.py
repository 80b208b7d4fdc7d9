"""Weights of convolutions are cast and laid out channels last in one library call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx._torch import lays_out_convolutions
from amp_fx.passes.base import PARTITIONED, Pass, PassContext
from amp_fx.placement.layout import channels_last_strides, lay_out, relaid_weight

__all__ = ["LayOutWeights"]

aten = torch.ops.aten


@dataclass(frozen=True)
class LayOutWeights(Pass):
    """Runs on Inductor's graphs after partitioning, on CPU.

    Backward graphs included: one that recomputes activations has convolutions, too.

    Inductor runs convolutions channels last and lays out their weights for that in every call. What it compiles for
    a cast that also changes the layout takes longer than the library's copies. It has to run after Inductor has
    noted the strides of what the graph returns, as a convolution whose weight is laid out returns channels last.
    Inputs of the graph only; what the graph computes is written in any layout as it is computed.

    Before::

        w_16 = torch.ops.prims.convert_element_type.default(w, torch.bfloat16)           # bf16[O, I, 3, 3]
        conv = torch.ops.aten.convolution.default(x_16, w_16, ...)

    After::

        w_16 = torch.ops.amp_fx.convert.default(w, torch.bfloat16, [I * 9, 1, I * 3, I])
        conv = torch.ops.aten.convolution.default(x_16, w_16, ...)
    """

    name: ClassVar[str] = "lay-out-weights"
    needs: ClassVar[frozenset[str]] = frozenset({PARTITIONED})

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        """See the class."""
        if not lays_out_convolutions():
            return "Inductor keeps the layout of convolutions"
        casts = [node for node in gm.graph.nodes if _is_weight_cast(node)]
        for cast in casts:
            lay_out(cast, channels_last_strides(cast.meta["val"].shape))
        return f"{len(casts)} weights of convolutions are laid out by the library"


def _is_weight_cast(node: fx.Node) -> bool:
    """A cast to 16 bits of an input that convolutions multiply with."""
    return relaid_weight(node) is not None and any(
        user.target is aten.convolution.default and user.args[1] is node for user in node.users
    )
