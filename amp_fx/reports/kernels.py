"""Which kernels of a lowered graph exist only because of mixed precision."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch.fx as fx
from torch import Tensor

from amp_fx._torch import Lowered
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import cast_bytes, is_eligible
from amp_fx.placement.layout import is_convert

__all__ = ["calls", "cast_kernels", "conversion", "conversions", "is_move"]


#: what a kernel may do beside converting and still be a cast
_MOVES = Trait.MOVES, Trait.RESHAPES, Trait.UNCHANGED


def conversion(node: fx.Node) -> tuple[Tensor, Tensor] | None:
    """The fake values before and after, if the node turns one floating dtype into another."""
    if not has_trait(node, Trait.CAST):
        return None
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if is_eligible(before) and is_eligible(after) and before.dtype is not after.dtype:
        return before, after
    return None


def conversions(gm: fx.GraphModule) -> Iterator[tuple[Tensor, Tensor]]:
    """Every conversion in a graph, bodies of higher-order ops included."""
    for node in calls(gm):
        if (values := conversion(node)) is not None:
            yield values


def is_move(node: fx.Node) -> bool:
    """True for what hands on the values of its only tensor in another order or shape."""
    return has_trait(node, *_MOVES) and len(node.all_input_nodes) == 1


def cast_kernels(lowered: Lowered) -> list[tuple[frozenset[fx.Node], int]]:
    """Kernels that convert and move values and compute nothing: the conversions in each, and the bytes it moves."""
    generated = [
        (frozenset(node for node in origins if has_trait(node, Trait.CAST)), size)
        for origins, size in lowered.generated
        if _only_casts(origins)
    ]
    called = [
        (frozenset({node}), cast_bytes(values[0], values[1].dtype))
        for node in calls(lowered.after)
        if is_convert(node) and (values := conversion(node)) is not None
    ]
    return generated + called


def calls(gm: fx.GraphModule) -> Iterator[fx.Node]:
    """The calls of a graph, bodies of higher-order ops included."""
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def _only_casts(origins: Collection[fx.Node]) -> bool:
    targets = {node.target for node in origins if node.op == "call_function"}
    return any(has_trait(target, Trait.CAST) for target in targets) and all(
        has_trait(target, Trait.CAST, *_MOVES) for target in targets
    )
