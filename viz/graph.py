"""The neutral form of a picture, which every writer reads: graphs of nodes and edges in nested groups.

Groups are modules, and boxes for many calls that say little. Groups of equal content under one parent are *folded*: the
first of them is drawn for all. What is folded is worked out here alone.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from amp_fx.errors import AmpFxError
from amp_fx.precision.plans.plan import CastPlan, Cost, ModuleCasts
from amp_fx.precision.plans.saved import SavedValue
from amp_fx.precision.policy import OpClass
from amp_fx.viz.words import short_dtype

#: a graph is drawn as deep as it has no more boxes than this, which are read at a glance
_READABLE = 24
#: the depth at which nothing is closed, runs of calls included
ALL = sys.maxsize
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


class Marked(NamedTuple):
    """A cast of a picture; ``mark`` is ``"added"`` or ``"removed"`` against an earlier report, else empty."""

    cast: CastPlan
    mark: str = ""


@dataclass
class Node:
    """A call, an input, a parameter or a result; ``group`` is a position in :attr:`Graph.groups`.

    ``was`` is the dtype in an earlier report where that is another. ``measured`` says what was measured of the call,
    and ``heat`` is its position in ``style.HEAT``. ``drawn`` is the position of the node that is drawn where equal
    groups are folded: its own, or its place in the first of them. ``kept`` are the bits of an element of what the
    backward is given of it, of the largest such value; 0 where that is nothing, or without the option
    ``activation_memory``. Where equal groups are folded, the node that is drawn has those of most of them, and
    ``kept_in`` is in how many, and of how many. ``saved`` says in words what is kept of it, with or without the option.
    """

    name: str
    label: str
    kind: str
    group: int
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    reason: str
    op_class: str = OpClass.KEEP.value
    module: str = ""
    op: str = ""
    source: str = ""
    flops: int = 0
    was: str = ""
    measured: str = ""
    heat: int = 0
    drawn: int = 0
    kept: int = 0
    kept_in: tuple[int, int] = (1, 1)
    saved: tuple[str, ...] = ()


@dataclass
class Edge:
    """A value on its way, with its casts in order; ``repeated`` where one of several equal groups shows it."""

    tail: int
    head: int
    casts: list[Marked]
    repeated: bool = False


@dataclass
class Group:
    """A module, or a ``run`` of calls that is closed at first.

    ``leaves`` are the nodes in it, at any depth, ``casts`` those between them. ``first`` is the first of the equal
    groups, ``times`` their number, and ``title`` names all of them. ``main`` is the only call on an op list or with
    FLOPs, or None.
    """

    label: str
    group: int | None = None
    depth: int = 0
    run: bool = False
    leaves: list[int] = field(default_factory=list)
    casts: dict[str, CastPlan] = field(default_factory=dict)
    first: int | None = None
    times: int = 1
    title: str = ""
    main: Node | None = None


@dataclass
class Graph:
    """One graph; nodes and groups are named by their position, group 0 is the graph itself.

    ``depth`` is the number of levels of modules that are drawn at first, with those of the last level closed.
    """

    name: str
    phase: str
    fallback: str
    graph_break: str
    depth: int = 1
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)

    def add_group(self, label: str, parent: int | None, *, run: bool = False) -> int:
        """Appends an empty group; returns its position."""
        depth = 0 if parent is None else self.groups[parent].depth + 1
        self.groups.append(Group(label, parent, depth, run, title=label))
        return len(self.groups) - 1

    def around(self, group: int | None) -> Iterator[int]:
        """A group and those around it, from inside to outside."""
        while group is not None:
            yield group
            group = self.groups[group].group

    def content(self, group: Group) -> list[tuple[str, int]]:
        """Calls of a group by dtype, the most frequent first."""
        rows = (self.nodes[leaf] for leaf in group.leaves)
        return Counter(row.dtype for row in rows if row.kind == "call" and row.dtype).most_common()

    @property
    def deepest(self) -> int:
        """The depth at which no module is closed; 1 of a graph without modules."""
        return 1 + max(group.depth for group in self.groups if not group.run)

    def boxes(self, depth: int) -> list[str]:
        """The box of each node, with modules closed from ``depth`` on: ``"n3"``, or a closed group ``"g1"``.

        Runs of calls are closed, too, but not at depth :data:`ALL`.
        """
        closes = [row.depth >= depth or (row.run and depth < ALL) for row in self.groups]
        found = []
        for node in self.nodes:
            around = self.around(self.nodes[node.drawn].group)
            closed = [at for at in around if at and closes[at]]
            found.append(f"g{closed[-1]}" if closed else f"n{node.drawn}")
        return found

    def open_to(self, depth: int | Literal["all"] | None) -> None:
        """Sets :attr:`depth`; None is the largest at which the graph has at most :data:`_READABLE` boxes, else 1."""
        if depth == "all":
            self.depth = ALL
        elif depth is not None:
            self.depth = min(depth, self.deepest)
        else:
            fitting = (at for at in range(self.deepest, 1, -1) if len(set(self.boxes(at))) <= _READABLE)
            self.depth = next(fitting, 1)

    def complete(self) -> None:
        """Once all nodes are there: puts those that say little into boxes, folds, and fills in what groups say."""
        for group, members in enumerate(self._members()):
            outside = [node for node in members if node.kind == "call" and not node.dtype]
            if len(outside) >= _OUTSIDE:
                self._move(outside, group, f"{len(outside)} integer and boolean ops")
        for group, members in enumerate(self._members()):
            step = max(_RUN, -(-len(members) // _MANY))
            for start in range(0, len(members) if len(members) > _MANY else 0, step):
                part = members[start : start + step]
                self._move(part, group, f"nodes {start + 1} to {start + len(part)}")
        for at, node in enumerate(self.nodes):
            node.drawn = at
            for group in self.around(node.group):
                self.groups[group].leaves.append(at)
        for edge in self.edges:
            tail, head = (set(self.around(self.nodes[end].group)) for end in (edge.tail, edge.head))
            there = {cast.name: cast for cast, mark in edge.casts if mark != "removed"}
            for group in tail & head:
                self.groups[group].casts |= there
        for group in self.groups:
            leaves = [self.nodes[leaf] for leaf in group.leaves]
            listed = [leaf for leaf in leaves if leaf.flops or leaf.op_class in _LISTED]
            group.main = listed[0] if len(listed) == 1 else None
        self._fold()

    def _members(self) -> list[list[Node]]:
        """The nodes that are in each group, and in none inside it."""
        found: list[list[Node]] = [[] for _ in self.groups]
        for node in self.nodes:
            found[node.group].append(node)
        return found

    def _move(self, members: Sequence[Node], parent: int, label: str) -> None:
        box = self.add_group(label, parent, run=True)
        for node in members:
            node.group = box

    def _fold(self) -> None:
        """Folds groups of equal content that differ in their place in a list."""
        casts: dict[int, list[tuple[str, str]]] = {}
        for edge in self.edges:
            found = [(short_dtype(cast.to_dtype), mark) for cast, mark in edge.casts]
            casts.setdefault(edge.head, []).extend(found)
        folds: dict[Any, list[int]] = {}
        for at, group in enumerate(self.groups):
            name, indexed = _INDEX.subn("*", group.label)
            if indexed and group.group is not None and not group.run:
                content = tuple(self._look(leaf, at, casts.get(leaf, ())) for leaf in group.leaves)
                folds.setdefault((group.group, name, content), []).append(at)
        for members in folds.values():
            rows = [self.groups[member] for member in members]
            if len(rows) > 1:
                for row in rows:
                    row.first, row.times = members[0], len(rows)
                title = f"{rows[0].label} \N{HORIZONTAL ELLIPSIS} {rows[-1].label}"
                rows[0].title = f"{title} \N{MULTIPLICATION SIGN}{len(rows)}"
        # inner groups come after those around them: what is drawn for a node of theirs is known first
        for group in reversed(self.groups):
            first = group if group.first is None else self.groups[group.first]
            for leaf, drawn in zip(group.leaves, first.leaves, strict=True):
                if leaf != drawn:
                    self.nodes[leaf].drawn = self.nodes[drawn].drawn
        self._count_kept()
        for edge in self.edges:
            tails, heads = self._members_around(edge.tail), self._members_around(edge.head)
            # inside another than the first the edge is drawn already; from one to another it would lead back
            edge.repeated = any(
                tails[first] != first if tails[first] == heads[first] else not edge.casts
                for first in tails.keys() & heads.keys()
            )

    def _count_kept(self) -> None:
        """Has nodes that are drawn for others say what is kept of most of them: the partitioner looks at no blocks."""
        equal: dict[int, list[int]] = {}
        for node in self.nodes:
            equal.setdefault(node.drawn, []).append(node.kept)
        for drawn, bits in equal.items():
            if found := Counter(filter(None, bits)).most_common(1):
                self.nodes[drawn].kept, times = found[0]
                self.nodes[drawn].kept_in = times, len(bits)

    def _members_around(self, node: int) -> dict[int, int]:
        """The folds that a node is in, by the first of each, with the group that the node is in."""
        around = ((self.groups[at].first, at) for at in self.around(self.nodes[node].group))
        return {first: at for first, at in around if first is not None}

    def _look(self, leaf: int, outer: int, casts: Iterable[tuple[str, str]]) -> tuple[Any, ...]:
        """The key under which two nodes are drawn as one: their groups inside ``outer``, and how they look."""
        node = self.nodes[leaf]
        labels = []
        for group in self.around(node.group):
            if group == outer:
                break
            labels.append(self.groups[group].label)
        look = node.kind, node.label, node.dtype, node.was, node.heat, node.shape
        return (*labels, *look, *sorted(casts))


@dataclass
class Drawing:
    """The picture of a report.

    ``saved`` is what takes most of what is kept for the backward, ``text`` the first screen, ``diff`` the difference in
    words, or empty. ``more`` says why all kernels move more bytes than torch.autocast's, or is empty. ``measured`` is
    what calls are coloured by, a key of ``style.MEASURED``.
    """

    title: str
    policy: str
    text: str
    diff: str
    more: str
    totals: Mapping[str, Cost]
    modules: Sequence[ModuleCasts]
    saved: Sequence[SavedValue]
    measured: str
    graphs: list[Graph]

    def label(self, graph: Graph) -> str:
        """``"forward"``, with Dynamo's id where there are several."""
        several = sum(other.phase == graph.phase for other in self.graphs) > 1
        return f"{graph.phase} {graph.name}" if several else graph.phase


def check_depth(depth: object) -> None:
    """Raises AmpFxError for a depth that :meth:`Graph.open_to` does not take."""
    if depth not in (None, "all") and not (isinstance(depth, int) and depth >= 1):
        raise AmpFxError(
            f'there is no depth {depth!r}; valid: integers from 1 on, and "all". Without one, as much is drawn as fits.'
        )


def levels(path: str) -> tuple[str, ...]:
    """``("model", "layers.0", "mlp")`` for ``"model.layers.0.mlp"``: a list and its index are one level."""
    return tuple(found.group() for found in _LEVEL.finditer(path))
