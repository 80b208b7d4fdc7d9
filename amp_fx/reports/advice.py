"""What the data of plans suggests to change.

Everything here is read off plans; what has a remedy carries it as options that can be pasted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_fx.plans.label import Kind
from amp_fx.plans.plan import CastPlan, NodePlan, Plan
from amp_fx.plans.reading import unused_rules
from amp_fx.policy import OpClass
from amp_fx.reports.remedies import origin_of, starred, with_rule

__all__ = [
    "NOT_COMPILED",
    "UNUSED_RULE",
    "Advice",
    "advise",
    "layout_advice",
    "scaling_advice",
    "weight_advice",
]

#: the kind of advice about code that never became a graph
NOT_COMPILED = "not compiled"

#: the kind of advice about a rule that is about nothing
UNUSED_RULE = "rule"

#: tensor cores read operands in rows of 16 bytes
_ALIGNMENT = 8

#: share of a weight that may become zero in fp16 before it is worth a line
_LOST = 0.01


@dataclass(frozen=True)
class Advice:
    """One thing worth changing.

    Attributes:
        kind: ``"not compiled"``, ``"rule"``, ``"torch.func"``, ``"dimensions"``, ``"small"``, ``"island"``,
            ``"weights"``, ``"scaling"``, ``"layout"``, ``"fallback"`` or ``"graph break"``.
        text: what was found, and where.
        options: what to add to ``torch.compile(..., options=...)``; empty where code has to change.
        remedy: what to change in the code; empty where ``options`` or ``text`` say it.
    """

    kind: str
    text: str
    options: dict[str, Any] = field(default_factory=dict)
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.text}: options={self.options}" if self.options else self.text
        return f"{text}. {self.remedy}" if self.remedy else text


def advise(plans: Sequence[Plan]) -> list[Advice]:
    """What the data suggests, most useful first."""
    found = [
        Advice("fallback", f"graph {plan.graph} is not rewritten: {plan.fallback}")
        for plan in plans
        if plan.fallback
    ]
    found += [Advice(UNUSED_RULE, text) for text in unused_rules(plans)]
    forward = [plan for plan in plans if plan.phase == "forward"]
    found += _untouched(forward)
    found += _islands(forward)
    found += _unaligned(forward)
    found += _small(forward)
    found += [
        Advice(
            "graph break", f"graph break after graph {plan.graph}, fp32 tensors cross it: {plan.graph_break}"
        )
        for plan in forward
        if plan.graph_break
    ]
    return found


def scaling_advice(plans: Sequence[Plan]) -> list[Advice]:
    """What training in fp16 needs where gradients are not scaled; nothing without a backward."""
    trained = [plan for plan in plans if plan.training and plan.phase == "forward"]
    if not any(node.dtype is torch.float16 for plan in trained for node in plan.nodes):
        return []
    text = (
        "gradients below 6e-8 become zero in float16; unless torch.amp.GradScaler scales them, make an"
        " amp_fx.GradScaler"
    )
    return [Advice("scaling", text, {"dtype": "float16", "scaler": "default"})]


def layout_advice(plans: Sequence[Plan], weights: Mapping[str, torch.Tensor]) -> list[Advice]:
    """Convolutions in 16 bits run channels last: weights that are not are laid out again in every training step.

    Args:
        plans: of the graphs that read the weights.
        weights: parameters by name.
    """
    trained = [plan for plan in plans if plan.training and plan.phase == "forward"]
    if not any(
        row.op.startswith("conv") and len(row.shape) == 4
        for plan in trained
        for row in plan.nodes
        if _is_low(row)
    ):
        return []
    sizes = [
        weight.nbytes
        for weight in weights.values()
        if weight.ndim == 4 and not weight.is_contiguous(memory_format=torch.channels_last)
    ]
    if not sizes:
        return []
    text = (
        f"convolutions run channels last, but not their weights ({len(sizes)}, {sum(sizes) / 1e6:.1f} MB): these and"
        " their gradients are laid out again in every step. model.to(memory_format=torch.channels_last) before"
        " training ends that"
    )
    return [Advice("layout", text)]


def weight_advice(plans: Sequence[Plan], weights: Mapping[str, torch.Tensor]) -> list[Advice]:
    """What does not fit fp16 among the weights; nothing where fp16 is not in use.

    Args:
        plans: of the graphs that read the weights.
        weights: parameters by name.
    """
    if all(node.low is not torch.float16 for plan in plans for node in plan.nodes):
        return []
    range_ = torch.finfo(torch.float16)
    found = []
    for name, weight in weights.items():
        if not weight.is_floating_point() or not weight.numel() or weight.is_meta:
            continue
        values = weight.detach().abs()
        largest = float(values.max())
        # half of the smallest subnormal, and everything below, rounds to zero
        lost = float(((values > 0) & (values <= range_.smallest_normal * range_.eps / 2)).float().mean())
        module = re.escape(name.rpartition(".")[0])
        options = with_rule(plans, {"module": f"^{module}$", "precision": "fp32"})
        if not largest <= range_.max:
            text = f"{name} holds {largest:.3g}, beyond fp16's {range_.max:.0f}"
            found.append(Advice("weights", text, options))
        elif lost > _LOST:
            found.append(Advice("weights", f"{lost:.1%} of {name} becomes zero in fp16", options))
    return found


def _untouched(plans: Sequence[Plan]) -> list[Advice]:
    """Matmuls that no pass looks at, because their values exist inside ``vmap`` or ``torch.func`` only."""
    rows = [node for plan in plans for node in plan.untouched_matmuls]
    if not rows:
        return []
    total = len(rows) + sum(len(plan.matmuls) for plan in plans)
    where = rows[0].module_path or rows[0].op
    text = (
        f"{len(rows)} of {total} matmuls are inside vmap or torch.func ({where}, ...): left as written, fp32 unless the"
        " program casts"
    )
    return [Advice("torch.func", text)]


def _islands(plans: Sequence[Plan]) -> list[Advice]:
    """fp32 nodes whose neighbours are all low, by op, dearest casts first."""
    found: dict[str, list[int]] = {}
    for plan in plans:
        casts = {cast.name: cast for cast in plan.casts}
        origin = {cast.name: cast.value for cast in plan.casts}
        nodes = {node.name: node for node in plan.nodes}
        parameters = {given.name for given in plan.inputs if given.parameter}
        readers: dict[str, list[NodePlan]] = {}
        outgoing: dict[str, list[CastPlan]] = {}
        for cast in plan.casts:
            outgoing.setdefault(cast.value, []).append(cast)
        for node in plan.nodes:
            for name in node.inputs:
                readers.setdefault(origin_of(name, origin), []).append(node)
        for node in plan.nodes:
            if node.dtype is not torch.float32 or not node.bytes or node.op_class is OpClass.KEEP:
                continue
            given = [name for name in node.inputs if origin_of(name, origin) not in parameters]
            sources = [nodes.get(origin_of(name, origin)) for name in given]
            after = readers.get(node.name, [])
            if sources and after and all(_is_low(row) for row in (*sources, *after)):
                size = sum(casts[name].bytes for name in given if name in casts)
                size += sum(cast.bytes for cast in outgoing.get(node.name, ()))
                found.setdefault(node.op, []).append(size)
    return [
        Advice(
            "island",
            f"{op} x{len(sizes)} is fp32 between low neighbours ({sum(sizes) / 1e6:.1f} MB of casts)"
            "; if accuracy allows",
            with_rule(plans, {"op": op, "precision": "low"}),
        )
        for op, sizes in sorted(found.items(), key=lambda row: -sum(row[1]))
    ]


def _is_low(node: NodePlan | None) -> bool:
    return node is not None and node.dtype is not None and node.dtype == node.low


def _unaligned(plans: Sequence[Plan]) -> list[Advice]:
    found: dict[tuple[str, str, int], int] = {}
    for plan in plans:
        for node in plan.nodes:
            if not node.flops or node.op_class is not OpClass.LOW or len(node.shape) < 2:
                continue
            # features are last, channels of convolutions second
            axis = 1 if node.op.startswith("conv") else -1
            # addmm has its bias first
            given = next((shape for shape in node.operands if len(shape) >= 2), node.shape)
            sizes = [given[axis], node.shape[axis]]
            for size in dict.fromkeys(size for size in sizes if size % _ALIGNMENT):
                key = starred(node.module_path), node.op, size
                found[key] = found.get(key, 0) + 1
    return [
        Advice(
            "dimensions",
            f"{where or '(no module)'} {op}{f' x{count}' if count > 1 else ''}: dimension {size} is no multiple"
            f" of {_ALIGNMENT}; {-(-size // _ALIGNMENT) * _ALIGNMENT} would run faster on the tensor cores of a GPU",
        )
        for (where, op, size), count in found.items()
    ]


def _small(plans: Sequence[Plan]) -> list[Advice]:
    small = [node for plan in plans for node in plan.nodes if node.is_because(Kind.CASTS_COST_MORE)]
    if not small:
        return []
    where = small[0].module_path or small[0].op
    text = f"{len(small)} matmuls stay in fp32, too small to gain here ({where}, ...); to lower them anyway"
    return [Advice("small", text, {"profile": "off"})]
