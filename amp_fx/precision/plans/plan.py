"""The plan of a graph as plain data, which texts, JSON, pictures and export read.

One :class:`NodePlan` per call, one :class:`CastPlan` per conversion that changes a floating dtype. A plan goes to JSON
and back unchanged. ``reading.py`` makes it of a rewritten graph.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from amp_fx._torch import nesting_change
from amp_fx.errors import PlanError
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.precision.plans.files import (
    SchemaError,
    as_data,
    decode_file,
    dtype_name,
    parse_object,
    read_object,
    write_text,
)
from amp_fx.precision.plans.label import Label, Reason
from amp_fx.precision.plans.saved import SavedValue
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.levels import Level

#: of a file; the version is bumped when the JSON form changes incompatibly
_HEADER = {"version": 5}


@dataclass(kw_only=True)
class NodePlan(Label):
    """One call of a finished plan: what it is, and what was decided for it.

    Attributes:
        name: node name, with the path of the body it is in: ``"wrap_body_0.linear"``.
        op: ATen name as the op lists write it, or the target's name.
        module_path: dotted path of the user's module.
        source: the user's source line.
        traced: floating dtype of the result in the program as traced; None where it is not floating.
        low: the low dtype in force here.
        op_class: what mixed precision does with the op.
        shape: of the first tensor result; symbolic sizes by their hint.
        bytes: of the floating results as they are stored; 0 for views.
        flops: of matmuls, convolutions and attention; 0 elsewhere.
        inputs: names of what it reads, casts and graph inputs included.
        operands: shapes of the floating tensors it reads, in order.
        reasons: why, in the order in which they were found: the last overrules those before.
        dtype: floating dtype of the computation and its result; None for calls without floating tensors.
        takes: how arguments are taken, a value of :class:`amp_fx.precision.plans.label.Takes`.
        own_dtype_slots: arguments that keep a dtype of their own.
        pinned: dtype that the result must have at once, because others share its storage or a rule says so.
        result_dtype: fp32 where a kernel reads operands in ``dtype`` and returns its sum as it is; else None.
        computed_by: of attention on a CPU its implementation: ``"flash"``, ``"products"`` around a softmax, or
            ``"products_low"``, whose scores are in 16 bits; ``"autocast"`` inside a transform of ``torch.func`` where
            autocast places the casts; else empty.
        hazard: True where the call is wrong in a low dtype, so that nothing lowers it.
        levels: of a matmul where a policy below 16 bits has chosen: role -> the level in which it multiplies,
            ``{"forward": "rowwise", "gradient of its input": "bfloat16", ...}``.
        scales: of a matmul in int8 whose scales were measured: ``{"input": (scale, zero point)}``, so that a value is
            ``(byte - zero point) * scale``; else every row has the scale that it needs. With ``"result"``, of a
            convolution that is added, the result is rounded so on its way to the addition.
        equalisation: of a matmul in int8 whose input has a few large channels: of each channel the exponent of the
            power of two that the input is divided by, and the weight multiplied; else empty.
    """

    shape: tuple[int, ...] = ()
    bytes: int = 0
    flops: int = 0
    inputs: tuple[str, ...] = ()
    operands: tuple[tuple[int, ...], ...] = ()

    @property
    def is_passage(self) -> bool:
        """True for views and elements of results: the bytes are those of the only input."""
        if len(self.inputs) != 1 or self.dtype is None:
            return False
        return self.op == "getitem" or (self.op_class is OpClass.FOLLOW and not self.bytes and not self.flops)


@dataclass(frozen=True)
class InputPlan:
    """One tensor that a graph or a body is given.

    ``dtype`` is None where it is not floating, ``shape`` has symbolic sizes by their hint. ``alias`` is the outer value
    that a body is given here, ``copy_of`` the input that this is a low copy of, kept across calls; else empty.
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
        bytes: read and written if the cast is a kernel of its own; symbolic sizes by their hint.
        users: names of the nodes that share the cast.
        inserted: True for amp_fx's own casts, False for the program's.
        source: user's source line of the value.
        kernel: True where Inductor makes a kernel that only casts, False where it fuses the cast into another; None
            where it was not asked.
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
    """Casts of one kind in one module, or in several equal ones together, in the graphs that Inductor is given.

    ``name`` is ``"amp_fx"`` or ``"torch.autocast"``, ``what`` is ``"weight"``, ``"activation"``, ``"gradient"`` or
    ``"weight gradient"``. ``bytes`` is what they move if each is a kernel of its own; ``kernels`` are, and move
    ``kernel_bytes``. The others are fused.
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
    """The casts of one module; or of several, whose path has ``*`` for the numbers of repeated blocks.

    ``dtypes`` says what ``"amp_fx"`` and ``"torch.autocast"`` compute in, ``casts`` are those of both.
    """

    module: str
    times: int
    dtypes: dict[str, str]
    casts: list[CastSum]


@dataclass(frozen=True)
class Cost:
    """The cost of casts in all graphs of a report.

    ``casts`` between floating dtypes read and write ``cast_bytes`` if each is a kernel of its own. After Inductor's
    fusion, ``kernels`` do nothing but cast, and read and write ``kernel_bytes``; all kernels together, ``moved``.
    ``saved`` bytes are kept between forward and backward, parameters and inputs left out. None: Inductor was not asked.
    """

    casts: int
    cast_bytes: int
    kernels: int | None = None
    kernel_bytes: int | None = None
    moved: int | None = None
    saved: int | None = None


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
        autocast: casts and their bytes if torch.autocast had placed them, ``{"casts": 9, "bytes": 640}``, if asked for.
        autocast_dtypes: path of a module -> dtype name that torch.autocast would compute it in, if asked for.
        seconds: ``"amp_fx"``, ``"torch.autocast"``, ``"fp32"`` -> seconds by the device profile, both ways, if
            asked for and known; see :func:`amp_fx.compiler.predicting.add_times`.
        training: True if the graph was to be differentiated.
        profile: name of the device profile that weighed casts against arithmetic, or an empty string.
        meaning: what a policy below 16 bits means on the device: the level, or why it means autocast.
        weights: what becomes of the graph's weights and why: cast in each call, or how they are kept; empty where that
            was not decided.
        saved: of a step with the option ``activation_memory``, ``"before"`` and ``"after"`` -> bytes that are saved for
            the backward; ``"8 bits"``, ``"4 bits"``, ``"1 bit"``, ``"cast again"`` -> how many of the values.
        saved_values: what a step keeps between forward and backward, largest first, if asked for.
        unused_rules: the policy's rules that no call of this graph matches; another graph may have such calls.
        unknown: what could not be found out for the report of this graph, and why.
        faults: what the installed torch computes wrongly of this graph, and what was done instead; of a backward that
            is compiled when it is first called, from then on.
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
    seconds: dict[str, float] = field(default_factory=dict)
    training: bool = False
    profile: str = ""
    meaning: str = ""
    weights: str = ""
    saved: dict[str, int] = field(default_factory=dict)
    saved_values: list[SavedValue] = field(default_factory=list, repr=False)
    unused_rules: list[dict[str, str]] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list, repr=False)
    faults: list[str] = field(default_factory=list)

    @property
    def changed(self) -> bool:
        """True when amp_fx changed anything: an untouched graph is compiled as Dynamo made it."""
        written = any(row.computed_by not in ("", "flash") for row in self.nodes)
        below = any(row.levels_below for row in self.nodes)
        return written or below or any(cast.inserted for cast in self.casts)

    @property
    def decides_levels(self) -> bool:
        """True where the plan says of matmuls whether they run below 16 bits."""
        return any(row.levels for row in self.nodes)

    def node(self, name: str) -> NodePlan:
        """The plan of one node; KeyError if there is none of that name."""
        return {node.name: node for node in self.nodes}[name]

    @property
    def matmuls(self) -> list[NodePlan]:
        """Matmuls, convolutions, attention and recurrent layers that amp_fx decides about, in graph order."""
        return [node for node in self.nodes if node.flops or has_trait(node.op, Trait.RECURRENT)]

    @property
    def untouched_matmuls(self) -> list[NodePlan]:
        """Matmuls, convolutions and attention inside ``vmap`` and ``torch.func``, where no cast of amp_fx is."""
        found, depth = list[NodePlan](), 0
        for node in self.nodes:
            depth += nesting_change(node.op)
            # there the captured graph has no ATen calls but torch's names
            if depth and has_trait(node.op.strip("_"), Trait.MATMUL, Trait.UNCOUNTED_MATMUL):
                found.append(node)
        return found

    @property
    def module_dtypes(self) -> dict[str, str]:
        """Path of a module -> what it computes in: its first matmul, else its last floating call."""
        found: dict[str, NodePlan] = {}
        for node in self.nodes:
            before = found.get(node.module_path)
            if node.module_path and node.computed is not None and not node.is_passage:
                found[node.module_path] = before if before is not None and before.flops else node
        return {path: dtype_name(node.computed) for path, node in found.items() if node.computed is not None}

    def ops_by_dtype(self) -> dict[str, Counter[str]]:
        """Calls per op and dtype of the arithmetic: ``{"linear": {"bfloat16": 12}}``, others left out."""
        table: dict[str, Counter[str]] = {}
        for node in self.nodes:
            if node.computed is not None:
                table.setdefault(node.op, Counter())[dtype_name(node.computed)] += 1
        return table

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form; dtypes by name."""
        return {**as_data(vars(self)), **_HEADER}

    def to_json(self) -> str:
        """The plan as indented JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Reads what :meth:`to_dict` wrote; PlanError names the version or the field that is another."""
        return decode_file(cls, data, PlanError, _HEADER, "nodes", "casts", "inputs")

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Reads what :meth:`to_json` wrote; PlanError where it is something else."""
        try:
            return cls.from_dict(parse_object(text, "a plan"))
        except SchemaError as error:
            raise PlanError(str(error)) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Reads a file that :meth:`save` wrote; PlanError where that cannot be read, or is something else."""
        return read_object(path, "a plan", cls.from_dict, PlanError)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the plan to a file that ``options={"plan": path}`` replays: all of it, or the old file stays."""
        write_text(path, self.to_json() + "\n")


def with_choice(
    label: Label, role: str, level: Level | None, why: Reason
) -> tuple[dict[str, str], tuple[Reason, ...]]:
    """Levels and reasons of a call, with what was decided for one of its matmuls; None: it stays low, or in fp32.

    ``why`` takes the place of what a plan that was followed has said before.
    """
    if label.low is None:
        raise AssertionError(f"{label.name} multiplies, and has no low dtype")
    above = torch.float32 if label.dtype is torch.float32 else label.low
    name = dtype_name(above) if level is None else level.name
    others = tuple(reason for reason in label.reasons if reason.values.get("role") != role)
    return {**label.levels, role: name}, (*others, replace(why, values={"role": role, **why.values}))
