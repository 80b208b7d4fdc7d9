"""Give every call its class: op lists first, user rules on top; before that, implied dtypes are written down."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload, op_name
from amp_fx.graphs.calls import (
    argument_value,
    functional,
    is_cast,
    is_data,
    is_layout,
    module_path,
    source_line,
    target_name,
    tensor_arguments,
)
from amp_fx.graphs.fake_runs import dtype_under_autocast
from amp_fx.graphs.keys import LABEL, MAY_ROUND, REGION_META, STEP_META, TIED, TRACED_META
from amp_fx.graphs.regions import Region
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import (
    LOW_DTYPES,
    call_device,
    dtypes_and_sizes,
    in_place_target,
    is_eligible,
    tensors,
)
from amp_fx.passes.base import Note, Pass, PassContext, PassResult
from amp_fx.precision.plans.label import Label, Reason, ReasonKind, Takes
from amp_fx.precision.policy import OpClass, OpGroup, Origin
from amp_fx.precision.policy.common import FAST_LOW_IO, FAST_MAY_ROUND
from amp_fx.precision.policy.rules import PRECISIONS, Rule
from amp_fx.precision.policy.table import device_row, lookup


@dataclass(frozen=True)
class PinDtypes(Pass):
    """Makes every creation and conversion name its dtype.

    Once values are re-typed, ``zeros_like(x)`` and ``y.type_as(x)`` would follow ``x``; the program meant the
    dtype it was traced with. Cases:

    1. ``zeros_like(x)`` and its kin get ``dtype=``.
    2. ``type_as`` and the other spellings of a pure conversion become ``torch.ops.aten.to.dtype``.

    Before, and after::

        x: f32[4]; y: bf16[4]
        zeros = torch.ops.aten.zeros_like.default(x)
        as_x = torch.ops.aten.type_as.default(y, x)
        return [zeros, as_x]
        # after
        zeros = torch.ops.aten.zeros_like.default(x, dtype=torch.float32)
        as_x = torch.ops.aten.to.dtype(y, torch.float32)
        return [zeros, as_x]
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        pinned = 0
        for node in gm.graph.nodes:
            value = node.meta.get("val")
            if not is_eligible(value):
                continue
            if has_trait(node, Trait.IMPLIED_DTYPE) and node.kwargs.get("dtype") is None:  # case 1
                node.kwargs = {**node.kwargs, "dtype": value.dtype}
                pinned += 1
            elif has_trait(node, Trait.IMPLIED_CAST):  # case 2
                node.target = torch.ops.aten.to.dtype
                node.args, node.kwargs = (node.args[0], value.dtype), {}
                pinned += 1
        return PassResult(f"{pinned} implied dtypes written down", pinned)


