"""Write down the dtypes that the program only implies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import is_eligible
from amp_fx.passes.base import Pass, PassContext, PassResult

__all__ = ["PinDtypes"]

aten = torch.ops.aten


@dataclass(frozen=True)
class PinDtypes(Pass):
    """Makes every creation and conversion name its dtype.

    Once values are re-typed, ``zeros_like(x)`` and ``y.type_as(x)`` would follow ``x``; the program meant the
    dtype it was traced with. Cases:

    1. ``zeros_like(x)`` and its kin get ``dtype=``.
    2. ``type_as`` and the other spellings of a pure conversion become ``aten.to.dtype``.

    Before::

        zeros = torch.ops.aten.zeros_like.default(x)                    # f32
        as_x = torch.ops.aten.type_as.default(y, x)                     # f32

    After::

        zeros = torch.ops.aten.zeros_like.default(x, dtype=torch.float32)
        as_x = torch.ops.aten.to.dtype(y, torch.float32)
    """

    name: ClassVar[str] = "pin-dtypes"
    ensures: ClassVar[frozenset[str]] = frozenset({"explicit-dtypes"})

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        pinned = 0
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            if not is_eligible(value):
                continue
            if has_trait(node, Trait.IMPLIED_DTYPE) and node.kwargs.get("dtype") is None:  # case 1
                node.kwargs = {**node.kwargs, "dtype": value.dtype}
                pinned += 1
            elif has_trait(node, Trait.IMPLIED_CAST):  # case 2
                node.target = aten.to.dtype
                node.args, node.kwargs = (node.args[0], value.dtype), {}
                pinned += 1
        return PassResult(pinned, f"{pinned} implied dtypes written down")
