"""Makes the neutral model of a drawing from a report.

Modules become nested groups, ``layers.0`` being one level. Groups of equal content under one parent form a
*fold*: one of them is drawn for all, with its count. Casts are marks on edges, not nodes; views, which move no
bytes, and elements of results are not drawn either.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amp_fx.plans.diff import keyed
from amp_fx.plans.label import Kind
from amp_fx.plans.plan import CastPlan, InputPlan, NodePlan, Plan, dtype_name
from amp_fx.policy import OpClass
from amp_fx.viz.drawable import Drawable
from amp_fx.viz.groups import add_group, complete, levels
from amp_fx.viz.schema import (
    Cast,
    Drawing,
    Edge,
    Graph,
    Group,
    Node,
    Total,
    module_row,
    short_dtype,
)
from amp_fx.viz.style import rounding
from amp_fx.viz.words import because, more_bytes

__all__ = ["drawing"]

#: what autograd adds gradients with
_SUM = "add.Tensor"

#: in Dynamo's names of buffers
_BUFFER = "_buffers_"

#: Dynamo's names of a parameter and of an argument: ``l_self_modules_head_parameters_weight_``, ``l_tokens_``
_GIVEN = re.compile(r"^l_(?:\w+_(?:parameters|buffers)_|kwargs_)?(\w+?)_*$")


def drawing(report: Drawable, against: Drawable | None = None) -> Drawing:
    """Makes the model of a report's picture.

    Args:
        report: what to draw.
        against: an earlier report; nodes whose dtype differs say what it ``was``, casts that came or went are
            marked.
    """
    earlier = None if against is None else _Earlier(against.plans)
    names = _names(report.plans)
    return Drawing(
        title=report.title or "amp_fx",
        policy=", ".join(dict.fromkeys(plan.policy for plan in report.plans)),
        text=str(report),
        diff="" if against is None else str(against.diff(report)),
        more=_more(report),
        totals=[
            Total(
                name=name,
                casts=cost.casts,
                cast_bytes=cost.cast_bytes,
                kernels=cost.kernels,
                kernel_bytes=cost.kernel_bytes,
                moved=cost.moved,
            )
            for name, cost in report.compared().items()
        ],
        modules=[module_row(row) for row in report.modules],
        measured=report.measured,
        graphs=[
            _Builder(
                plan, names, earlier, sensitivities if plan.phase == "forward" else {}, report.measured
            ).build()
            for plan in report.plans
            for sensitivities in [report.sensitivities.get(plan.graph, {})]
        ],
    )


def _more(report: Drawable) -> str:
    moved = {name: cost.moved for name, cost in report.compared().items()}
    return more_bytes(report.plans, moved.get("amp_fx"), moved.get("torch.autocast"))


#: a node in both of two reports: phase, module, op and turn; or phase and name for inputs
_Name = tuple[Any, ...]


class _Earlier:
    """The report that a drawing is compared with."""

    def __init__(self, plans: Sequence[Plan]) -> None:
        self.dtypes = {key: _dtype(row) for key, row in keyed(plans).items()}
        names = _names(plans)
        self.casts: dict[tuple[_Name, _Name], list[Cast]] = {}
        for plan in plans:
            builder = _Builder(plan, names, None)
            builder.build()
            for ends, casts in builder.named_casts():
                self.casts.setdefault(ends, []).extend(casts)


def _names(plans: Sequence[Plan]) -> dict[int, _Name]:
    return {id(row): key for key, row in keyed(plans).items()}


@dataclass
class _Builder:
    """Builds one graph of the drawing."""

    plan: Plan
    names: Mapping[int, _Name]
    earlier: _Earlier | None
    sensitivities: Mapping[str, float | None] = field(default_factory=dict)
    measured: str = "sensitivity"
    nodes: list[Node] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    _ends: list[tuple[_Name, _Name]] = field(default_factory=list)
    _paths: dict[tuple[str, ...], int] = field(default_factory=dict)
    #: node -> position
    _drawn: dict[str, int] = field(default_factory=dict)
    #: node name -> module levels, with those of gradient sums worked out
    _levels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    #: reader -> the box of its parameters
    _parameters: dict[int, int] = field(default_factory=dict)

    def build(self) -> Graph:
        self._rows = {node.name: node for node in self.plan.nodes}
        self._casts = {cast.name: cast for cast in self.plan.casts if cast.inserted}
        self._inputs = {given.name: given for given in self.plan.inputs}
        self._group(())
        calls = [node for node in self.plan.nodes if not (node.is_passage or self._is_aside(node))]
        # how many calls are in a module, at any depth
        sizes = Counter(
            ".".join(parts[:end])
            for parts in (node.module_path.split(".") for node in calls if node.module_path)
            for end in range(1, len(parts) + 1)
        )
        for node in calls:
            self._add_call(node, sizes[node.module_path] == 1)
        for node in calls:
            for name in dict.fromkeys(node.inputs):
                self._add_edge(name, self._drawn[node.name], self.names[id(node)])
        self._add_results()
        complete(self.nodes, self.edges, self.groups)
        return Graph(
            label=f"{self.plan.phase} {self.plan.graph}",
            phase=self.plan.phase,
            fallback=self.plan.fallback,
            graph_break=self.plan.graph_break,
            nodes=self.nodes,
            edges=self.edges,
            groups=self.groups,
        )

    def named_casts(self) -> list[tuple[tuple[_Name, _Name], list[Cast]]]:
        """Casts by the names of both ends."""
        return [(ends, edge["casts"]) for ends, edge in zip(self._ends, self.edges, strict=True)]

    def _group(self, path: tuple[str, ...]) -> int:
        if path not in self._paths:
            parent = self._group(path[:-1]) if path else None
            self._paths[path] = add_group(
                self.groups, path[-1] if path else f"{self.plan.phase} {self.plan.graph}", parent, run=False
            )
        return self._paths[path]

    def _add_call(self, node: NodePlan, alone: bool) -> None:
        path = self._levels[node.name] = self._place(node)
        label = node.op
        if alone:
            # a box around a single call says no more than its name does
            path, label = path[:-1], f"{path[-1]}: {node.op}"
        self._drawn[node.name] = len(self.nodes)
        self.nodes.append(
            Node(
                name=node.name,
                label=label,
                kind="call",
                group=self._group(path),
                module=node.module_path,
                op=node.op,
                dtype=_dtype(node),
                op_class="user" if node.is_because(Kind.RULE) else node.op_class.value,
                reason=because(node),
                source=node.source,
                shape=list(node.shape),
                bytes=node.bytes,
                flops=node.flops,
                was=self._was(node),
                **rounding(self.sensitivities, node.name, self.measured),
            )
        )

    def _place(self, node: NodePlan) -> tuple[str, ...]:
        """The levels a call is drawn in; a sum of gradients, which no module wrote, goes with its last summand."""
        if node.module_path or self.plan.phase != "backward" or node.op != _SUM:
            return levels(node.module_path)
        places = [
            (self._drawn[producer], self._levels[producer])
            for producer in (self._origin(name)[0] for name in node.inputs)
            if producer in self._drawn
        ]
        last, path = max(places, default=(0, ()))
        return path[:-1] if places and self.nodes[last]["module"] else path

    def _was(self, node: NodePlan) -> str:
        if self.earlier is None:
            return ""
        before = self.earlier.dtypes.get(self.names[id(node)], "new")
        return before if before != _dtype(node) else ""

    def _add_value(self, kind: str, given: InputPlan, label: str, group: int, reason: str) -> int:
        """An ellipse: a value that no call of the graph computes, or that leaves it."""
        self.nodes.append(
            Node(
                name=given.name,
                label=label,
                kind=kind,
                group=group,
                module="",
                op="",
                dtype="" if given.dtype is None else dtype_name(given.dtype),
                op_class=OpClass.KEEP.value,
                reason=reason,
                source="",
                shape=list(given.shape),
                bytes=given.bytes,
                flops=0,
                was="",
                sensitivity="",
                heat=0,
            )
        )
        return len(self.nodes) - 1

    def _add_input(self, given: InputPlan, reader: int) -> int:
        """Draws an input; parameters beside their first reader, in one box for all it reads."""
        match = _GIVEN.search(given.copy_of or given.name)
        label = match.group(1) if match else given.name
        if given.copy_of:
            group = self.nodes[reader]["group"]
            if given.dtype is not None and dtype_name(given.dtype) == "float32":
                return self._add_value("parameter", given, f"{label} scales", group, "scales of a copy")
            return self._add_value("parameter", given, label, group, "a low copy, kept across calls")
        if not given.parameter and self.plan.phase == "backward" and not given.name.startswith("tangents"):
            group = self.nodes[reader]["group"]
            return self._add_value("input", given, "saved value", group, "saved by the forward")
        if not given.parameter and _BUFFER not in given.name:
            label = "incoming gradient" if given.name.startswith("tangents") else label
            return self._add_value("input", given, label, 0, "an input of the graph")
        if reader not in self._parameters:
            group = self.nodes[reader]["group"]
            self._parameters[reader] = self._add_value("parameter", given, label, group, "kept as it is")
        else:
            shared = self.nodes[self._parameters[reader]]
            shared["label"] += f", {label}"
            shared["bytes"] += given.bytes
        return self._parameters[reader]

    def _add_results(self) -> None:
        """Draws what leaves the graph in another dtype than it was computed in, beside its producer."""
        done = {cast["name"] for edge in self.edges for cast in edge["casts"]}
        last = {cast.value for cast in self._casts.values()}
        for cast in self._casts.values():
            if cast.name in done or cast.name in last or not self._leaves(cast):
                continue
            producer, _ = self._origin(cast.name)
            row = self._rows.get(producer)
            given = InputPlan(cast.name, False, cast.to_dtype, row.shape if row else (), 0)
            group = self.nodes[self._drawn[producer]]["group"] if producer in self._drawn else 0
            label = "gradient" if self.plan.phase == "backward" else "result"
            head = self._add_value("result", given, label, group, "leaves the graph")
            self._add_edge(cast.name, head, ("result", self.plan.phase, self._name(producer)))

    def _leaves(self, cast: CastPlan) -> bool:
        """False for what only calls read that are not drawn."""
        return not cast.users or any(user not in self._rows or user in self._drawn for user in cast.users)

    # --- edges ---

    def _add_edge(self, name: str, head: int, head_name: _Name) -> None:
        """Draws the value ``name`` on its way to ``head``."""
        producer, on_the_way = self._origin(name)
        ends = self._name(producer), head_name
        casts = self._marked([self._cast(cast) for cast in on_the_way], ends)
        if producer not in self._drawn:
            given = self._inputs.get(producer)
            # parameters are drawn where they are cast; of what a backward is given, what is cast or new
            if given is None or not (casts or self._is_shown(given)):
                return
            self._drawn[producer] = self._add_input(given, head)
        self.edges.append(Edge(tail=self._drawn[producer], head=head, casts=casts))
        self._ends.append(ends)

    def _is_aside(self, node: NodePlan) -> bool:
        """True for masks and constants of a backward: they differ from block to block, and nothing is cast."""
        return self.plan.phase == "backward" and (node.dtype is None or not node.shape) and not node.flops

    def _is_shown(self, given: InputPlan) -> bool:
        if given.parameter or _BUFFER in given.name:
            return False
        return self.plan.phase == "forward" or given.name.startswith("tangents")

    def _name(self, producer: str) -> _Name:
        row = self._rows.get(producer)
        return ("input", self.plan.phase, producer) if row is None else self.names[id(row)]

    def _origin(self, name: str) -> tuple[str, list[CastPlan]]:
        """The producer behind casts, views and inputs of bodies; the casts on the way, in order."""
        casts: list[CastPlan] = []
        while True:
            if name in self._casts:
                casts.insert(0, self._casts[name])
                name = self._casts[name].value
            elif name in self._rows and self._rows[name].is_passage:
                name = self._rows[name].inputs[0]
            elif name in self._inputs and self._inputs[name].alias:
                name = self._inputs[name].alias
            else:
                return name, casts

    def _cast(self, cast: CastPlan) -> Cast:
        return Cast(
            name=cast.name,
            before=short_dtype(dtype_name(cast.from_dtype)),
            after=short_dtype(dtype_name(cast.to_dtype)),
            bytes=cast.bytes,
            readers=len(cast.users),
            kernel=cast.kernel,
            mark="",
        )

    def _marked(self, casts: list[Cast], ends: tuple[_Name, _Name]) -> list[Cast]:
        """The casts of an edge beside those it had in the earlier report."""
        if self.earlier is None:
            return casts
        before = list(self.earlier.casts.get(ends, ()))
        for cast in casts:
            same = [old for old in before if (old["before"], old["after"]) == (cast["before"], cast["after"])]
            if same:
                before.remove(same[0])
            else:
                cast["mark"] = "added"
        return casts + [Cast(**{**old, "mark": "removed"}) for old in before]


def _dtype(node: NodePlan) -> str:
    return "" if node.computed is None else dtype_name(node.computed)
