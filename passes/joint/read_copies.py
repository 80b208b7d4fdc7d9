"""Matmuls read low copies of weights that come in as inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx._torch import joint_inputs
from amp_fx.graphs.facts import COPY_META, is_view
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.placement.layout import CAST

__all__ = ["ReadCopies"]

aten = torch.ops.aten

_READERS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})


@dataclass(frozen=True)
class ReadCopies(Pass):
    """Runs on Inductor's joint graph (forward and backward together), before all others.

    The low copy of a weight has the values that the cast would have, so the cast goes. The gradient's way back to the
    weight was made from the cast when the backward was traced, and stays: it is widened and returned for the weight.
    The copy is an input, so the backward reads it as it came in, and nobody may write to it meanwhile.

    Only matmuls read it, and values that are seen by matmuls only: what is computed in generated code need not round
    where the program casts.

    Before::

        w_16 = torch.ops.prims.convert_element_type.default(w, torch.bfloat16)
        mm = torch.ops.aten.mm.default(x, w_16)
        ...
        wide = torch.ops.prims.convert_element_type.default(grad_w, torch.float32)
        return [mm, wide, None]                                        # gradients of w and of its copy

    After::

        mm = torch.ops.aten.mm.default(x, copy)
        ...
        wide = torch.ops.prims.convert_element_type.default(grad_w, torch.float32)
        return [mm, wide, None]

    Attributes:
        copies: positions of weights and of their copies among the inputs of the graph that was compiled.
    """

    name: ClassVar[str] = "read-copies"

    copies: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, gm: fx.GraphModule) -> ReadCopies | None:
        """The pass for a graph that takes copies of its weights; None for others."""
        placeholders = gm.graph.find_nodes(op="placeholder")
        position = {node.name: at for at, node in enumerate(placeholders)}
        copies = [
            (position[node.meta[COPY_META]], position[node.name])
            for node in placeholders
            if COPY_META in node.meta
        ]
        return cls(tuple(copies)) if copies else None

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        inputs, read = joint_inputs(gm), 0
        for weight, copy in self.copies:
            if weight not in inputs or copy not in inputs:
                continue
            value = inputs[copy].meta["val"]
            for cast in [user for user in inputs[weight].users if user.target is CAST]:
                if cast.meta["val"].dtype is not value.dtype or not _is_read_by_matmuls(cast):
                    continue
                cast.replace_all_uses_with(inputs[copy])
                gm.graph.erase_node(cast)
                read += 1
        return PassResult(gm, read, f"{read} casts of weights are not made")


def _is_read_by_matmuls(node: fx.Node) -> bool:
    return all(
        user.target in _READERS or (is_view(user) and _is_read_by_matmuls(user)) for user in node.users
    )
