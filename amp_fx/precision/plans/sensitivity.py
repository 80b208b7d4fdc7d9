"""The cost of rounding in accuracy, as plain data: measured by ``amp_fx.calibrate``, read by the placement.

One number, *sensitivity*, is what one rounding adds to the squared relative L2 error of the gradient of all
parameters, or of what the model returns. Sensitivities of several roundings add up. They are kept by call and
argument, not by device: the placement decides which of the roundings happen, and what they save.

A sensitivity that is None is infinite: some value was beyond the range of the low dtype.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.fx as fx

from amp_fx.errors import PlanError
from amp_fx.graphs.calls import arguments, tensor_nodes
from amp_fx.graphs.values import is_eligible
from amp_fx.precision.plans.files import as_data, decode_file, read_object, write_text
from amp_fx.precision.plans.label import SENSITIVITY, Reason, ReasonKind
from amp_fx.precision.plans.matching import choose_plan, match
from amp_fx.precision.plans.plan import Plan, dtype_name
from amp_fx.precision.policy.levels import FORWARD

#: of a file; the version is bumped when the JSON form changes incompatibly
_HEADER = {"format": "amp_fx sensitivity", "version": 4}
#: what is judged: the gradient of all parameters, or what the model returns
OF = GRADIENTS, OUTPUTS = "gradients", "outputs"
#: slots of what a kernel rounds inside if it runs low. Of attention: the probabilities on their way to the values,
#: scores and their gradient, and the result, from which its backward takes sums. Of an LSTM: its states
INSIDE = PROBABILITIES, SCORES, RESULT, STATES = "probabilities", "scores", "stored result", "states"
#: what a matmul below 16 bits reads: by scales that it finds in each call, or by one that was measured before
INPUT, MEASURED = "input", "input by a measured scale"
#: the weight beside it; the second only where the two are equalised in other ways
WEIGHT, MEASURED_WEIGHT = "weight", "weight beside a measured scale"
#: the result of a convolution that is added, in uint8 by a measured scale
ADDED = "result"


@dataclass
class ReadSensitivity:
    """One value on its way into one call: sensitivity if it is read rounded, or if its gradient is returned so."""

    value: float | None = 0.0
    gradient: float | None = 0.0


@dataclass
class CallSensitivity:
    """One call, by its name in the plan."""

    name: str
    #: if the result is rounded for all who read it
    value: float | None = 0.0
    #: if the gradient of the result, all its parts added up, is rounded
    gradient: float | None = 0.0
    #: argument, as :func:`slots` names it, or a slot of :data:`INSIDE` -> what rounding it on the way in costs
    reads: dict[str, ReadSensitivity] = field(default_factory=dict)
    #: of a matmul that may run below 16 bits: role (:data:`amp_fx.precision.policy.levels.ROLES`) -> operand,
    #: ``"input"``, ``"weight"`` or ``"gradient"`` -> sensitivity if this matmul reads it so; empty where that was not
    #: measured
    roles: dict[str, dict[str, float | None]] = field(default_factory=dict)
    #: scale and zero point by which the input was measured in uint8, under :data:`INPUT`, and under :data:`ADDED` the
    #: result, for who rounds that
    scales: dict[str, tuple[float, int]] = field(default_factory=dict)
    #: exponents of two, one for each contracted channel, by which the input is divided and the weight multiplied where
    #: scales are found in each call, and where they were measured: under :data:`INPUT` and :data:`MEASURED`
    equalisation: dict[str, tuple[int, ...]] = field(default_factory=dict)
    #: the part of ``value`` at elements equal to those of the first operand, as of a leaky relu; of a call that only
    #: picks elements, all of it is
    kept: float | None = 0.0

    def fits(self, most: float) -> bool:
        """True where the measured scale adds at most so many times what scales add that are found in each call.

        A convolution has no such scales.
        """
        operands = self.roles.get(FORWARD, {})
        if INPUT not in operands or MEASURED not in operands:
            return MEASURED in operands
        found, measured = (
            sum(map(as_number, self.operands(FORWARD, measured=each).values())) for each in (False, True)
        )
        return measured <= most * found

    def operands(self, role: str, *, measured: bool) -> dict[str, float | None]:
        """The squared relative error of a matmul of the call, by operand; ``measured``: it reads by measured scales."""
        operands, left_out = self.roles[role], {MEASURED, MEASURED_WEIGHT, ADDED}
        if measured and role == FORWARD:
            left_out = {INPUT, WEIGHT} if MEASURED_WEIGHT in operands else {INPUT}
            left_out |= {ADDED} - self.scales.keys()
        return {operand: found for operand, found in operands.items() if operand not in left_out}

    def below(self, role: str) -> float:
        """The squared relative error of a matmul below 16 bits; infinite if it overflows or was not measured."""
        return sum(map(as_number, self.roles[role].values())) if role in self.roles else math.inf


@dataclass
class GraphSensitivity:
    """One graph of the model: its calls, as ``classify`` labels them, by which it is found, and those measured."""

    outline: Plan
    calls: list[CallSensitivity]

    def renamed(self, outline: Plan) -> list[CallSensitivity]:
        """The calls by the names that they have in another capture of the graph, of which this is the outline."""
        names = {saved.name: row.name for saved, row in match(self.outline, outline).pairs}
        return [replace(call, name=names[call.name]) for call in self.calls if call.name in names]


@dataclass
class Sensitivity:
    """The measurements of :func:`amp_fx.calibrate`."""

    #: name of the model's class
    model: str
    #: the low dtype
    dtype: torch.dtype
    #: loss scale at which gradients were rounded; 1 where there is none
    scale: float = 1.0
    #: number of batches whose sensitivities were averaged
    batches: int = 1
    #: number of states of the model that were measured; of each rounding, the largest sensitivity counts
    states: int = 1
    #: calls whose derivative jumps (ReLU and its kin): of ReLU the flips are predicted in magnitude
    kinks: int = 0
    #: what was judged, one of :data:`OF`
    of: str = GRADIENTS
    #: below 16 bits, in which matmuls were measured (:data:`amp_fx.precision.policy.levels.LEVELS`), or empty
    level: str = ""
    #: in order of their first call
    graphs: list[GraphSensitivity] = field(default_factory=list)

    @property
    def what(self) -> str:
        """The value whose error is measured, in words."""
        return "gradient" if self.of == GRADIENTS else "output"

    def graph(self, outline: Plan) -> GraphSensitivity:
        """The sensitivity of a graph with these calls. PlanError: that graph, or its gradients, were not measured."""
        if self.of == OUTPUTS and outline.training:
            raise PlanError(
                f"graph {outline.graph} has gradients, and what was measured is what roundings do to the outputs of "
                f"{self.model}; calibrate with of='gradients'."
            )

        def of(found: Plan) -> GraphSensitivity:
            return next(graph for graph in self.graphs if graph.outline is found)

        outlines = [graph.outline for graph in self.graphs]
        return of(choose_plan(outlines, outline, "sensitivity", lambda found: of(found).calls)[0])

    @classmethod
    def worst(cls, sensitivities: Sequence[Sensitivity]) -> Sensitivity:
        """The largest sensitivity of each rounding, for a model in several states; names are those of the last state.

        Raises PlanError where they are not about the same.
        """
        last = sensitivities[-1]
        for what, each in (
            ("levels", {found.level or "none" for found in sensitivities}),
            ("things that are judged", {found.of for found in sensitivities}),
            ("low dtypes", {dtype_name(found.dtype) for found in sensitivities}),
        ):
            if len(each) > 1:
                raise PlanError(
                    f"sensitivities of different {what} ({', '.join(sorted(each))}) are not comparable; calibrate with "
                    "one of them."
                )
        graphs = []
        for outline in (graph.outline for graph in last.graphs):
            measured = [each.graph(outline).renamed(outline) for each in sensitivities]
            graphs.append(GraphSensitivity(outline, combined(measured, max)))
        batches = sum(each.batches for each in sensitivities)
        states = sum(each.states for each in sensitivities)
        return replace(last, batches=batches, states=states, graphs=graphs)

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form."""
        return {**_HEADER, **as_data(vars(self))}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sensitivity:
        """Reads what :meth:`to_dict` wrote; PlanError where it is something else."""
        return decode_file(cls, data, PlanError, _HEADER)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the file that ``options={"policy": {"sensitivity": path}}`` reads, all of it or nothing."""
        write_text(path, json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Sensitivity:
        """Reads a file that :meth:`save` wrote; PlanError where it cannot be read or is none."""
        how = f"Write it with amp_fx.calibrate(...).save({os.fspath(path)!r})."
        return read_object(path, "a sensitivity file", cls.from_dict, PlanError, how)

    def __str__(self) -> str:
        calls = sum(len(graph.calls) for graph in self.graphs)
        return f"sensitivity of {self.model} in {dtype_name(self.dtype)}: {calls} calls in {len(self.graphs)} graphs"


def combined(
    measured: Iterable[Sequence[CallSensitivity]], combine: Callable[[Sequence[float]], float]
) -> list[CallSensitivity]:
    """One row for each call of a graph that was measured several times; what only some have counts as they have it."""
    by_name: dict[str, list[CallSensitivity]] = {}
    for call in itertools.chain.from_iterable(measured):
        by_name.setdefault(call.name, []).append(call)
    found = []
    for name, calls in by_name.items():
        values, gradients, kept, reads, roles = (
            _combined([getattr(call, what) for call in calls], combine)
            for what in ("value", "gradient", "kept", "reads", "roles")
        )
        # of a model in several states the widest
        widest = max(calls, key=lambda call: call.scales.get(INPUT, (0.0, 0)))
        known = widest.scales, widest.equalisation
        if any(call.equalisation != widest.equalisation for call in calls if FORWARD in call.roles):
            # divided in other ways, neither errors nor scales compare: it stays in 16 bits
            known, roles[FORWARD] = ({}, {}), dict.fromkeys(roles[FORWARD])
        found.append(CallSensitivity(name, values, gradients, reads, roles, *known, kept))
    return found


def _combined(parts: Sequence[Any], combine: Callable[[Sequence[float]], float]) -> Any:
    """Sensitivities, or mappings to such, from several measurements; infinite where one of them is."""
    if isinstance(parts[0], ReadSensitivity):
        return ReadSensitivity(**_combined([vars(part) for part in parts], combine))
    if isinstance(parts[0], dict):
        keys = dict.fromkeys(itertools.chain.from_iterable(parts))
        return {key: _combined([part[key] for part in parts if key in part], combine) for key in keys}
    return None if None in parts else combine(parts)


def as_number(sensitivity: float | None) -> float:
    """A sensitivity to calculate with: None is infinite."""
    return math.inf if sensitivity is None else sensitivity


def slots(node: fx.Node) -> list[tuple[str, str, fx.Node]]:
    """The floating tensors that a call reads, each value once: (slot, argument, node).

    The slot is the argument's name, with a position where the argument is a list: ``"tensors.1"`` of ``cat``.
    """
    found: dict[fx.Node, tuple[str, str, fx.Node]] = {}
    for name, value in arguments(node):
        for position, source in enumerate(tensor_nodes(value)):
            slot = f"{name}.{position}" if isinstance(value, (list, tuple)) else name
            if is_eligible(source.meta.get("val")):
                found.setdefault(source, (slot, name, source))
    return list(found.values())


def add_sensitivities(plans: Sequence[Plan], sensitivity: Sensitivity) -> dict[str, dict[str, float | None]]:
    """Adds to the reasons of every measured call what rounding its operands, its result and their gradients does.

    Only plans of forward graphs are changed. Returns graph -> call -> what rounding adds to the relative error of the
    gradient; None where it overflows. Raises PlanError for a graph that was not measured.
    """
    found: dict[str, dict[str, float | None]] = {}
    for plan in plans:
        if plan.phase != "forward" or plan.fallback:
            continue
        rows = {row.name: at for at, row in enumerate(plan.nodes)}
        errors = found.setdefault(plan.graph, {})
        for call in sensitivity.graph(plan).renamed(plan):
            parts = [call, *call.reads.values()]
            total = sum(as_number(part.value) + as_number(part.gradient) for part in parts)
            error = errors[call.name] = None if math.isinf(total) else math.sqrt(total)
            row = plan.nodes[at := rows[call.name]]
            if row.is_because(*SENSITIVITY):
                continue
            adds = Reason.of(ReasonKind.ROUNDING_ADDS_UP_TO, error=error)
            why = Reason(ReasonKind.ROUNDING_OVERFLOWS) if error is None else adds
            plan.nodes[at] = replace(row, reasons=(*row.reasons, why))
    return found
