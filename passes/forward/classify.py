"""Give every call its class: op lists first, user rules on top."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload, op_name
from amp_fx.graphs.calls import argument_value, arguments, is_cast, tensor_nodes
from amp_fx.graphs.capture import REGION_META
from amp_fx.graphs.devices import call_device
from amp_fx.graphs.fake_runs import dtype_under_autocast
from amp_fx.graphs.regions import Region
from amp_fx.graphs.source_lines import module_path, source_line
from amp_fx.graphs.storages import in_place_target
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import LOW_DTYPES, is_eligible, tensors
from amp_fx.passes.base import RULES_META, Pass, PassContext, PassResult
from amp_fx.plans.plan import PLAN_META, NodePlan, Takes
from amp_fx.policy import OpClass, OpGroup, Origin
from amp_fx.policy.fast import LOW_IO, MAY_ROUND
from amp_fx.policy.rules import PRECISIONS, Rule
from amp_fx.policy.table import lookup

__all__ = ["Classify"]


@dataclass(frozen=True)
class Classify(Pass):
    """Labels each call ``low``, ``fp32``, ``promote``, ``follow`` or ``keep``, with the reason.

    Cases, first match wins:

    1. not an ATen op, no eligible tensor in or out, or a tensor subclass among the inputs: ``keep``.
    2. the op names its result's dtype (casts, creation, ``sum(x, dtype=...)``): ``keep``, any input.
    3. inside ``torch.autocast(enabled=False)``: ``keep``.
    4. no autocast of the user's, and every input is already low as traced: ``keep``; amp_fx lowers fp32
       programs, what the user lowered stays as written.
    5. writes in place: takes the dtype of what it writes to, as eager autocast does.
    6. a user rule; the last one that matches.
    7. the device's list; else ``keep``.

    Before::

        linear = torch.ops.aten.linear.default(x, weight, bias)         # f32
        softmax = torch.ops.aten.softmax.int(linear, -1)                # f32

    After, on CUDA (nodes unchanged, ``meta["amp_fx"]`` added)::

        linear      low    GEMM: tensor cores take 16-bit operands
        softmax     fp32   exponentials and their sum leave the low range
    """

    name: ClassVar[str] = "classify"
    needs: ClassVar[frozenset[str]] = frozenset({"explicit-dtypes"})
    ensures: ClassVar[frozenset[str]] = frozenset({"classes"})

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        counts: Counter[str] = Counter()
        matched: set[Rule] = set()
        for node in gm.graph.nodes:
            if node.op not in ("call_function", "call_method"):
                continue
            plan = _label(node, context, matched)
            node.meta[PLAN_META] = plan
            counts[plan.op_class.value] += 1
        gm.meta[RULES_META] = matched
        summary = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        return PassResult(gm, sum(counts.values()), summary or "no calls")


def _label(node: fx.Node, context: PassContext, matched: set[Rule]) -> NodePlan:
    inputs = [
        source.meta["val"]
        for _, value in arguments(node)
        for source in tensor_nodes(value)
        if is_eligible(source.meta.get("val"))
    ]
    outputs = [value for value in tensors(node.meta.get("val")) if is_eligible(value)]
    regions: Mapping[str, Region] = node.meta.get(REGION_META, {})
    device = call_device(inputs + outputs, regions)
    region = None if device is None else regions[device]
    op = op_name(node.target) if isinstance(node.target, OpOverload) else _target_name(node)
    plan = NodePlan(
        name=f"{context.path}{node.name}",
        op=op,
        module_path=module_path(node),
        op_class=OpClass.KEEP,
        reason="",
        source=source_line(node),
        traced=outputs[0].dtype if outputs else None,
        low=region.dtype if region else None,
    )

    def keep(reason: str, takes: str = Takes.TRACED) -> NodePlan:
        plan.reason, plan.takes, plan.dtype = reason, takes, plan.traced
        return plan

    if getattr(node.target, "__name__", "") == "getitem":
        plan.op_class = OpClass.FOLLOW if outputs else OpClass.KEEP
        plan.takes, plan.reason = Takes.ANY, "an element of its producer's result"
        return plan
    if not isinstance(node.target, OpOverload):  # case 1
        return keep("not an ATen op: left as traced")
    if device is None or region is None:
        return keep("no floating tensor that autocast may re-type")
    if any(
        _chooses_dtype(value) for source in node.all_input_nodes for value in tensors(source.meta.get("val"))
    ):
        return keep("takes a tensor subclass, which has its own dtype")
    if is_cast(node):  # case 2
        return keep("the program's own cast", Takes.ANY)
    if argument_value(node, "dtype") is not None or (not inputs and outputs):
        return keep("the program names the dtype of the result", Takes.ANY)
    if has_trait(node, Trait.OWN_DTYPES):
        return keep("returns each argument in its own dtype")
    if not region.enabled:  # case 3
        return keep("inside torch.autocast(enabled=False)")
    if not region.by_user and inputs and all(value.dtype is not torch.float32 for value in inputs):  # case 4
        return keep("already low as the program wrote it")
    if in_place_target(node) is not None:  # case 5
        return _label_write(plan, node, node.target)
    rules = context.policy.matching(plan.op, plan.module_path)
    matched.update(rules)
    if rules:  # case 6
        return _label_by_rule(plan, rules[-1], lookup(node.target, device))
    return _label_from_lists(plan, node, node.target, context, device)  # case 7


def _label_write(plan: NodePlan, node: fx.Node, op: OpOverload) -> NodePlan:
    """In-place ops are on no list: autocast leaves them in the dtype of what they write to."""
    row = _row(_functional(op), node)
    plan.op_class = OpClass.PROMOTE
    plan.takes = Takes.MIXED if row is not None and row.mixes else Takes.SELF
    plan.reason = "writes in place: runs in the dtype of what it writes to"
    plan.tied = True
    return plan


def _label_by_rule(plan: NodePlan, rule: Rule, row: OpGroup | None) -> NodePlan:
    plan.op_class, plan.takes, plan.reason = PRECISIONS[rule.precision], Takes.DTYPE, f"user rule {rule}"
    plan.own_dtype_slots = row.own_dtype_slots if row is not None else ()
    return plan


def _label_from_lists(
    plan: NodePlan, node: fx.Node, op: OpOverload, context: PassContext, device: str
) -> NodePlan:
    row = lookup(op, device)
    if row is not None and any(argument_value(node, name) is not None for name in row.unless_given):
        row = None
    if row is None:
        plan.reason, plan.dtype = "not on the op lists: left as traced", plan.traced
        return plan
    plan.op_class, plan.reason, plan.own_dtype_slots = row.op_class, row.reason, row.own_dtype_slots
    plan.takes = Takes.MIXED if row.mixes else Takes.DTYPE
    if (
        has_trait(node, Trait.SOMETIMES_MATMUL)
        and row.origin is Origin.COMPOSITE
        and not _rounds(node, device, plan)
    ):
        plan.op_class, plan.reason = (
            OpClass.PROMOTE,
            "no matrix product in these shapes: autocast casts nothing",
        )
    if context.policy.base == "fast" and plan.op in MAY_ROUND:
        plan.may_round = True
        if plan.op in LOW_IO and plan.op_class is OpClass.FP32:
            plan.op_class, plan.own_dtype_slots = OpClass.PROMOTE, ("weight", "bias")
            plan.reason = f"{row.reason}; policy fast: fp32 inside the kernel, low in and out"
    return plan


def _rounds(node: fx.Node, device_type: str, plan: NodePlan) -> bool:
    """Whether torch.autocast casts inside a call, which depends on what it comes down to.

    ``torch.inner`` of two vectors is ``dot``, which no list names; ``einsum("bi,bj->bij")`` is a multiplication.
    """
    return dtype_under_autocast(node, device_type, plan.low) is plan.low


def _row(op: OpOverload | None, node: fx.Node) -> OpGroup | None:
    value = node.meta.get("val")
    return lookup(op, value.device.type) if op is not None and isinstance(value, torch.Tensor) else None


def _functional(op: OpOverload) -> OpOverload | None:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``."""
    packet = getattr(torch.ops.aten, op._schema.name.removeprefix("aten::").removesuffix("_"), None)
    return getattr(packet, op._overloadname, None)


def _chooses_dtype(value: torch.Tensor) -> bool:
    """A tensor of a dtype that amp_fx places, but of a type or layout that it does not."""
    return value.dtype in (torch.float32, *LOW_DTYPES) and not is_eligible(value)


def _target_name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
