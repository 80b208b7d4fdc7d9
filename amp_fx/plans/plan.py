"""The plan: what the passes decided, as plain data that viz, explain and export read.

One :class:`NodePlan` per call in the graph, one :class:`CastPlan` per conversion that changes a floating
dtype. A plan goes to JSON and back unchanged. How it is read off a graph is in ``reading.py``.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from amp_fx.errors import PlanError
from amp_fx.plans.files import write_text
from amp_fx.plans.label import Decided, Takes
from amp_fx.plans.reasons import Reason
from amp_fx.plans.schema import SchemaError, decode, dtype_name, named_dtypes, parse_object
from amp_fx.policy import OpClass

__all__ = [
    "CastPlan",
    "CastSum",
    "Cost",
    "InputPlan",
    "ModuleCasts",
    "NodePlan",
    "Plan",
    "dtype_name",
    "named_dtypes",
]

#: bumped when the JSON form changes incompatibly
_VERSION = 4


@dataclass(frozen=True, kw_only=True)
class NodePlan(Decided):
    """One call of a finished plan: what it is, and what was decided for it. Attributes as in :class:`.label.Label`.

    Attributes:
        shape: of the first tensor result; symbolic sizes by their hint.
        bytes: of the floating results as they are stored; 0 for views.
        flops: of matmuls, convolutions and attention; 0 elsewhere.
        inputs: names of what it reads, casts and graph inputs included.
        operands: shapes of the floating tensors it reads, in order.
    """

    name: str
    op: str
    module_path: str
    source: str
    traced: torch.dtype | None
    low: torch.dtype | None
    op_class: OpClass
    shape: tuple[int, ...] = ()
    bytes: int = 0
    flops: int = 0
    inputs: tuple[str, ...] = ()
    operands: tuple[tuple[int, ...], ...] = ()
    reasons: tuple[Reason, ...] = ()
    dtype: torch.dtype | None = None
    takes: str = Takes.TRACED
    own_dtype_slots: tuple[str, ...] = ()
    pinned: torch.dtype | None = None
    levels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class InputPlan:
    """One tensor that a graph is given.

    Attributes:
        name: node name.
        parameter: True for a parameter of the user's module.
        dtype: floating dtype; None where it is not floating.
        shape: symbolic sizes by their hint.
        bytes: its size.
        alias: in a body, the name of the outer value that is passed here; else an empty string.
        copy_of: name of the input that this is a low copy of, kept across calls; else an empty string.
    """

    name: str
    parameter: bool
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    bytes: int
    alias: str = ""
    copy_of: str = ""


@dataclass(frozen=True)
class CastPlan:
    """One conversion between floating dtypes in the final graph.

    Attributes:
        name: node name of the cast.
        value: node name of what is cast.
        from_dtype: dtype before.
        to_dtype: dtype after.
        bytes: bytes read and written if the cast is a kernel of its own; symbolic sizes by their hint.
        users: names of the nodes that share the cast.
        inserted: True for amp_fx's own casts, False for the program's.
        source: user's source line of the value.
        kernel: True where Inductor makes a kernel that only casts, False where it fuses the cast into another;
            None where Inductor was not asked, see :func:`amp_fx.explain`.
    """

    name: str
    value: str
    from_dtype: torch.dtype
    to_dtype: torch.dtype
    bytes: int
    users: tuple[str, ...]
    inserted: bool
    source: str
    kernel: bool | None = None

    @property
    def narrows(self) -> bool:
        """True for a cast to a dtype that is not wider."""
        return self.to_dtype.itemsize <= self.from_dtype.itemsize


@dataclass(frozen=True)
class CastSum:
    """Casts of one kind in one module, or in several equal ones together, as Inductor is given them.

    Attributes:
        name: whose they are, ``"amp_fx"`` or ``"torch.autocast"``.
        phase: ``"forward"`` or ``"backward"``.
        what: ``"weight"``, ``"activation"``, ``"gradient"``, or ``"weight gradient"``.
        before: dtype before.
        after: dtype after.
        casts: how many there are in the graphs.
        bytes: what they read and write if each is a kernel of its own.
        kernels: how many are kernels of their own; the others are fused.
        kernel_bytes: what these read and write.
    """

    name: str
    phase: str
    what: str
    before: torch.dtype
    after: torch.dtype
    casts: int
    bytes: int
    kernels: int
    kernel_bytes: int

    @property
    def narrows(self) -> bool:
        """True for casts to a dtype that is not wider."""
        return self.after.itemsize <= self.before.itemsize


@dataclass(frozen=True)
class ModuleCasts:
    """What is cast in one module, or in equal ones together.

    Attributes:
        module: path, with ``*`` for the numbers of repeated blocks; empty outside any module.
        times: how many modules have this path.
        dtypes: ``"amp_fx"`` or ``"torch.autocast"`` -> what it computes in.
        casts: those of both.
    """

    module: str
    times: int
    dtypes: dict[str, str]
    casts: list[CastSum]


@dataclass(frozen=True)
class Cost:
    """What casts cost in all graphs of a report.

    Attributes:
        casts: conversions between floating dtypes in the graphs.
        cast_bytes: what they read and write if each is a kernel of its own.
        kernels: kernels that do nothing but cast, after Inductor's fusion; None where it was not asked.
        kernel_bytes: what these read and write.
        moved: what all kernels read and write.
    """

    casts: int
    cast_bytes: int
    kernels: int | None = None
    kernel_bytes: int | None = None
    moved: int | None = None


@dataclass
class Plan:
    """The decisions for one compiled graph, its bodies included.

    Attributes:
        graph: name of the graph (Dynamo's compile id, or ``"graph"``).
        policy: the policy in the form it parses.
        nodes: in graph order.
        casts: in graph order.
        fallback: why the graph was not rewritten, and how it is compiled instead; or an empty string.
        inputs: tensors that the graph and its bodies are given.
        phase: ``"forward"`` or ``"backward"``.
        graph_break: why Dynamo ended the graph before the program did, or an empty string.
        autocast: casts and their bytes if torch.autocast had placed them, ``{"casts": 9, "bytes": 640}``;
            None where that was not asked for.
        autocast_dtypes: path of a module -> dtype name that torch.autocast would compute it in; empty where that was
            not asked for.
        training: True if the graph was to be differentiated.
        profile: name of the device profile that weighed casts against arithmetic, or an empty string.
        meaning: in words, what a policy below 16 bits means on the device: the level, or why it means autocast; else an
            empty string.
        unused_rules: the policy's rules that no call of this graph matches, in the form that a policy has them. Another
            graph of the program may have such calls.
    """

    graph: str = "graph"
    policy: str = "autocast"
    # not in repr: Dynamo prints the options of a backend, which a plan may be one of
    nodes: list[NodePlan] = field(default_factory=list, repr=False)
    casts: list[CastPlan] = field(default_factory=list, repr=False)
    fallback: str = ""
    inputs: list[InputPlan] = field(default_factory=list, repr=False)
    phase: str = "forward"
    graph_break: str = ""
    autocast: dict[str, int] | None = None
    autocast_dtypes: dict[str, str] = field(default_factory=dict)
    training: bool = False
    profile: str = ""
    meaning: str = ""
    unused_rules: list[dict[str, str]] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """True when amp_fx cast anything: an untouched graph is compiled as Dynamo made it."""
        return any(cast.inserted for cast in self.casts)

    @property
    def decides_levels(self) -> bool:
        """True where the plan says of matmuls whether they run below 16 bits."""
        return any(row.levels for row in self.nodes)

    def node(self, name: str) -> NodePlan:
        """The plan of one node.

        Raises:
            KeyError: no such node.
        """
        for node in self.nodes:
            if node.name == name:
                return node
        raise KeyError(name)

    def ops_by_dtype(self) -> dict[str, Counter[str]]:
        """Calls per op and dtype of the arithmetic: ``{"linear": {"bfloat16": 12}}``, others left out."""
        table: dict[str, Counter[str]] = {}
        for node in self.nodes:
            if node.computed is not None:
                table.setdefault(node.op, Counter())[dtype_name(node.computed)] += 1
        return table

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form; dtypes by name."""
        data = asdict(self)
        data["version"] = _VERSION
        return named_dtypes(data)

    def to_json(self) -> str:
        """The plan as indented JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Reads what :meth:`to_dict` wrote.

        Raises:
            PlanError: another version, or a field that is missing, unknown or of another type.
        """
        fields = dict(data)
        version = fields.pop("version", None)
        if version != _VERSION:
            raise PlanError(
                f"plan has version {version!r}; this amp_fx reads version {_VERSION}: make a new plan."
            )
        missing = next((key for key in ("nodes", "casts", "inputs") if key not in fields), None)
        if missing is not None:
            raise PlanError(f"not a plan: plan.{missing} is missing.")
        try:
            return decode(cls, fields, "plan")
        except SchemaError as error:
            raise PlanError(f"not a plan: {error}") from error

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads what :meth:`to_json` wrote.

        Raises:
            PlanError: the text is not JSON or not a plan.
        """
        try:
            data = parse_object(text, "a plan")
        except SchemaError as error:
            raise PlanError(str(error)) from error
        return cls.from_dict(data)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file that ``options={"plan": path}`` replays: all of it, or the old file stays.

        Raises:
            OSError: the file cannot be written.
        """
        write_text(path, self.to_json() + "\n")
