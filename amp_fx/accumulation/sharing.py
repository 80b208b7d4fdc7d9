"""Whether a node of autograd's is the only one that hands gradients to its leaves, in the call that is going on.

Where two nodes do, autograd adds up theirs before it adds the sum to ``.grad``, so rounding depends on it. No node
knows those before it: the way there is from what is differentiated.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from amp_fx._torch import accumulated, at_end_of_backward, graph_task

__all__ = ["Sharing"]

#: edges after which looking takes longer than what it is for
_FAR_ENOUGH = 20_000


@dataclass
class _Graph:
    """What autograd was asked to go through.

    Attributes:
        task: number of the call.
        nodes: all nodes but those of leaves, by id. Kept, so that no other node gets an id of theirs.
        arrivals: id of a leaf -> number of edges that lead to it.
        is_whole: False where the graph is larger than what was looked at.
    """

    task: int
    nodes: dict[int, Any] = field(default_factory=dict)
    arrivals: Counter[int] = field(default_factory=Counter)
    is_whole: bool = True


class Sharing:
    """Of all graphs, in all threads: several nodes of one backward ask about the same graph."""

    def __init__(self) -> None:
        self._local = threading.local()

    def is_alone(self, roots: Sequence[Any], node: Any, leaves: Sequence[Tensor]) -> bool:
        """True if nothing but the node hands gradients to these leaves.

        Args:
            roots: what is differentiated: tensors, or edges of the graph.
            node: which runs now.
            leaves: each reached by one edge of the node's.
        """
        graph: _Graph | None = getattr(self._local, "graph", None)
        if graph is None or graph.task != graph_task():
            graph = self._local.graph = _walk(roots)
            local = self._local
            at_end_of_backward(lambda: vars(local).clear())
        # a node that cannot be reached from here runs in another call
        return (
            graph.is_whole
            and id(node) in graph.nodes
            and all(graph.arrivals[id(leaf)] == 1 for leaf in leaves)
        )


def _walk(roots: Sequence[Any]) -> _Graph:
    graph = _Graph(graph_task())
    edges, waiting = 0, list[Any]()
    for root in roots:
        start = root.grad_fn if isinstance(root, Tensor) else root.node
        if start is not None:
            waiting.append(start)
        elif isinstance(root, Tensor):
            graph.arrivals[id(root)] += 1
    while waiting:
        node = waiting.pop()
        leaf = accumulated(node)
        if leaf is not None:
            graph.arrivals[id(leaf)] += 1
            continue
        if id(node) in graph.nodes:
            continue
        graph.nodes[id(node)] = node
        following = [after for after, _ in node.next_functions if after is not None]
        edges += len(following)
        if edges > _FAR_ENOUGH:
            graph.is_whole = False
            return graph
        waiting += following
    return graph
