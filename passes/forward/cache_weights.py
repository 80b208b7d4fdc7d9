"""Casts of weights leave the graph: low copies of the weights come in as inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from amp_fx.graphs.facts import COPY_META, LOW_DTYPES, is_cast, storage_of, written_storages
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.plans.plan import dtype_name

__all__ = ["CacheWeights"]


@dataclass(frozen=True)
class CacheWeights(Pass):
    """Gives the graph an input more for every low dtype that a weight is cast to.

    The caller hands in the copies, and knows when they are out of date. The weight itself stays an input, for
    readers in fp32 and so that the signature only grows at its end. Weights that the graph writes to stay cast.

    Before::

        w_bf16 = torch.ops.aten.to.dtype(w, torch.bfloat16)             # w: f32, an input
        linear = torch.ops.aten.linear.default(x_bf16, w_bf16)

    After::

        w_bfloat16 = placeholder()                                      # bf16, after all others
        linear = torch.ops.aten.linear.default(x_bf16, w_bfloat16)
    """

    name: ClassVar[str] = "cache-weights"
    needs: ClassVar[frozenset[str]] = frozenset({"casts"})

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        if context.path:
            return PassResult(gm, 0, "a body has no weights of its own")
        written = {key for node in gm.graph.nodes for key in written_storages(node)}
        placeholders = gm.graph.find_nodes(op="placeholder")
        last, added = placeholders[-1] if placeholders else None, 0
        for weight in placeholders:
            if weight.name not in context.folded or storage_of(weight) in written:
                continue
            for cast in [user for user in weight.users if _is_narrowing(user)]:
                with gm.graph.inserting_after(last):
                    copy = gm.graph.placeholder(f"{weight.name}_{dtype_name(cast.meta['val'].dtype)}")
                value = cast.meta["val"]
                copy.meta = {"val": value, "example_value": value, COPY_META: weight.name}
                # where it lives does not change: what CUDA graphs want to know
                copy.meta["tensor_dict"] = {"_dynamo_static_input_type": "unguarded"}
                last, added = copy, added + 1
                cast.replace_all_uses_with(copy)
                gm.graph.erase_node(cast)
        return PassResult(gm, added, f"{added} low copies of weights are inputs")


def _is_narrowing(user: fx.Node) -> bool:
    return is_cast(user) and len(user.args) == 2 and not user.kwargs and user.meta["val"].dtype in LOW_DTYPES