@dataclass(frozen=True)
class Classify(Pass):
    """Labels each call ``low``, ``fp32``, ``promote``, ``follow`` or ``keep``, with the reason.

    Cases, first match wins:

    1. not an ATen op, no eligible tensor in or out, or a tensor subclass among the inputs: ``keep``.
    2. the op names its result's dtype (casts, creation, ``sum(x, dtype=...)``): ``keep``, any input; only ops that
       are known to convert first. What reads bits (``x.view(torch.int32)``), or takes one dtype alone: ``keep``.
    3. inside ``torch.autocast(enabled=False)``: ``keep``.
    4. no autocast of the user's, and every input is already low as traced: ``keep``; amp_fx lowers fp32
       programs, what the user lowered stays as written.
    5. writes in place: takes the dtype of what it writes to, as eager autocast does.
    6. makes complex numbers of real ones, and is not listed as fp32: ``keep``.
    7. a user rule; the last one that matches. One that wants the result in fp32 leaves a call in fp32 where no kernel
       multiplies low operands and returns that.
    8. the device's list; else ``keep``.

    Before, and after::

        x: f32[2, 4]; weight: f32[4, 4]
        linear = torch.ops.aten.linear.default(x, weight)
        softmax = torch.ops.aten.softmax.int(linear, -1)
        # after, on CUDA
        linear = torch.ops.aten.linear.default(x, weight)       # f32[2, 4]; low: listed
        softmax = torch.ops.aten.softmax.int(linear, -1)        # f32[2, 4]; fp32: listed
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        counts, matched = Counter[str](), set[Rule]()
        for node in gm.graph.nodes:
            if node.op not in ("call_function", "call_method") or STEP_META in node.meta:
                continue
            label = _label(node, context, matched)
            node.meta[LABEL], node.meta[TRACED_META] = label, dtypes_and_sizes(node)
            counts[label.op_class.value] += 1
        summary = ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))
        return PassResult(summary or "no calls", counts.total(), {Note.MATCHED: matched})


def _label(node: fx.Node, context: PassContext, matched: set[Rule]) -> Label:
    """The label of a call; the user's rules that are about it are added to ``matched``."""
    inputs = [n.meta["val"] for _, n in tensor_arguments(node) if is_eligible(n.meta.get("val"))]
    outputs = [value for value in tensors(node.meta.get("val")) if is_eligible(value)]
    regions: Mapping[str, Region] = node.meta.get(REGION_META, {})
    device = call_device(inputs + outputs, regions)
    region = None if device is None else regions[device]
    op = op_name(node.target) if isinstance(node.target, OpOverload) else target_name(node)
    label = Label(
        name=f"{context.path}{node.name}",
        op=op,
        module_path=module_path(node),
        op_class=OpClass.KEEP,
        source=source_line(node),
        traced=outputs[0].dtype if outputs else None,
        low=region.dtype if region else None,
    )

    def keep(kind: ReasonKind, takes: str = Takes.TRACED) -> Label:
        label.reasons, label.takes, label.dtype = (Reason(kind),), takes, label.traced
        return label

    if getattr(node.target, "__name__", "") == "getitem":
        label.op_class = OpClass.FOLLOW if outputs else OpClass.KEEP
        label.takes, label.reasons = Takes.ANY, (Reason(ReasonKind.ELEMENT),)
        return label
    if (is_layout(node) or is_data(node)) and inputs:
        kind = ReasonKind.LAYOUT if is_layout(node) else ReasonKind.SHARED_STORAGE
        label.op_class, label.takes, label.reasons = OpClass.FOLLOW, Takes.DTYPE, (Reason(kind),)
        return label
    if not isinstance(node.target, OpOverload):  # case 1
        return keep(ReasonKind.NOT_ATEN)
    if device is None or region is None:
        return keep(ReasonKind.NOT_FLOATING)
    given = [value for source in node.all_input_nodes for value in tensors(source.meta.get("val"))]
    # of a dtype that amp_fx places, but of a type or layout that it does not
    if any(value.dtype in (torch.float32, *LOW_DTYPES) and not is_eligible(value) for value in given):
        return keep(ReasonKind.SUBCLASS)
    if is_cast(node):  # case 2
        return keep(ReasonKind.CAST, Takes.ANY)
    converts = has_trait(node, Trait.CONVERTS) and argument_value(node, "dtype") is not None
    if converts or (not inputs and outputs):
        return keep(ReasonKind.NAMES_DTYPE, Takes.ANY)
    if has_trait(node, Trait.READS_BITS, Trait.WANTS_DTYPE):
        return keep(ReasonKind.DEPENDS_ON_DTYPE)
    if has_trait(node, Trait.OWN_DTYPES):
        return keep(ReasonKind.OWN_DTYPES)
    if not region.enabled:  # case 3
        return keep(ReasonKind.REGION)
    if not region.by_user and inputs and all(value.dtype is not torch.float32 for value in inputs):  # case 4
        return keep(ReasonKind.LOW_ALREADY)
    if in_place_target(node) is not None:  # case 5
        return _label_write(label, node, node.target)
    rules = context.policy.matching(label.op, label.module_path)
    matched.update(rules)
    row = lookup(node.target, device)
    makes_complex = inputs and any(value.is_complex() for value in tensors(node.meta.get("val")))
    if makes_complex and (row is None or row.op_class is not OpClass.FP32):  # case 6
        return keep(ReasonKind.COMPLEX)
    if rules and not makes_complex:  # case 7
        rule = rules[-1]
        label.op_class, label.takes = PRECISIONS[rule.precision], Takes.DTYPE
        label.reasons = (Reason.of(ReasonKind.RULE, rule=str(rule)),)
        label.own_dtype_slots = row.own_dtype_slots if row is not None else ()
        if rule.result is None:
            return label
        if may_return_wide(node):
            label.pinned = label.result_dtype = torch.float32
            label.reasons += (Reason.of(ReasonKind.WIDE_RESULT, low=label.low),)
        else:
            label.op_class = OpClass.FP32
            label.reasons += (
                Reason.of(ReasonKind.NO_WIDE_RESULT, device=device, op=label.op, low=label.low),
            )
        return label
    return _from_lists(label, node, row, context, device)  # case 8


def _label_write(label: Label, node: fx.Node, op: OpOverload) -> Label:
    """In-place ops are on no list: autocast leaves them in the dtype of what they write to."""
    value, row = node.meta.get("val"), None
    out_of_place = functional(op)
    if out_of_place is not None and isinstance(value, torch.Tensor):
        row = lookup(out_of_place, value.device.type)
    label.op_class = OpClass.PROMOTE
    label.takes = Takes.MIXED if row is not None and row.mixes else Takes.SELF
    label.reasons = (Reason(ReasonKind.WRITES),)
    node.meta[TIED] = True
    return label


def may_return_wide(node: fx.Node) -> bool:
    """True for a product of which a kernel reads low operands and returns the sum in fp32."""
    given = [source.meta.get("val") for _, source in tensor_arguments(node)]
    return (
        has_trait(node, Trait.WIDE_GRADIENT)
        and device_row(node.meta["val"].device.type).wide_results
        and sum(is_eligible(value) and value.ndim > 1 for value in given) > 1
        and all(argument_value(node, name) is None for name in ("alpha", "beta"))
    )


def _from_lists(label: Label, node: fx.Node, row: OpGroup | None, context: PassContext, device: str) -> Label:
    if row is None or any(argument_value(node, name) is not None for name in row.unless_given):
        label.reasons, label.dtype = (Reason(ReasonKind.UNLISTED),), label.traced
        return label
    label.op_class, label.own_dtype_slots = row.op_class, row.own_dtype_slots
    label.reasons = (Reason.of(ReasonKind.LISTED, why=row.reason),)
    label.takes = Takes.MIXED if row.mixes else Takes.DTYPE
    # torch.inner of two vectors is dot, which no list names; einsum("bi,bj->bij") is a multiplication
    may_be_none = has_trait(node, Trait.SOMETIMES_MATMUL) and row.origin is Origin.COMPOSITE
    if may_be_none and dtype_under_autocast(node, device, label.low) is not label.low:
        label.op_class, label.reasons = OpClass.PROMOTE, (Reason(ReasonKind.NO_MATMUL),)
    if context.policy.base == "fast" and label.op in FAST_MAY_ROUND:
        node.meta[MAY_ROUND] = True
        if label.op in FAST_LOW_IO and label.op_class is OpClass.FP32:
            label.op_class, label.own_dtype_slots = OpClass.PROMOTE, ("weight", "bias")
            label.reasons += (Reason(ReasonKind.LOW_IO),)
    return label
