"""Take the precision of every value from one exact minimum cut, or from a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import torch
import torch.fx as fx

from amp_fx.graphs.keys import MAY_ROUND
from amp_fx.graphs.values import in_place_target
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.forward.network import Network, dtype_as_autocast, place_as_autocast, rounded
from amp_fx.precision.placement.attention import refusal
from amp_fx.precision.placement.cost import CostModel
from amp_fx.precision.placement.cut import HIGH, LOW, Problem, Var, solve
from amp_fx.precision.plans.label import Label, Reason, ReasonKind, label_of
from amp_fx.precision.plans.plan import NodePlan
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.table import device_row

#: what a call takes from its row in a plan
_DECIDED = (
    "op_class", "reasons", "dtype", "takes", "own_dtype_slots", "pinned", "result_dtype", "computed_by", "hazard",
    "levels", "scales", "equalisation",
)  # fmt: skip
#: and where the row is that of another operator of its kind, which is called otherwise
_OF_OTHERS = "reasons", "dtype", "levels", "scales", "equalisation"


@dataclass(frozen=True)
class Place(Pass):
    """Gives every node the dtype it computes in and produces.

    First as eager autocast would: ``low`` and ``fp32`` ops from the lists, ``keep`` ops as traced,
    ``promote`` and ``follow`` ops in the widest dtype among their inputs. Then an exact minimum cut re-sides
    what may move without losing accuracy:

    1. a ``promote`` op that autocast runs low may run in fp32.
    2. a ``follow`` op may run in either, as long as nobody who would have read fp32 reads a rounded value.
    3. a ``low`` op may run in fp32 where the device profile says that its casts cost more than it gains.
    4. under policy ``fast``, ops of ``FAST_MAY_ROUND`` (``amp_fx/precision/policy/common.py``) may store low what
       autocast has in fp32, but not what the same kernel reads in fp32.

    Nothing is rounded for its bytes alone: where no low product reads a value or returns it, it stays in fp32.

    Costs are those of :class:`amp_fx.precision.placement.cost.CostModel`: copies that reach memory, stand-alone casts,
    arithmetic. A tie goes to fewer casts, then to fewer bytes cast, then, for a view, to what autocast has, then to
    fp32. (Inductor fuses the sum of a bias's gradient with what makes it less often where a view stands behind a cast.)
    ``numerics="eager"`` keeps autocast's own placement, and so does a graph with two low dtypes.

    Before, and after::

        q: f32[8, 4, 512, 512]; kv: f32[8, 1, 512, 64]
        e = torch.ops.aten.expand.default(kv, [8, 4, 512, 64])      # follow
        mm = torch.ops.aten.matmul.default(q, e)                    # low
        # after: the cast to bf16 stands before the expand, and moves a quarter of the elements
        e = torch.ops.aten.expand.default(kv, [8, 4, 512, 64])      # follow in bf16
        mm = torch.ops.aten.matmul.default(q, e)                    # low in bf16
    """

    stored: bool = False  # the program is stored, with attention as it is

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        placed, low = place_as_autocast(gm.graph)
        moved = 0
        if context.numerics != "eager" and low is not None:
            known = context.profile, context.training, context.folded
            cost = CostModel(
                gm.graph, *known, writes_attention=not self.stored, times_calls=context.times_calls
            )
            problem = Network(gm.graph, cost, low).build()
            sides = solve(problem)
            moved = _apply(sides, placed, low, _widen_idle(sides, problem), cost.timed(low))
        low_nodes = sum(label.dtype is not None and label.dtype == label.low for _, label in placed)
        return PassResult(f"{low_nodes} nodes in the low dtype, {moved} moved by the cut", len(placed))


def _widen_idle(sides: dict[Var, bool], problem: Problem) -> set[Var]:
    """Has in fp32, and returns, what is low with no low product on either side: there to round saves bytes at best."""
    import networkx as nx

    casts = (term for term in problem.shared if term.value is not None)
    pairs = [*problem.implies, *((term.value, reader) for term in casts for reader in term.readers)]
    lows = nx.Graph()
    lows.add_nodes_from(var for var, side in sides.items() if side is LOW)
    lows.add_edges_from((a, b) for a, b in pairs if a in lows and b in lows)
    idle = set[Var]()
    for region in nx.connected_components(lows):
        if not any(problem.pins.get(var) is LOW or _is_low_itself(var) for var in region):
            idle |= region
    sides |= dict.fromkeys(idle, HIGH)
    return idle


def _is_low_itself(var: Var) -> bool:
    """True for products, and for what policy ``fast`` rounds to save bytes."""
    if not isinstance(var, fx.Node):
        return True
    label = label_of(var)
    return bool(var.meta.get(MAY_ROUND)) or (label is not None and label.op_class is OpClass.LOW)


def _apply(
    sides: dict[Var, bool],
    placed: list[tuple[fx.Node, Label]],
    low: torch.dtype,
    idle: Collection[Var],
    timed: Mapping[fx.Node, tuple[float, float]],
) -> int:
    """Writes the sides of the cut into the labels; returns how many differ from autocast's."""
    moved = 0
    for node, label in placed:
        if node not in sides or label.dtype is None or label.op_class is OpClass.KEEP:
            continue
        if sides.get(rounded(node), HIGH) is LOW:
            label.pinned = low
            label.reasons += (Reason.of(ReasonKind.ROUNDED_AT_ONCE, low=low),)
            moved += 1
        dtype = torch.float32 if sides[node] is HIGH else low
        if dtype is not label.dtype:
            why = _why(label, dtype, timed.get(node, (0.0, 0.0)))
            label.reasons += (Reason.of(ReasonKind.IDLE, low=low) if node in idle else why,)
            label.dtype = dtype
            moved += 1
    return moved


def _why(label: Label, dtype: torch.dtype, seconds: tuple[float, float]) -> Reason:
    """Why the cut computes a call in another dtype than autocast; ``seconds``: in fp32 and low, where it was timed."""
    wide, narrow = seconds
    if label.op_class is OpClass.LOW and wide < narrow:
        times = {"wide": f"{1e3 * wide:.3g}", "narrow": f"{1e3 * narrow:.3g}"}
        return Reason.of(ReasonKind.SLOWER_LOW, low=label.low, **times)
    if label.op_class is OpClass.LOW:
        return Reason.of(ReasonKind.CASTS_COST_MORE, low=label.low)
    if label.op_class is OpClass.FOLLOW:
        return Reason.of(ReasonKind.CHEAPER, dtype=dtype)
    return (
        Reason(ReasonKind.NO_DEARER)
        if dtype is torch.float32
        else Reason.of(ReasonKind.STORED_LOW, low=dtype)
    )


@dataclass(frozen=True)
class Replay(Pass):
    """Stands where ``place`` does when the user gives a plan.

    Before, and after::

        kv: f32[8, 1, 512, 64]
        e = torch.ops.aten.expand.default(kv, [8, 4, 512, 64])      # follow
        # after, where the plan has bf16 for the call
        e = torch.ops.aten.expand.default(kv, [8, 4, 512, 64])      # follow in bf16

    A product whose result the plan has in fp32 runs in fp32 where no kernel reads low operands and returns that, and
    attention by the flash kernel where products cannot compute it: the plan may be of a call whose sizes were known.
    """

    #: node name in this graph, with the path of its body -> what the plan has decided about it
    rows: Mapping[str, NodePlan] = field(hash=False)
    stored: bool = False  # the program is stored, for any runtime: none has an op that returns such a result

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        followed = 0
        for node in gm.graph.nodes:
            label = label_of(node)
            if label is None:
                continue
            row = self.rows.get(label.name)
            is_other = row is not None and row.op != label.op
            if row is None or (
                is_other and (label.op_class is OpClass.KEEP or in_place_target(node) is not None)
            ):
                # the plan is not about it, or it only hands on, or returns complex numbers or comparisons
                label.dtype = dtype_as_autocast(node, label)
                continue
            pinned = label.pinned if label.result_dtype is None else None
            for name in _OF_OTHERS if is_other else _DECIDED:
                setattr(label, name, getattr(row, name))
            # what shares a storage here may not have done so there
            label.pinned = pinned or label.pinned
            followed += 1
            by_products = row.computed_by.startswith("products")
            if by_products and (why_not := refusal(node, training=context.training)):
                label.computed_by = "flash"
                label.reasons += (Reason(ReasonKind.FLASH), Reason(why_not))
            if row.result_dtype is None:
                continue
            where = "a program" if self.stored else node.meta["val"].device.type
            if not device_row(where).wide_results:
                why = Reason.of(ReasonKind.NO_WIDE_RESULT, device=where, op=label.op, low=label.low)
                label.op_class, label.dtype, label.result_dtype = OpClass.FP32, torch.float32, None
                label.reasons += (why,)
        return PassResult(f"{followed} nodes as the plan has them", followed)
