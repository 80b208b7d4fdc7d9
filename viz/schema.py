"""The form of the neutral model: JSON-like dictionaries that every writer reads."""

from __future__ import annotations

from typing import TypedDict

from amp_fx.plans.files import as_data
from amp_fx.plans.plan import ModuleCasts

__all__ = [
    "BITS",
    "SHORT",
    "Cast",
    "CastRow",
    "Drawing",
    "Edge",
    "Graph",
    "Group",
    "ModuleRow",
    "Node",
    "Total",
    "is_lowering",
    "module_row",
    "short_dtype",
]

#: dtype -> bits of an element
BITS = {"int8": 8, "float8_e4m3fn": 8, "bfloat16": 16, "float16": 16, "float32": 32, "float64": 64}

#: dtype -> what casts and boxes call it; the others have their own name
SHORT = {"float8_e4m3fn": "fp8", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


class Cast(TypedDict):
    """A cast on an edge.

    ``kernel`` is True where Inductor makes a kernel that does nothing else, False where it is fused into
    another, None where that is not known. ``mark`` is ``"added"`` or ``"removed"`` against an earlier report.
    """

    name: str
    before: str
    after: str
    bytes: int
    readers: int
    kernel: bool | None
    mark: str


class Node(TypedDict):
    """A call, an input, a parameter or a result; ``group`` is a position in ``Graph.groups``.

    ``sensitivity`` says what rounding the call costs, or how far its result is from a reference, and is empty where
    that was not measured; ``heat`` is its position in ``style.HEAT``.
    """

    name: str
    label: str
    kind: str
    group: int
    module: str
    op: str
    dtype: str
    op_class: str
    reason: str
    source: str
    shape: list[int]
    bytes: int
    flops: int
    was: str
    sensitivity: str
    heat: int


class Edge(TypedDict):
    """A value on its way from one node to another; ``casts`` in order."""

    tail: int
    head: int
    casts: list[Cast]


class Group(TypedDict):
    """A module, or a ``run`` of calls that are closed at first.

    ``leaves`` are the nodes in it, at any depth. ``fold`` is the first of the equal groups, or None; ``title``
    and ``times`` are those of the whole fold there. ``main`` is the only call on an op list or with FLOPs, or None.
    """

    label: str
    title: str
    parent: int | None
    depth: int
    run: bool
    leaves: list[int]
    fold: int | None
    times: int
    main: int | None


class Graph(TypedDict):
    """One graph; nodes and groups are named by their position, group 0 is the graph itself."""

    label: str
    phase: str
    fallback: str
    graph_break: str
    nodes: list[Node]
    edges: list[Edge]
    groups: list[Group]


class Total(TypedDict):
    """What casts cost in all graphs, and what all kernels move.

    ``casts`` are those in the graphs, ``kernels`` what is left of them after fusion; None: not known.
    """

    name: str
    casts: int
    cast_bytes: int
    kernels: int | None
    kernel_bytes: int | None
    moved: int | None


class CastRow(TypedDict):
    """Casts of one kind in one module. ``name`` is that of the total that they belong to."""

    name: str
    phase: str
    what: str
    before: str
    after: str
    casts: int
    bytes: int
    kernels: int
    kernel_bytes: int


class ModuleRow(TypedDict):
    """One module, or equal ones together, of every total: what it computes in and its casts."""

    module: str
    times: int
    dtypes: dict[str, str]
    casts: list[CastRow]


class Drawing(TypedDict):
    """The picture of a report.

    ``text`` is its first screen, ``diff`` the difference in words, or empty. ``more`` says why all kernels move more
    bytes than torch.autocast's, or is empty. ``modules`` are what the totals compare, in the order of the program, or
    empty. ``measured`` is what calls are coloured by, a key of ``style.MEASURED``.
    """

    title: str
    policy: str
    text: str
    diff: str
    more: str
    totals: list[Total]
    modules: list[ModuleRow]
    measured: str
    graphs: list[Graph]


def short_dtype(name: str) -> str:
    """``"bf16"`` for ``"bfloat16"``."""
    return SHORT.get(name, name)


_SHORT_BITS = {short_dtype(name): bits for name, bits in BITS.items()}


def is_lowering(cast: Cast | CastRow) -> bool:
    """True for a cast to a dtype that is not wider."""
    return _SHORT_BITS.get(cast["after"], 8) <= _SHORT_BITS.get(cast["before"], 8)


def module_row(module: ModuleCasts) -> ModuleRow:
    """What a report's module says as JSON, with short names of dtypes on its casts."""
    row = as_data(module)
    casts = [
        CastRow(**{**cast, "before": short_dtype(cast["before"]), "after": short_dtype(cast["after"])})
        for cast in row["casts"]
    ]
    return ModuleRow(module=row["module"], times=row["times"], dtypes=row["dtypes"], casts=casts)
