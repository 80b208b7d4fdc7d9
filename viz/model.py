"""Makes the neutral form of a picture from a report.

Modules become nested groups, ``layers.0`` being one level. Casts are marks on edges, not nodes. Views, which move no
bytes, elements of results, and what computes nothing are not drawn either.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.plans.plan import CastPlan, Cost, InputPlan, ModuleCasts, NodePlan, Plan, dtype_name
from amp_fx.precision.plans.plan_files import Diff, keyed
from amp_fx.precision.plans.saved import SavedValue
from amp_fx.viz.graph import Drawing, Edge, Graph, Marked, Node, check_depth, levels
from amp_fx.viz.style import measured
from amp_fx.viz.words import because, kept_text, more_bytes

#: what autograd adds gradients with
_SUM = "add.Tensor"
#: in Dynamo's names of buffers
_BUFFER = "_buffers_"
#: Dynamo's names of a parameter and of an argument: ``l_self_modules_head_parameters_weight_``, ``l_tokens_``
_GIVEN = re.compile(r"^l_(?:\w+_(?:parameters|buffers)_|kwargs_)?(\w+?)_*$")
#: a node in both of two reports: phase, module, op and turn; or phase and name for inputs
_Name = tuple[Any, ...]


class Drawable(Protocol):
    """The part of :class:`amp_fx.instruments.reports.report.Report` that pictures read."""

    plans: list[Plan]
    title: str
    sensitivities: dict[str, dict[str, float | None]]
    measured: str
    modules: list[ModuleCasts]

    @property
    def largest_saved(self) -> Sequence[SavedValue]:
        """What takes most of what is kept for the backward, largest first."""
        ...

    def compared(self) -> Mapping[str, Cost]:
        """Costs by name, of amp_fx first."""
        ...

    def diff(self, other: Any) -> Diff:
        """The differences of another report from this one."""
        ...


def drawing(
    report: Drawable, against: Drawable | None = None, depth: int | Literal["all"] | None = None
) -> Drawing:
    """Makes a report's picture; ``against`` an earlier one, it says which dtypes and casts changed.

    ``depth`` is how many levels of modules are drawn, by default as many as can be read; AmpFxError for another value
    than a positive integer or ``"all"``.
    """
    check_depth(depth)
    totals = report.compared()
    moved = {name: cost.moved for name, cost in totals.items()}
    names = {id(row): key for key, row in keyed(report.plans).items()}
    earlier = None if against is None else _Earlier(against)
    graphs = [_Builder(plan, names, report, earlier).build() for plan in report.plans]
    for graph in graphs:
        graph.open_to(depth)
    return Drawing(
        title=report.title or "amp_fx",
        policy=", ".join(dict.fromkeys(plan.policy for plan in report.plans)),
        text=str(report),
        diff="" if against is None else str(against.diff(report)),
        more=more_bytes(report.plans, moved.get("amp_fx"), moved.get("torch.autocast")),
        totals=totals,
        modules=report.modules,
        saved=report.largest_saved,
        measured=report.measured,
        graphs=graphs,
    )


class _Earlier:
    """The report that a drawing is compared with: dtypes of calls, and casts by both ends."""

    def __init__(self, report: Drawable) -> None:
        rows = keyed(report.plans)
        self.dtypes = {key: row.precision for key, row in rows.items()}
        names = {id(row): key for key, row in rows.items()}
        self.casts: dict[tuple[_Name, _Name], list[CastPlan]] = {}
        for plan in report.plans:
            builder = _Builder(plan, names, report)
            for edge, ends in zip(builder.build().edges, builder.ends, strict=True):
                self.casts.setdefault(ends, []).extend(cast for cast, _ in edge.casts)


class _Builder:
    """Builds one graph of the drawing; ``ends`` are the names of both ends of its edges."""

    def __init__(
        self, plan: Plan, names: Mapping[int, _Name], report: Drawable, earlier: _Earlier | None = None
    ) -> None:
        self.plan, self.names, self.report, self.earlier = plan, names, report, earlier
        self.graph = Graph(plan.graph, plan.phase, plan.fallback, plan.graph_break)
        self.ends: list[tuple[_Name, _Name]] = []
        self._is_backward = plan.phase == "backward"
        self._rows = {row.name: row for row in plan.nodes}
        self._casts = {cast.name: cast for cast in plan.casts if cast.inserted}
        self._inputs = {given.name: given for given in plan.inputs}
        #: name of a call -> what is kept of its results
        self._saved: dict[str, list[SavedValue]] = {}
        for value in plan.saved_values:
            self._saved.setdefault(value.call, []).append(value)
        self._paths: dict[tuple[str, ...], int] = {}
        #: name of a call or an input -> position
        self._drawn: dict[str, int] = {}
        #: name of a call -> module levels, with those of gradient sums worked out
        self._levels: dict[str, tuple[str, ...]] = {}
        #: reader -> the box of its parameters
        self._parameters: dict[int, int] = {}

    def build(self) -> Graph:
        self._group(())
        calls = [row for row in self.plan.nodes if not (row.is_passage or self._is_aside(row))]
        # how many calls are in a module, at any depth
        sizes = Counter(
            ".".join(parts[:end])
            for parts in (row.module_path.split(".") for row in calls if row.module_path)
            for end in range(1, len(parts) + 1)
        )
        for row in calls:
            self._add_call(row, sizes[row.module_path] == 1)
        for row in calls:
            for name in dict.fromkeys(row.inputs):
                self._add_edge(name, self._drawn[row.name], self.names[id(row)])
        self._add_results()
        self.graph.complete()
        return self.graph

    def _group(self, path: tuple[str, ...]) -> int:
        if path not in self._paths:
            parent = self._group(path[:-1]) if path else None
            self._paths[path] = self.graph.add_group(path[-1] if path else self.plan.phase, parent)
        return self._paths[path]

    def _is_aside(self, row: NodePlan) -> bool:
        """True for what computes nothing, and in a backward for masks and constants, which differ between blocks."""
        if row.dtype is None and not row.shape and (not row.inputs or row.op.startswith("_assert")):
            return True
        return self._is_backward and (row.dtype is None or not row.shape) and not row.flops

    def _add_call(self, row: NodePlan, alone: bool) -> None:
        path = self._levels[row.name] = self._place(row)
        label = row.op
        if alone:
            # a box around a single call says no more than its name does
            path, label = path[:-1], f"{path[-1]}: {row.op}"
        op_class = "user" if row.is_because(ReasonKind.RULE) else row.op_class.value
        node = Node(
            row.name, label, "call", self._group(path), row.precision, row.shape, row.bytes, because(row),
            op_class, row.module_path, row.op, row.source, row.flops,
        )  # fmt: skip
        saved = self._saved.get(row.name, ())
        node.saved = tuple(map(kept_text, saved))
        if self.plan.saved:
            # the largest is first. Without the option equal blocks differ here: the partitioner keeps what it likes
            bits = (value.bits for value in saved if value.is_smaller or value.dtype.is_floating_point)
            node.kept = next(bits, 0)
        if self.earlier is not None:
            before = self.earlier.dtypes.get(self.names[id(row)], "new")
            node.was = before if before != node.dtype else ""
        errors = {} if self._is_backward else self.report.sensitivities.get(self.plan.graph, {})
        if row.name in errors:
            node.measured, node.heat = measured(errors[row.name], self.report.measured)
        self._drawn[row.name] = len(self.graph.nodes)
        self.graph.nodes.append(node)

    def _place(self, row: NodePlan) -> tuple[str, ...]:
        """The levels a call is drawn in; a sum of gradients, which no module wrote, goes with its last summand."""
        if row.module_path or not self._is_backward or row.op != _SUM:
            return levels(row.module_path)
        producers = [self._origin(name)[0] for name in row.inputs]
        places = [(self._drawn[name], self._levels[name]) for name in producers if name in self._drawn]
        last, path = max(places, default=(0, ()))
        return path[:-1] if places and self.graph.nodes[last].module else path

    def _add_value(self, given: InputPlan, kind: str, label: str, group: int, reason: str) -> int:
        """An ellipse: a value that no call of the graph computes, or that leaves it."""
        dtype = "" if given.dtype is None else dtype_name(given.dtype)
        value = Node(given.name, label, kind, group, dtype, given.shape, given.bytes, reason)
        self.graph.nodes.append(value)
        return len(self.graph.nodes) - 1

    def _add_input(self, given: InputPlan, reader: int) -> int:
        """Draws an input; parameters beside their first reader, in one box for all it reads."""
        match = _GIVEN.search(given.copy_of or given.name)
        label = match.group(1) if match else given.name
        home = self.graph.nodes[reader].group
        if given.copy_of:
            scales = str(given.dtype) == "torch.float32"
            reason = "scales of a copy" if scales else "a low copy, kept across calls"
            return self._add_value(given, "parameter", f"{label} scales" if scales else label, home, reason)
        is_gradient = given.name.startswith("tangents")
        if not given.parameter and self._is_backward and not is_gradient:
            return self._add_value(given, "input", "saved value", home, "saved by the forward")
        if not given.parameter and _BUFFER not in given.name:
            label = "incoming gradient" if is_gradient else label
            return self._add_value(given, "input", label, 0, "an input of the graph")
        if reader not in self._parameters:
            self._parameters[reader] = self._add_value(given, "parameter", label, home, "kept as it is")
        else:
            shared = self.graph.nodes[self._parameters[reader]]
            shared.label += f", {label}"
            shared.bytes += given.bytes
        return self._parameters[reader]

    def _add_results(self) -> None:
        """Draws what leaves the graph in another dtype than it was computed in, beside its producer."""
        done = {cast.name for edge in self.graph.edges for cast, _ in edge.casts}
        done |= {cast.value for cast in self._casts.values()}
        for cast in self._casts.values():
            # what only calls read that are not drawn does not leave
            aside = cast.users and all(user in self._rows and user not in self._drawn for user in cast.users)
            if cast.name in done or aside:
                continue
            producer, _ = self._origin(cast.name)
            row = self._rows.get(producer)
            group = self.graph.nodes[self._drawn[producer]].group if producer in self._drawn else 0
            label = "gradient" if self._is_backward else "result"
            given = InputPlan(cast.name, False, cast.to_dtype, row.shape if row else (), 0)
            head = self._add_value(given, "result", label, group, "leaves the graph")
            self._add_edge(cast.name, head, ("result", self.plan.phase, self._name(producer)))

    def _add_edge(self, name: str, head: int, head_name: _Name) -> None:
        """Draws the value ``name`` on its way to ``head``."""
        producer, on_the_way = self._origin(name)
        ends = self._name(producer), head_name
        casts = list(self._marked(on_the_way, ends))
        if producer not in self._drawn:
            if (given := self._inputs.get(producer)) is None:
                return
            # parameters are drawn where they are cast; of what a backward is given, what is cast or new
            is_kept = given.parameter or _BUFFER in given.name
            if not casts and (is_kept or (self._is_backward and not given.name.startswith("tangents"))):
                return
            self._drawn[producer] = self._add_input(given, head)
        self.graph.edges.append(Edge(self._drawn[producer], head, casts))
        self.ends.append(ends)

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

    def _marked(self, casts: Sequence[CastPlan], ends: tuple[_Name, _Name]) -> Iterator[Marked]:
        """The casts of an edge beside those it had in the earlier report."""
        before = [] if self.earlier is None else list(self.earlier.casts.get(ends, ()))
        for cast in casts:
            dtypes = cast.from_dtype, cast.to_dtype
            same = next((old for old in before if (old.from_dtype, old.to_dtype) == dtypes), None)
            if same is not None:
                before.remove(same)
            yield Marked(cast, "added" if self.earlier is not None and same is None else "")
        yield from (Marked(old, "removed") for old in before)
