"""Casts of weights leave the graph: low copies of the weights come in as inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch.fx as fx

from amp_fx.graphs.calls import is_cast, is_returned
from amp_fx.graphs.keys import COPY_META, PART, RECIPE_META
from amp_fx.graphs.values import LOW_DTYPES, storage_of, written_storages
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.levels.quantise_matmuls import Part, erase_unread
from amp_fx.plans.plan import dtype_name
from amp_fx.policy.levels import LEVELS
from amp_fx.weights.recipes import Cast, CopyRecipe

__all__ = ["CacheWeights"]


@dataclass(frozen=True)
class CacheWeights(Pass):
    """Gives the graph an input more for every copy that it makes of a weight.

    The caller hands in the copies, and knows when they are out of date. The weight itself stays an input, for
    readers in fp32 and so that the signature only grows at its end. Weights that the graph writes to stay as they
    are, and so do copies that it returns, as the caller may keep those.

    1. casts to a low dtype.
    2. copies with scales, and their factors (:class:`QuantiseMatmuls`).

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
            return PassResult(0, "a body has no weights of its own")
        written = {key for node in gm.graph.nodes for key in written_storages(node)}
        inputs = _Inputs(gm.graph)
        parts: dict[fx.Node, list[tuple[fx.Node, Part]]] = {}
        for node in gm.graph.nodes:
            if (part := PART.of(node)) is not None:
                parts.setdefault(part.source, []).append((node, part))
        for weight in gm.graph.find_nodes(op="placeholder"):
            if weight.name not in context.folded or storage_of(weight) in written:
                continue
            for cast in [
                user for user in weight.users if _is_narrowing(user) and not is_returned(user)
            ]:  # case 1
                dtype = cast.meta["val"].dtype
                inputs.take(cast, weight, Cast(dtype), 0, dtype_name(dtype))
            for node, part in parts.get(weight, ()):  # case 2
                policy = LEVELS[part.recipe.level].policy
                inputs.take(node, weight, part.recipe, part.index, (policy, f"{policy}_scale")[part.index])
        if parts:
            erase_unread(gm.graph)
        return PassResult(inputs.count, f"{inputs.count} low copies of weights are inputs")


class _Inputs:
    """Adds inputs to a graph, after all others."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        placeholders = graph.find_nodes(op="placeholder")
        self._last = placeholders[-1] if placeholders else None
        self.count = 0

    def take(self, made: fx.Node, weight: fx.Node, recipe: CopyRecipe, part: int, suffix: str) -> None:
        """What the graph has made of a weight becomes an input."""
        with self._graph.inserting_after(self._last):
            copy = self._graph.placeholder(f"{weight.name}_{suffix}")
        value = made.meta["val"]
        copy.meta = {
            "val": value,
            "example_value": value,
            COPY_META: weight.name,
            RECIPE_META: (recipe, part),
            # where it lives does not change: what CUDA graphs want to know
            "tensor_dict": {"_dynamo_static_input_type": "unguarded"},
        }
        made.replace_all_uses_with(copy)
        self._graph.erase_node(made)
        self._last, self.count = copy, self.count + 1


def _is_narrowing(user: fx.Node) -> bool:
    return is_cast(user) and len(user.args) == 2 and not user.kwargs and user.meta["val"].dtype in LOW_DTYPES
