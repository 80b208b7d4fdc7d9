"""Remove conversions that do nothing."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx.graphs.calls import differentiated, grad_modes, is_cast
from amp_fx.graphs.keys import CAST_META
from amp_fx.graphs.values import is_eligible, storage_of, storages_written_in
from amp_fx.passes.base import Pass, PassContext

__all__ = ["FuseCasts"]


@dataclass(frozen=True)
class FuseCasts(Pass):
    """Fuses casts. Only pass-inserted casts are removed; a user's narrowing cast is a rounding and stays.

    Cases:

    1. round trip: an inserted narrowing of a widened value of the same dtype is the value itself.
    2. an inserted cast to the dtype its input already has is its input.
    3. siblings: an inserted cast equal to an earlier cast of the same value reuses it.
    4. an inserted cast nobody reads goes.

    No case applies to a storage that anything in the graph writes to, to a value that the graph takes gradients by,
    nor between code with gradients and code without.

    Before::

        wide = torch.ops.aten.to.dtype(x_bf16, torch.float32)       # the program's .float()
        low = torch.ops.aten.to.dtype(wide, torch.bfloat16)         # inserted
        mm = torch.ops.aten.matmul.default(low, w)

    After::

        mm = torch.ops.aten.matmul.default(x_bf16, w)
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        fusible = self._fusible_casts(gm.graph)
        modes = grad_modes(gm.graph)
        seen: dict[tuple[fx.Node, torch.dtype, bool], fx.Node] = {}
        removed = 0
        for node in list(gm.graph.nodes):
            if node not in fusible:
                continue
            source, dtype = node.all_input_nodes[0], node.meta["val"].dtype
            key = (source, dtype, modes[node])
            replacement = None
            if CAST_META in node.meta:
                here = {cast for cast in fusible if modes[cast] is modes[node]}
                replacement = _round_trip(source, dtype, here) or seen.get(key)  # cases 1 to 3
            if replacement is None:
                seen.setdefault(key, node)
                continue
            node.replace_all_uses_with(replacement)
            gm.graph.erase_node(node)
            removed += 1
        for node in reversed(list(gm.graph.nodes)):  # case 4
            if CAST_META in node.meta and not node.users:
                gm.graph.erase_node(node)
                removed += 1
        return f"{removed} casts removed"

    def _fusible_casts(self, graph: fx.Graph) -> set[fx.Node]:
        """Casts between placed dtypes, of storages that nobody writes to.

        The cast that a gradient is taken by stays, and so does what leads from it to the loss.
        """
        written = storages_written_in(graph)
        fixed = differentiated(graph)
        return {
            node
            for node in graph.nodes
            if is_cast(node)
            and node not in fixed
            and all(is_eligible(n.meta.get("val")) for n in (node, node.all_input_nodes[0]))
            and not {storage_of(node), storage_of(node.all_input_nodes[0])} & written
        }


def _round_trip(source: fx.Node, dtype: torch.dtype, casts: set[fx.Node]) -> fx.Node | None:
    """The value that ``to(source, dtype)`` equals bit for bit, looking through ``casts``; or None."""
    value = source
    while value.meta["val"].dtype is not dtype:
        if value not in casts:
            return None
        inner = value.all_input_nodes[0]
        before, after = inner.meta["val"].dtype, value.meta["val"].dtype
        if before is not after and before.itemsize >= after.itemsize:
            return None  # narrowed: information is gone
        value = inner
    return value
