"""Writes in place, for a run that hooks observe: each makes a new value where nobody can tell the difference.

autograd drops the hooks of a view whose base is written to, so that the sensitivity of what was there before would be
found to be nothing. Before and after, for a graph:

    y = linear(x)         y = linear(x)
    y.add_(shortcut)      z = y.clone().add_(shortcut)
    return relu(y)        return relu(z)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch.utils._pytree import tree_map

from amp_fx.graphs.values import in_place_target, storage_of, tensors, writers_in


def writes_apart(graph: fx.Graph) -> Mapping[fx.Node, Sequence[fx.Node]]:
    """Writes in place that may make a new value -> the nodes that name the value before.

    That is where every write is to the value as a whole, and no view that is made before a write is read after it. An
    input is written to in the end; no view of it may be returned.
    """
    order = {node: position for position, node in enumerate(graph.nodes)}
    named = defaultdict[int | None, list[fx.Node]](list)
    for node in graph.nodes:
        named[storage_of(node)].append(node)
    found: dict[fx.Node, Sequence[fx.Node]] = {}
    for key, writers in writers_in(graph).items():
        names = _names(named[key], writers)
        views = [node for node in named[key] if node not in names]
        is_given = bool(names) and names[0].op == "placeholder"
        if names and not any(_is_read_over(view, writers, order, is_given=is_given) for view in views):
            found |= {writer: names[: names.index(writer)] for writer in writers}
    return found


def _names(nodes: Sequence[fx.Node], writers: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that name one value, in order, the first of which makes it; none where a part of it is written to."""
    if (
        not nodes
        or nodes[0].op not in ("call_function", "placeholder")
        or in_place_target(nodes[0]) is not None
    ):
        return []
    names = [nodes[0]]
    for writer in writers:
        if in_place_target(writer) not in names or storage_of(writer) != storage_of(nodes[0]):
            return []
        names.append(writer)
    return names


def _is_read_over(
    view: fx.Node, writers: Sequence[fx.Node], order: Mapping[fx.Node, int], *, is_given: bool
) -> bool:
    """True where a write happens between a view and one of its readers, or a view of an input is returned."""
    if view.op == "placeholder" or (is_given and any(reader.op == "output" for reader in view.users)):
        return True
    last = max((order[reader] for reader in view.users), default=0)
    return any(order[view] < order[writer] < last for writer in writers)


def apart_from(given: Sequence[Any], returned: Any) -> Any:
    """What a graph returns; values that have gradients, and share memory with nothing else, are new ones.

    Graphs that follow, or code between graphs, may write to them.
    """
    shared = Counter(map(_storage, tensors(returned)))
    taken = set(map(_storage, tensors(given)))

    def own(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.requires_grad or value.is_leaf:
            return value
        is_own = shared[_storage(value)] == 1 and _storage(value) not in taken
        return value.clone() if is_own else value.view_as(value)

    return tree_map(own, returned)


def _storage(value: Tensor) -> int:
    # a sparse tensor has none, and shares memory with no other
    return value.untyped_storage()._cdata if value.layout is torch.strided else id(value)
