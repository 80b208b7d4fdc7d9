"""Choose the precision of every value by what its rounding costs in accuracy, beside time and bytes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload
from amp_fx.graphs.calls import convolves
from amp_fx.graphs.keys import MAY_ROUND, TIED
from amp_fx.graphs.traits import linear_form
from amp_fx.graphs.values import in_place_target
from amp_fx.passes.base import Note, Pass, PassContext, PassResult
from amp_fx.passes.forward.network import ALWAYS, Network, place_as_autocast, rounded
from amp_fx.passes.forward.place import Place
from amp_fx.passes.forward.sensitivity_terms import sensitivity_terms
from amp_fx.precision.placement.cost import CostModel
from amp_fx.precision.placement.cut import HIGH, LOW, Var, solve
from amp_fx.precision.placement.priced import Priced, SensitivityTerm, Sides
from amp_fx.precision.placement.tradeoff import within
from amp_fx.precision.plans.label import Label, Reason, ReasonKind, label_of
from amp_fx.precision.plans.plan import NodePlan
from amp_fx.precision.plans.sensitivity import INPUT, WEIGHT, CallSensitivity
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.common import FAST_LOW_IO, FAST_MAY_ROUND

#: call -> whether it computes in fp32, and whether its result is stored so
Placement = Mapping[str, tuple[bool, bool]]


@dataclass(frozen=True)
class PricedGraph:
    """A classified graph whose labels hold autocast's placement, with its prices."""

    graph: fx.Graph
    low: torch.dtype
    #: in picoseconds with a device profile; without, in bytes moved and what could be moved during the arithmetic
    priced: Priced
    #: the sides of torch.autocast: every listed op low, values where a cut over bytes puts them
    autocast: Sides
    #: prices with bytes for time
    make_by_bytes: Callable[[], Priced]

    def placement(self, sides: Sides) -> Placement:
        """Sides in a form that holds for the same graph captured again."""
        return {
            label.name: (sides[node], sides.get(rounded(node), sides[node]))
            for node in self.graph.nodes
            if (label := label_of(node)) is not None and node in sides
        }

    def sides(self, placement: Placement) -> dict[Var, bool]:
        """The sides of a placement."""
        found: dict[Var, bool] = {}
        for node in self.graph.nodes:
            label = label_of(node)
            if label is not None and label.name in placement:
                found[node], found[rounded(node)] = placement[label.name]
        return found

    def sides_in(self, rows: Mapping[str, NodePlan]) -> dict[Var, bool]:
        """The sides that a plan gives to the calls, by its rows."""
        sides: dict[Var, bool] = {var: side for side, var in ALWAYS.items()}
        for node in self.graph.nodes:
            if (label := label_of(node)) is not None:
                # literal numbers are in no plan
                placed = rows.get(label.name, label)
                sides[node] = placed.dtype is not self.low
                sides[rounded(node)] = (placed.pinned or placed.dtype) is not self.low
        return sides

    @functools.cached_property
    def by_bytes(self) -> Priced:
        """Bytes that a placement reads and writes, by the cost model."""
        return self.make_by_bytes()

    def operands_rounded(self, sides: Sides) -> dict[str, dict[str, float]]:
        """What sides add by rounding operands on their way into a product: call -> value, weight -> sensitivity."""
        found: dict[str, dict[str, float]] = {}
        done = {
            (term.call, term.slot): term.sensitivity for term in self.priced.blame(sides) if not term.backward
        }
        for node in self.graph.nodes:
            form, label = linear_form(node), label_of(node)
            if label is None or not (form or convolves(node)):
                continue
            names = [argument.name for argument in node.target._schema.arguments]
            places = (form.input, form.weight) if form else (0, 1)
            pairs = zip((INPUT, WEIGHT), places, strict=True)
            found[label.name] = {operand: done.get((label.name, names[at]), 0.0) for operand, at in pairs}
        return found

    @property
    def autocast_sensitivity(self) -> float:
        """The squared relative error that torch.autocast's roundings add; those that overflow are left out."""
        done = self.priced.blame(self.autocast)
        return sum(term.sensitivity for term in done if math.isfinite(term.sensitivity))


def price(
    gm: fx.GraphModule, context: PassContext, rows: Mapping[str, CallSensitivity]
) -> PricedGraph | None:
    """Prices a classified graph, given what was measured of its calls; None where there is no single low dtype.

    Its labels are given autocast's placement.
    """
    placed, low = place_as_autocast(gm.graph)
    if low is None:
        return None
    by_bytes = CostModel(gm.graph, None, context.training, context.folded)
    autocast = solve(Network(gm.graph, by_bytes, low).build())
    autocast |= {rounded(node): autocast[node] for node in gm.graph.nodes if autocast.get(node) is LOW}
    measured = {
        node: label
        for node, label in placed
        if label.name in rows
        and _is_free(node, label)
        and context.policy.rule_for(label.op, label.module_path) is None
    }
    for node, label in measured.items():
        node.meta[MAY_ROUND] = True
        if label.op in FAST_LOW_IO:
            label.own_dtype_slots = tuple(dict.fromkeys((*label.own_dtype_slots, "weight", "bias")))
    # which roundings happen does not depend on rates
    network = Network(gm.graph, by_bytes, low, measured.keys())
    terms = sensitivity_terms(gm.graph, network, by_bytes, rows)
    # fused they would not be rounded, but a file may run where nothing is fused
    overflowing = [
        network.stored(node)
        for node, label in measured.items()
        if rows[label.name].value is None and in_place_target(node) is None
    ]

    def priced(cost: CostModel, arithmetic: bool) -> Priced:
        network = Network(gm.graph, cost, low, measured.keys())
        problem = network.build()
        problem.pins.update(dict.fromkeys(overflowing, HIGH))
        for node, label in measured.items() if arithmetic else ():
            if label.op_class is OpClass.LOW:
                # what library kernels compute where no profile says how long that takes
                high, narrow = cost.nominal_arithmetic(node, low)
                problem.add_unary(node, high * network.scale, narrow * network.scale)
        return Priced(problem, terms, network.scale)

    profile = context.profile
    timed = by_bytes
    if profile is not None:
        known = profile, context.training, context.folded
        timed = CostModel(gm.graph, *known, times_calls=context.times_calls)
    return PricedGraph(
        gm.graph, low, priced(timed, profile is None), autocast, lambda: priced(by_bytes, False)
    )


