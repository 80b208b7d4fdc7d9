"""Casts in forward, backward and inference graphs: how they are laid out, and where they are written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx._torch import lays_out_convolutions, write_as_it_is
from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.passes.base import PARTITIONED, Pass, PassContext
from amp_fx.placement.layout import CAST, channels_last_strides, lay_out, relaid_weight

__all__ = ["LayOutWeights", "WriteCasts"]

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


@dataclass(frozen=True)
class WriteCasts(Pass):
    """Runs on Inductor's graphs after partitioning, on CUDA.

    Inductor computes a view inside of what it reads: the cast below has loops over [8192, 768], and what it reads is
    written in loops over [8, 1024, 768]. Its last round of fusion compares such loops merged, but not for a kernel that
    reduces rows and columns at once, as the backward of a norm does on a GPU
    (``FusedMixOrderReductions.sub_node_can_fuse`` asks without ``can_reorder``; torch 2.11 to 2.14). The cast is then a
    kernel of its own, and reads 4 bytes per element that were in a register one kernel before. Written before it is
    viewed, it is part of that kernel. Graph and values stay; the node is marked. Cases:

    1. a matmul reads the cast through views, and something else reads its source, which is written anyway: the
       gradient on a residual stream.
    2. each element is copied several times, as heads of keys are: loops over the copies fuse with nothing before them,
       so that the source would be written in fp32, and read and converted once per copy.

    Before::

        add = torch.ops.aten.add.Tensor(residual, grad)                                   # f32[8, 1024, 768]
        low = torch.ops.prims.convert_element_type.default(add, torch.bfloat16)           # bf16[8, 1024, 768]
        rows = torch.ops.aten.view.default(low, [8192, 768])                              # what Inductor writes
        mm = torch.ops.aten.mm.default(rows, w)
        more = torch.ops.aten.mul.Tensor(add, ...)

    After::

        low = torch.ops.prims.convert_element_type.default(add, torch.bfloat16)           # what Inductor writes
        rows = torch.ops.aten.view.default(low, [8192, 768])
    """

    name: ClassVar[str] = "write-casts"
    needs: ClassVar[frozenset[str]] = frozenset({PARTITIONED})

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        """See the class."""
        casts = [
            cast
            for cast in gm.graph.find_nodes(op="call_function", target=CAST)
            if _narrows(cast) and (_is_multiplied_through_views(cast) or _is_repeated(cast))
        ]
        for cast in casts:
            write_as_it_is(cast)
        return f"{len(casts)} casts are written where they are made"


def _narrows(cast: fx.Node) -> bool:
    """True for a cast to 16 bits of what the graph computes."""
    source = cast.all_input_nodes[0]
    while has_trait(source, Trait.RESHAPES):
        source = source.all_input_nodes[0]
    return cast.meta["val"].dtype in LOW_DTYPES and source.op == "call_function"


def _is_multiplied_through_views(cast: fx.Node) -> bool:
    """Case 1."""
    source = cast.all_input_nodes[0]
    if has_trait(source, Trait.RESHAPES) or len(source.users) == 1 or not cast.meta["val"].is_contiguous():
        return False
    if not all(has_trait(user, Trait.RESHAPES) for user in cast.users):
        return False
    views = list(cast.users)
    for view in views:
        views += [user for user in view.users if has_trait(user, Trait.RESHAPES)]
    return any(is_matmul(user) for view in views for user in view.users)


def _is_repeated(cast: fx.Node) -> bool:
    """Case 2."""
    return all(
        user.target is aten.expand.default and all(copy.target is aten.clone.default for copy in user.users)
        for user in cast.users
    )
