"""Read a low value itself where its widened copy is written only to be returned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx.graphs.fake_runs import is_matmul, run_fake
from amp_fx.graphs.values import LOW_DTYPES, storage_of
from amp_fx.passes.base import JOINT, Pass, PassContext
from amp_fx.placement.layout import CAST

__all__ = ["SeparateOutputs"]


@dataclass(frozen=True)
class SeparateOutputs(Pass):
    """Runs on Inductor's joint graph (forward and backward together).

    A value that is returned in fp32 has to be written in fp32. Whoever reads it in the graph would then read 4 bytes
    per element, and the backward keeps them: logits, which the program returns and its loss reads. Read from the low
    value, they are 2, and the cast is part of the reader's kernel. The values are the same.

    A matmul takes its operands from memory: it reads what is returned.

    Before::

        wide = torch.ops.prims.convert_element_type.default(logits, torch.float32)      # bf16 to f32
        sub = torch.ops.aten.sub.Tensor(wide, amax)
        return [wide, loss]

    After::

        wide = torch.ops.prims.convert_element_type.default(logits, torch.float32)      # within sub's kernel
        sub = torch.ops.aten.sub.Tensor(wide, amax)
        wide_1 = torch.ops.prims.convert_element_type.default(logits, torch.float32)
        return [wide_1, loss]
    """

    name: ClassVar[str] = "separate-outputs"
    needs: ClassVar[frozenset[str]] = frozenset({JOINT})

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        """See the class."""
        count = 0
        for cast in gm.graph.find_nodes(op="call_function", target=CAST):
            if not _widens_for_both(cast):
                continue
            from_memory = {user for user in cast.users if user.op == "output" or is_matmul(user)}
            if len(from_memory) == len(cast.users) or _is_returned_twice(cast):
                continue
            with gm.graph.inserting_after(cast):
                returned = gm.graph.node_copy(cast)
            # a memory of its own, by which AOTAutograd tells it from the other
            returned.meta["val"] = run_fake(returned)
            cast.replace_all_uses_with(returned, delete_user_cb=from_memory.__contains__)
            count += 1
        return f"{count} returned values have casts of their own"


def _widens_for_both(cast: fx.Node) -> bool:
    """True for a cast to fp32 of a low value that the graph returns and that something in it reads, too."""
    value, before = cast.meta["val"], cast.all_input_nodes[0].meta["val"]
    widens = value.dtype is torch.float32 and before.dtype in LOW_DTYPES
    return widens and len(cast.users) > 1 and any(user.op == "output" for user in cast.users)


def _is_returned_twice(cast: fx.Node) -> bool:
    """True if something else that is returned shares its memory."""
    others = cast.graph.output_node().all_input_nodes
    return any(other is not cast and storage_of(other) == storage_of(cast) for other in others)