def _is_free(node: fx.Node, label: Label) -> bool:
    """True for the calls whose dtype sensitivity may decide: on a low list, or fp32 inside their kernel."""
    is_float = label.traced is torch.float32 and label.low is not None and label.op_class is not OpClass.KEEP
    is_pinned = label.pinned is not None or node.meta.get(TIED)
    if not is_float or is_pinned or label.hazard:
        return False
    if label.op_class in (OpClass.LOW, OpClass.FOLLOW):
        return True
    # Inductor writes code that computes in fp32, whatever it reads and writes
    tags = {torch.Tag.pointwise, torch.Tag.reduction}.intersection(getattr(node.target, "tags", ()))
    return isinstance(node.target, OpOverload) and (label.op in FAST_MAY_ROUND or bool(tags))


@dataclass(frozen=True)
class PlaceBySensitivity(Pass):
    """Stands where ``place`` does when the user gives measured sensitivity.

    The op lists no longer say what may be low: a listed op stays in fp32 where its rounding adds much error, and an op
    of no list goes low where it does not. What hazards and the user's rules pin stays pinned, and what was not
    measured is as autocast has it.

    Before, and after::

        x: f32[64, 64]; w: f32[64, 64]
        mm = torch.ops.aten.matmul.default(x, w)                    # low
        square = torch.ops.aten.mul.Tensor(mm, mm)                  # promote
        mean = torch.ops.aten.mean.dim(square, [-1])                # promote
        # after, where rounding mm adds more error than is allowed
        mm = torch.ops.aten.matmul.default(x, w)                    # low in f32
        square = torch.ops.aten.mul.Tensor(mm, mm)                  # promote in f32
        mean = torch.ops.aten.mean.dim(square, [-1])                # promote in f32
    """

    #: call of this graph, with the path of its body -> what was measured
    rows: Mapping[str, CallSensitivity] = field(hash=False)
    #: how much error the graph may have, relative to torch.autocast's; the cheapest such placement is taken
    budget: float = 1.0
    #: instead of a budget, where each call is, as :meth:`PricedGraph.placement` gave it
    placement: Placement | None = field(default=None, hash=False)

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        if (found := price(gm, context, self.rows)) is None:
            return Place().call(gm, context)
        theirs = found.autocast_sensitivity
        if self.placement is not None:
            sides = found.sides(self.placement)
        else:
            (sides,) = within([found.priced], self.budget**2 * theirs, [found.autocast]).placement
        ours = found.priced.sensitivity(sides)
        low_nodes = _apply(sides, found)
        errors = f"error {math.sqrt(ours):.2e}, of autocast {math.sqrt(theirs):.2e}"
        summary = f"{low_nodes} nodes in the low dtype, {errors}"
        return PassResult(summary, len(sides), {Note.SENSITIVITY: (ours, theirs)})


def _apply(sides: Sides, found: PricedGraph) -> int:
    """Writes the sides into the plans, with what each rounding costs; returns how many calls are low."""
    terms: dict[str, list[SensitivityTerm]] = {}
    for term in found.priced.terms:
        terms.setdefault(term.call, []).append(term)
    low_nodes = 0
    for node in found.graph.nodes:
        label = label_of(node)
        if label is None or node not in sides or label.dtype is None:
            continue
        if label.op_class is not OpClass.KEEP:
            _write(label, sides[node], sides.get(rounded(node), sides[node]), found.low)
            if label.name in terms:
                is_low = sides[node] is LOW
                done = [term for term in terms[label.name] if not is_low or term.is_done(sides)]
                error = math.sqrt(sum(term.sensitivity for term in done))
                adds = Reason.of(
                    ReasonKind.ROUNDING_ADDS if is_low else ReasonKind.ROUNDING_WOULD_ADD, error=error
                )
                label.reasons += (Reason(ReasonKind.ROUNDING_OVERFLOWS) if math.isinf(error) else adds,)
        low_nodes += label.dtype is found.low
    return low_nodes


def _write(label: Label, side: bool, stored: bool, low: torch.dtype) -> None:
    if side is HIGH:
        label.dtype = torch.float32
        if stored is LOW:
            label.pinned = low
        return
    label.dtype = low
    if stored is HIGH:
        label.pinned = label.result_dtype = torch.float32
        label.reasons += (Reason.of(ReasonKind.WIDE_RESULT, low=low),)
    if label.op_class is OpClass.FP32:
        # its kernel computes in fp32 whatever it reads and writes
        label.op_class = OpClass.PROMOTE
