"""Groups of a drawn graph: modules, boxes for what says little, and folds of equal blocks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from amp_fx.policy import OpClass
from amp_fx.viz.schema import Edge, Group, Node

__all__ = ["add_group", "complete", "levels"]

#: a group with more direct members is cut into runs, so that no picture has thousands of boxes
_MANY = 150
_RUN = 50

#: so many calls without a floating dtype in one module are drawn as one box
_OUTSIDE = 4

#: classes of calls that a module is named after
_LISTED = {OpClass.LOW.value, OpClass.FP32.value, "user"}

#: a module, with its place if it is in a list
_LEVEL = re.compile(r"[^.]*[^.\d][^.]*(?:\.\d+(?=\.|$))?|\d+")

#: a module's place in a list: ``layers.0``
_INDEX = re.compile(r"(?<![^.])\d+$")


def add_group(groups: list[Group], label: str, parent: int | None, *, run: bool) -> int:
    """Appends an empty group; returns its position."""
    groups.append(
        Group(
            label=label,
            title=label,
            parent=parent,
            depth=0 if parent is None else groups[parent]["depth"] + 1,
            run=run,
            leaves=[],
            fold=None,
            times=1,
            main=None,
        )
    )
    return len(groups) - 1


def complete(nodes: Sequence[Node], edges: Sequence[Edge], groups: list[Group]) -> None:
    """Fills in what groups say once all nodes are there, and puts nodes that say little into boxes."""
    for group, members in enumerate(_members(nodes, groups)):
        outside = [node for node in members if node["kind"] == "call" and not node["dtype"]]
        if len(outside) >= _OUTSIDE:
            _move(outside, groups, group, f"{len(outside)} integer and boolean ops")
    for group, members in enumerate(_members(nodes, groups)):
        if len(members) > _MANY:
            size = max(_RUN, -(-len(members) // _MANY))
            for start in range(0, len(members), size):
                part = members[start : start + size]
                _move(part, groups, group, f"nodes {start + 1} to {start + len(part)}")
    for index, node in enumerate(nodes):
        for group in _around(node["group"], groups):
            groups[group]["leaves"].append(index)
    for group in groups:
        listed = [
            leaf for leaf in group["leaves"] if nodes[leaf]["flops"] or nodes[leaf]["op_class"] in _LISTED
        ]
        group["main"] = listed[0] if len(listed) == 1 else None
    _fold(nodes, edges, groups)


def _members(nodes: Sequence[Node], groups: Sequence[Group]) -> list[list[Node]]:
    """The nodes that are in each group, and in none inside it."""
    found: list[list[Node]] = [[] for _ in groups]
    for node in nodes:
        found[node["group"]].append(node)
    return found


def _move(members: Sequence[Node], groups: list[Group], parent: int, label: str) -> None:
    box = add_group(groups, label, parent, run=True)
    for node in members:
        node["group"] = box


def _around(group: int | None, groups: Sequence[Group]) -> Iterator[int]:
    """A group and those around it, from inside to outside."""
    while group is not None:
        yield group
        group = groups[group]["parent"]


def _fold(nodes: Sequence[Node], edges: Sequence[Edge], groups: Sequence[Group]) -> None:
    """Gives groups of equal content that differ in their place in a list one ``fold``."""
    casts: dict[int, list[tuple[str, str]]] = {}
    for edge in edges:
        casts.setdefault(edge["head"], []).extend((cast["after"], cast["mark"]) for cast in edge["casts"])
    folds: dict[Any, list[int]] = {}
    for index, group in enumerate(groups):
        name, indexed = _INDEX.subn("*", group["label"])
        if indexed and group["parent"] is not None and not group["run"]:
            content = tuple(
                (_inside(nodes[leaf], index, groups), *_looks(nodes[leaf], casts.get(leaf, ())))
                for leaf in group["leaves"]
            )
            folds.setdefault((group["parent"], name, content), []).append(index)
    for members in folds.values():
        if len(members) > 1:
            first, last = groups[members[0]], groups[members[-1]]
            first["title"] = f"{first['label']} \N{HORIZONTAL ELLIPSIS} {last['label']}"
            for member in members:
                groups[member].update(fold=members[0], times=len(members))


def _inside(node: Mapping[str, Any], outer: int, groups: Sequence[Group]) -> tuple[str, ...]:
    """Labels of the groups between a node and a group around it."""
    labels: list[str] = []
    for group in _around(node["group"], groups):
        if group == outer:
            break
        labels.append(groups[group]["label"])
    return tuple(labels)


def _looks(node: Node, casts: Sequence[tuple[str, str]]) -> tuple[Any, ...]:
    """What must be equal for two nodes to be drawn as one."""
    return (
        node["kind"],
        node["label"],
        node["dtype"],
        node["was"],
        node["heat"],
        tuple(node["shape"]),
        tuple(sorted(casts)),
    )


def levels(path: str) -> tuple[str, ...]:
    """``("model", "layers.0", "mlp")`` for ``"model.layers.0.mlp"``: a list and its index are one level."""
    return tuple(found.group() for found in _LEVEL.finditer(path))
