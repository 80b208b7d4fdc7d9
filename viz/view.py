"""What is visible of a graph with some of its modules open. The HTML page works it out in the same way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from amp_fx.viz.schema import Cast, Edge, Graph

__all__ = ["DEPTH", "Box", "View", "casts_inside", "content", "view"]

#: modules deeper than this are closed at first
DEPTH = 2

#: ``("node", 3)`` or ``("group", 1)``
Box = tuple[Literal["node", "group"], int]


@dataclass
class View:
    """What is visible of one graph.

    Attributes:
        nodes: positions of visible nodes.
        closed: positions of visible closed groups.
        open: open groups that have something visible in them.
        edges: both ends -> casts on it by name.
    """

    nodes: list[int] = field(default_factory=list)
    closed: list[int] = field(default_factory=list)
    open: list[int] = field(default_factory=list)
    edges: dict[tuple[Box, Box], dict[str, Cast]] = field(default_factory=dict)


def view(graph: Graph, depth: int = DEPTH) -> View:
    """What a graph shows with its modules open down to ``depth`` and equal groups folded."""
    found = View()
    boxes = [_box(graph, index, depth) for index in range(len(graph["nodes"]))]
    opened: set[int] = set()
    for kind, index in dict.fromkeys(boxes):
        (found.nodes if kind == "node" else found.closed).append(index)
        parent = graph["nodes"][index]["group"] if kind == "node" else graph["groups"][index]["parent"]
        while parent is not None:
            opened.add(parent)
            parent = graph["groups"][parent]["parent"]
    found.open = sorted(opened)
    for edge in graph["edges"]:
        ends = boxes[edge["tail"]], boxes[edge["head"]]
        if ends[0] != ends[1] and not _is_repeated(graph, edge):
            casts = found.edges.setdefault(ends, {})
            casts.update((cast["name"], cast) for cast in edge["casts"])
    return found


def _box(graph: Graph, node: int, depth: int) -> Box:
    """The box that stands for a node: itself, or the outermost closed group around it."""
    groups = graph["groups"]
    while True:
        for group in _path(graph, graph["nodes"][node]["group"]):
            row = groups[group]
            if row["fold"] is not None and row["fold"] != group:
                # drawn as its place in the first of the equal groups
                node = groups[row["fold"]]["leaves"][row["leaves"].index(node)]
                break
            if row["depth"] and (row["depth"] >= depth or row["run"]):
                return "group", group
        else:
            return "node", node


def _is_repeated(graph: Graph, edge: Edge) -> bool:
    """True where the drawn one of several equal groups tells enough.

    Inside another of them the edge is drawn already; from one to another it would lead back, and is drawn only
    for its casts.
    """
    groups = graph["groups"]
    ends = [_path(graph, graph["nodes"][edge[end]]["group"]) for end in ("tail", "head")]
    for ours, theirs in zip(*ends, strict=False):
        fold = groups[ours]["fold"]
        if fold is not None and ours == theirs != fold:
            return True
        if fold is not None and ours != theirs and fold == groups[theirs]["fold"]:
            return not edge["casts"]
    return False


def _path(graph: Graph, group: int | None) -> list[int]:
    """The groups around a group, outermost first, itself last."""
    path: list[int] = []
    while group is not None:
        path.insert(0, group)
        group = graph["groups"][group]["parent"]
    return path


def casts_inside(graph: Graph, group: int) -> list[Cast]:
    """The casts that have both ends in a group."""
    leaves = set(graph["groups"][group]["leaves"])
    found = {
        cast["name"]: cast
        for edge in graph["edges"]
        if edge["tail"] in leaves and edge["head"] in leaves
        for cast in edge["casts"]
        if cast["mark"] != "removed"
    }
    return list(found.values())


def content(graph: Graph, leaves: Iterable[int]) -> Counter[str]:
    """Calls by dtype among some nodes."""
    rows = (graph["nodes"][leaf] for leaf in leaves)
    return Counter(row["dtype"] for row in rows if row["kind"] == "call" and row["dtype"])
