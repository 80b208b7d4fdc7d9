"""Whether a node of autograd's is the only one that hands gradients to its leaves, in the call that is going on.

Where two nodes do, autograd adds up theirs before it adds the sum to ``.grad``, so rounding depends on it. No node
knows those before it: the way there is from what is differentiated.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from amp_fx._torch import accumulated, graph_task

__all__ = ["Sharing"]

#: edges after which looking takes longer than what it is for
_FAR_ENOUGH = 20_000


@dataclass(frozen=True)
class _Graph:
    """What autograd was asked to go through. Holds none of it: after an error, nobody would let go of it.

    Attributes:
        task: number of the call.
        arrivals: id of a leaf -> number of edges that lead to it.
        is_known: False where the graph is too large to look at, or is another call's.
    """

    task: int
    arrivals: Mapping[int, int]
    is_known: bool


class Sharing:
    """Of all graphs: several nodes of one backward ask about the same graph."""

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
            graph = self._local.graph = _walk(roots, node)
        # the leaves of a node that runs are alive, so their ids are theirs
        return graph.is_known and all(graph.arrivals.get(id(leaf)) == 1 for leaf in leaves)


def _walk(roots: Sequence[Any], running: Any) -> _Graph:
    arrivals, edges = Counter[int](), 0
    # kept while others are looked at, so that no two have the same id
    seen, waiting = dict[int, Any](), list[Any]()
    for root in roots:
        start = root.grad_fn if isinstance(root, Tensor) else root.node
        if start is not None:
            waiting.append(start)
        else:
            arrivals[id(root)] += 1
    while waiting and edges <= _FAR_ENOUGH:
        node = waiting.pop()
        leaf = accumulated(node)
        if leaf is not None:
            arrivals[id(leaf)] += 1
        elif id(node) not in seen:
            seen[id(node)] = node
            following = [after for after, _ in node.next_functions if after is not None]
            edges += len(following)
            waiting += following
    # a node that cannot be reached from here runs in another call
    return _Graph(graph_task(), arrivals, not waiting and id(running) in seen)
