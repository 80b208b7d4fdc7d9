"""What roundings cost in accuracy, as terms of the cut: which of them happen in compiled code, and what they add.

A fused kernel computes in fp32, whatever the dtypes of its graph say. So a value is rounded where it is written to
memory low, or where a library kernel (matmul, convolution, attention) reads it low:

1. the result of a library kernel that runs low, unless it returns its fp32 sum, and a fused value that is written low:
   for all who read it, as the backward of those that are fused with it reads it from memory;
2. an operand of such a kernel that is kept in fp32 elsewhere;
3. a fused value that is kept in fp32, and written low for one reader.

The gradient of a value is rounded where it is handed back by a library kernel that runs low (4), where such a kernel
takes it as the gradient of its result (5), and where it is kept in memory between two kernels in the dtype of a value
that is stored low (6). A gradient that arrives rounded is not rounded again.

Kernels of attention round operands of the matmuls inside them (7; ``amp_fx/calibration/attention.py``).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload
from amp_fx.graphs.calls import is_parameter
from amp_fx.graphs.keys import LABEL, MAY_ROUND, TIED
from amp_fx.graphs.storages import in_place_target
from amp_fx.graphs.traits import op_row
from amp_fx.passes.forward.classify import may_return_wide
from amp_fx.passes.forward.place import Network, is_shaped, named_arguments, rounded
from amp_fx.passes.forward.sensitivity_memory import Memory
from amp_fx.placement.cost import CostModel
from amp_fx.placement.cut import HIGH, LOW, Var
from amp_fx.placement.priced import SensitivityTerm
from amp_fx.plans.label import Label, label_of
from amp_fx.plans.sensitivity import INSIDE, CallSensitivity, as_number, slots
from amp_fx.policy import OpClass
from amp_fx.policy.common import FAST_LOW_IO, FAST_MAY_ROUND

__all__ = ["SensitivityNetwork", "free_nodes"]


def free_nodes(
    graph: fx.Graph, rows: Mapping[str, CallSensitivity], fixed: frozenset[fx.Node] = frozenset()
) -> set[fx.Node]:
    """The calls whose dtype sensitivity decides: measured, and on a low list or fp32 inside their kernel.

    Args:
        graph: classified, hazards pinned.
        rows: what was measured, by the call's name.
        fixed: calls that the user's rules or a hazard have pinned.
    """
    return {
        node
        for node in graph.nodes
        if (plan := label_of(node)) is not None
        and plan.name in rows
        and node not in fixed
        and not TIED.of(node)
        and plan.pinned is None
        and plan.traced is torch.float32
        and plan.low is not None
        and plan.op_class is not OpClass.KEEP
        and (plan.op_class in (OpClass.LOW, OpClass.FOLLOW) or _is_generated(node, plan))
    }


def _is_generated(node: fx.Node, plan: Label) -> bool:
    """True for calls that Inductor writes code for: it computes in fp32, whatever the calls read and write."""
    if not isinstance(node.target, OpOverload):
        return False
    tags = {torch.Tag.pointwise, torch.Tag.reduction}
    return plan.op in FAST_MAY_ROUND or not tags.isdisjoint(node.target.tags)


class SensitivityNetwork(Network):
    """The cut's problem where measured sensitivity, not the op lists, says what may be low."""

    def __init__(
        self,
        graph: fx.Graph,
        cost: CostModel,
        low: torch.dtype,
        rows: Mapping[str, CallSensitivity],
        free: set[fx.Node],
    ) -> None:
        super().__init__(graph, cost, low)
        self._rows = rows
        self._free = free
        self.terms: list[SensitivityTerm] = []
        self._memory = Memory(graph, cost, rows)
        #: low products whose results may be rounded or not
        self._wide = {node for node in free if cost.is_external(node) and may_return_wide(node)}
        for node in free:
            plan = node.meta[LABEL]
            MAY_ROUND.set(node, True)
            if plan.op in FAST_LOW_IO:
                plan.own_dtype_slots = tuple(dict.fromkeys((*plan.own_dtype_slots, "weight", "bias")))

    @property
    def scale(self) -> int:
        """Units of the problem that are one unit of time; less than that only breaks ties."""
        return self._scale

    def _widens(self, reader: fx.Node, plan: Label, value: fx.Node) -> bool:
        # what the other inputs are is not known before the cut
        return in_place_target(reader) is not None or not is_shaped(value)

    def _demand(self, reader: fx.Node, name: str, value: fx.Node) -> Var | None:
        if reader in self._wide and self._is_summed(reader.meta[LABEL], name):
            # added to the sum as it is stored
            return rounded(reader)
        return super()._demand(reader, name, value)

    def operations(self) -> dict[Var, tuple[int, int]]:
        """What library kernels compute where no profile says how long that takes, in bytes moved meanwhile."""
        return {
            node: self._cost.nominal_arithmetic(node, self._low)
            for node in self._free
            if node.meta[LABEL].op_class is OpClass.LOW
        }

    def _add_label(self, node: fx.Node, plan: Label) -> None:
        super()._add_label(node, plan)
        if node in self._wide:
            self._problem.implies.append((node, rounded(node)))
        row = self._rows.get(plan.name)
        if row is not None and row.value is None and node in self._free and in_place_target(node) is None:
            # fused it would not be rounded, but a file may run where nothing is fused
            self._problem.pins[self._stored(node)] = HIGH

    def _stored(self, node: fx.Node) -> Var:
        # what is computed in fp32 is stored so; what is multiplied low may be
        return rounded(node) if node in self._wide else super()._stored(node)

    def _add_value(self, value: fx.Node) -> None:
        super()._add_value(value)
        stored = self._stored(value)
        for reader in value.users:
            self._charge_read(value, reader, stored)
        self._charge_result(value, stored)

    def _charge_read(self, value: fx.Node, reader: fx.Node, stored: Var) -> None:
        """Cases 2, 3 and 4."""
        plan = label_of(reader)
        row = None if plan is None else self._rows.get(plan.name)
        found = next((slot for slot in slots(reader) if slot[2] is value), None)
        if plan is None or row is None or found is None or found[0] not in row.reads:
            return
        slot, argument, _ = found
        sensitivity, want = row.reads[slot], self._demand(reader, argument, value)
        if self._cost.is_stored(value):
            converts = self._converts_alone(reader)
        else:
            converts = self._cost.reads_memory(reader, value)
        if converts and want is not None:
            self._charge(as_number(sensitivity.value), LOW, want, stored, plan.name, slot, backward=False)
        is_library = plan.op_class is OpClass.LOW and want is not None
        if is_library and not self._is_summed(plan, argument) and not self._leaves_wide(value, plan):
            self._charge(as_number(sensitivity.gradient), LOW, want, None, plan.name, slot, backward=True)

    def _charge_inside(self, node: fx.Node, plan: Label, row: CallSensitivity) -> None:
        """Case 7."""
        for slot in INSIDE:
            if found := row.reads.get(slot):
                for sensitivity, backward in ((found.value, False), (found.gradient, True)):
                    self._charge(as_number(sensitivity), LOW, node, None, plan.name, slot, backward=backward)

    def _charge_result(self, value: fx.Node, stored: Var) -> None:
        """Cases 1, 5 and 6."""
        plan = label_of(value)
        row = None if plan is None else self._rows.get(plan.name)
        if plan is None or row is None:
            return
        self._charge_inside(value, plan, row)
        if plan.op_class is OpClass.LOW or self._memory.writes_value(value):
            self._charge(as_number(row.value), LOW, stored, None, plan.name, "", backward=False)
        if not self._memory.writes_gradient(value):
            return
        gradient, want = as_number(row.gradient), self._rounded_by(value)
        # matmuls round what they read, whatever the dtype of the result
        rounds = value if plan.op_class is OpClass.LOW else stored
        if want is not None:
            self._charge(gradient, HIGH, want, rounds, plan.name, "", backward=True)
        else:
            self._charge(gradient, LOW, rounds, None, plan.name, "", backward=True)

    def _rounded_by(self, value: fx.Node) -> Var | None:
        """The variable of the call behind a value from which its gradient comes rounded, if that call is low."""
        if len(value.users) != 1:
            return None
        (reader,) = value.users
        plan = label_of(reader)
        if plan is None or plan.dtype is None:
            return None
        if plan.op_class is OpClass.LOW:
            names = [name for name, given in named_arguments(reader) if given is value]
            return None if any(self._is_summed(plan, name) for name in names) else reader
        if not self._memory.passes_on(reader, value):
            return None
        return self._stored(reader) if self._memory.writes_gradient(reader) else self._rounded_by(reader)

    def _is_summed(self, plan: Label, argument: str) -> bool:
        return argument in ("bias", op_row(plan.op).addend)

    def _leaves_wide(self, value: fx.Node, plan: Label) -> bool:
        """On CUDA the gradient of a matmul's weight leaves its kernel in fp32 (``gemm_epilogue``).

        That of a weight with several readers is a sum of gradients, which another kernel reads.
        """
        if "conv" in plan.op or "attention" in plan.op or len(value.users) > 1:
            return False
        if self._cost.is_view(value):
            return self._leaves_wide(value.all_input_nodes[0], plan)
        tensor = value.meta.get("val")
        return isinstance(tensor, torch.Tensor) and tensor.device.type == "cuda" and is_parameter(value)

    def _charge(
        self,
        sensitivity: float,
        label: bool,
        var: Var,
        against: Var | None,
        call: str,
        slot: str,
        *,
        backward: bool,
    ) -> None:
        if sensitivity:
            self.terms.append(SensitivityTerm(sensitivity, label, var, against, call, slot, backward))
