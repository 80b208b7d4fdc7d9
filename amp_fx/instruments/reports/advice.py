"""Changes that the data of plans suggests, and the reasons for casts that are kernels of their own.

Everything here is read off plans. What has a remedy carries it as options that can be pasted.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from amp_fx.compiler.notices import outside_remedy
from amp_fx.graphs.calls import starred
from amp_fx.graphs.values import KNOWN_NAMESPACES
from amp_fx.precision.plans.label import ReasonKind
from amp_fx.precision.plans.plan import CastPlan, InputPlan, NodePlan, Plan, dtype_name
from amp_fx.precision.plans.reading import unused_rules
from amp_fx.precision.policy import OpClass, Policy

#: the kinds of advice about code that never became a graph, what it multiplies in fp32, a rule that matches nothing,
#: and a baseline that fails
NOT_COMPILED, OUTSIDE, UNUSED_RULE, NO_AUTOCAST = "not compiled", "outside", "rule", "autocast"
#: an encoder layer of torch's that evaluates as one op, and what makes it several
FUSED_LAYER = "_transformer_encoder_layer_fwd"
UNFUSED = "Write torch.backends.mha.set_fastpath_enabled(False) before the first call: then their parts are compiled"
#: namespaces whose ops multiply nothing, or have a formula
_OF_TORCH = (*KNOWN_NAMESPACES, "rngprims", "_c10d_functional", "c10d_functional")
#: tensor cores read operands in rows of 16 bytes
_ALIGNMENT = 8
#: share of a weight that may become zero in fp16 before it is worth a line
_LOST = 0.01

# why a cast is a kernel
_WEIGHT = "fp32 weights on their way to 16 bits, once a step"
_PER_CALL = (
    "fp32 weights on their way to 16 bits, in each call; options={'weights': 'cache'} keeps low copies"
)
_GIVEN = "what graphs are given in another dtype than their calls read"
_RETURNED = "what graphs return in another dtype than their calls write"
_GRADIENT = "gradients that are wanted in fp32, and made in 16 bits by a library's kernel"


@dataclass(frozen=True)
class Advice:
    """One thing worth changing.

    ``text`` says what was found and where. ``options`` are to be added to ``torch.compile(..., options=...)``; without
    them, ``remedy`` or ``text`` say what to change in the code.
    """

    kind: str
    text: str
    options: dict[str, Any] = field(default_factory=dict)
    remedy: str = ""

    def __str__(self) -> str:
        text = f"{self.text}: options={self.options}" if self.options else self.text
        return f"{text}. {self.remedy}" if self.remedy else text


def advise(plans: Sequence[Plan]) -> list[Advice]:
    """The suggestions of the data, most useful first."""
    forward = [plan for plan in plans if plan.phase == "forward"]
    broken = "graph break after graph {0.graph}, fp32 tensors cross it: {0.graph_break}"
    fallbacks = [plan for plan in plans if plan.fallback]
    return [
        *(Advice("fallback", f"graph {plan.graph} is not rewritten: {plan.fallback}") for plan in fallbacks),
        *(Advice("report", f"not known of graph {p.graph}: {text}") for p in plans for text in p.unknown),
        *(Advice(UNUSED_RULE, text) for text in unused_rules(plans)),
        *_untouched(forward),
        *_uncounted(plans),
        *_fused_layers(forward),
        *_islands(forward),
        *_unaligned(forward),
        *_small(forward),
        *(Advice("graph break", broken.format(plan)) for plan in forward if plan.graph_break),
        *(Advice("torch", text) for text in dict.fromkeys(text for plan in plans for text in plan.faults)),
    ]


def _fused_layers(plans: Sequence[Plan]) -> list[Advice]:
    """Encoder layers of torch that evaluate as one op, in the dtype of their inputs."""
    rows = [row for plan in plans for row in plan.nodes if row.op == FUSED_LAYER]
    if all(map(_is_low, rows)):
        return []
    text = (
        f"{len(rows)} nn.TransformerEncoderLayer run as one op of torch's, in fp32, as under torch.autocast"
    )
    return [Advice("fused layer", text, remedy=UNFUSED)]


def outside_advice(outside: Mapping[str, int], device: str, low: torch.dtype) -> list[Advice]:
    """Advice about matmuls in fp32 in code that Dynamo leaves to eager; nothing where there are none."""
    if not outside.get("float32"):
        return []
    text = "matmuls run outside of graphs, in fp32, in code that Dynamo leaves to eager"
    return [Advice(OUTSIDE, text, remedy=outside_remedy(device, low))]


def autocast_fails(graphs: Iterable[str]) -> Advice:
    """The note that torch.autocast fails on some graphs, so that its column is in fp32."""
    text = f"Graph {', '.join(graphs)} is in fp32 in its column: torch.autocast fails on it"
    return Advice(NO_AUTOCAST, text)


def scaling_advice(plans: Sequence[Plan]) -> list[Advice]:
    """Advice for training in fp16 without scaled gradients; nothing without a backward."""
    if not any(node.dtype is torch.float16 for plan in _trained(plans) for node in plan.nodes):
        return []
    text = (
        "gradients below 6e-8 become zero in float16; unless torch.amp.GradScaler scales them, make an"
        " amp_fx.GradScaler"
    )
    return [Advice("scaling", text, {"dtype": "float16", "scaler": "default"})]


def layout_advice(plans: Sequence[Plan], weights: Mapping[str, torch.Tensor]) -> list[Advice]:
    """Convolutions in 16 bits run channels last: ``weights``, by name, that are not are laid out in every step."""
    rows = [row for plan in _trained(plans) for row in plan.nodes if _is_low(row)]
    is_needed = any(row.op.startswith("conv") and len(row.shape) == 4 for row in rows)
    sizes = [
        weight.nbytes
        for weight in weights.values()
        if weight.ndim == 4 and not weight.is_contiguous(memory_format=torch.channels_last)
    ]
    if not (is_needed and sizes):
        return []
    text = (
        f"convolutions run channels last, but not their weights ({len(sizes)}, {sum(sizes) / 1e6:.1f} MB): these and"
        " their gradients are laid out again in every step. model.to(memory_format=torch.channels_last) before"
        " training ends that"
    )
    return [Advice("layout", text)]


def weight_advice(plans: Sequence[Plan], weights: Mapping[str, torch.Tensor]) -> list[Advice]:
    """Advice about weights that do not fit fp16; nothing where fp16 is not in use."""
    if all(node.low is not torch.float16 for plan in plans for node in plan.nodes):
        return []
    limits = torch.finfo(torch.float16)
    found = []
    for name, weight in weights.items():
        if not weight.is_floating_point() or not weight.numel() or weight.is_meta:
            continue
        values = weight.detach().abs()
        largest = float(values.max())
        # half of the smallest subnormal, and everything below, rounds to zero
        lost = float(((values > 0) & (values <= limits.smallest_normal * limits.eps / 2)).float().mean())
        # NaN is not within the limit
        if not largest <= limits.max:
            text = f"{name} holds {largest:.3g}, beyond fp16's {limits.max:.0f}"
        elif lost > _LOST:
            text = f"{lost:.1%} of {name} becomes zero in fp16"
        else:
            continue
        rule = {"module": f"^{re.escape(name.rpartition('.')[0])}$", "precision": "fp32"}
        found.append(Advice("weights", text, _with_rule(plans, rule)))
    return found


def kept_casts(plans: Sequence[Plan]) -> dict[str, list[CastPlan]]:
    """Casts that are kernels of their own after fusion, by reason, largest first; an unknown reason is empty.

    Plans that were only recorded have none. Without a reason, another compiler might fuse them.
    """
    found: dict[str, list[CastPlan]] = {}
    for plan in plans:
        rows: dict[str, NodePlan | InputPlan] = {row.name: row for row in (*plan.inputs, *plan.nodes)}
        casts = {cast.name: cast for cast in plan.casts}
        read = {name for row in plan.nodes for name in row.inputs}
        for cast in filter(lambda cast: cast.kernel, plan.casts):
            row = rows.get(_origin(cast.value, casts))
            # views left out
            while isinstance(row, NodePlan) and row.op_class is OpClass.FOLLOW and len(row.inputs) == 1:
                row = rows.get(_origin(row.inputs[0], casts))
            why = ""
            if isinstance(row, InputPlan) and row.parameter and plan.phase == "forward":
                why = _WEIGHT if plan.training else _PER_CALL
            elif isinstance(row, InputPlan):
                why = _GIVEN
            elif cast.to_dtype is torch.float32 and ("output" in cast.users or cast.name not in read):
                why = _GRADIENT if plan.phase == "backward" else _RETURNED
            found.setdefault(why, []).append(cast)
    return dict(sorted(found.items(), key=lambda row: -sum(cast.bytes for cast in row[1])))


def kept_data(kept: dict[str, list[CastPlan]]) -> list[dict[str, Any]]:
    """Each reason in JSON-like form; the example is what the first of its casts converts, and for whom."""
    found = []
    for why, casts in kept.items():
        cast, size = casts[0], sum(cast.bytes for cast in casts)
        place = f" [{cast.source}]" if cast.source else ""
        readers = ", ".join(cast.users) or "the caller"
        example = f"{cast.value} to {dtype_name(cast.to_dtype)} for {readers}{place}"
        found.append({"why": why, "kernels": len(casts), "bytes": size, "example": example})
    return found


def kept_lines(kept: dict[str, list[CastPlan]]) -> list[str]:
    """Each reason in words: ``"8 x fp32 weights on their way to 16 bits, once a step, 9.5 MB"``."""
    lines = []
    for row in kept_data(kept):
        times = f"{row['kernels']} x " if row["kernels"] > 1 else ""
        # a place is last in a line
        what, bracket, place = (row["why"] or row["example"]).partition(" [")
        lines.append(f"{times}{what}, {row['bytes'] / 1e6:.3g} MB{bracket}{place}")
    return lines


def _with_rule(plans: Sequence[Plan], rule: dict[str, str]) -> dict[str, Any]:
    """The options that add a rule to the policy in use."""
    form = Policy.parse(plans[0].policy if plans else None).to_dict()
    if form["base"] == Policy.base:
        del form["base"]
    return {"policy": {**form, "rules": [*form["rules"], rule]}}


def _trained(plans: Sequence[Plan]) -> list[Plan]:
    return [plan for plan in plans if plan.training and plan.phase == "forward"]


def _is_low(node: NodePlan | None) -> bool:
    return node is not None and node.dtype is not None and node.dtype == node.low


def _untouched(plans: Sequence[Plan]) -> list[Advice]:
    """Matmuls that no pass looks at, because their values exist inside ``vmap`` or ``torch.func`` only."""
    rows = [
        node for p in plans for node in p.untouched_matmuls if not node.is_because(ReasonKind.TRANSFORMED)
    ]
    if not rows:
        return []
    total = len(rows) + sum(len(plan.matmuls) for plan in plans)
    where = rows[0].module_path or rows[0].op
    text = (
        f"{len(rows)} of {total} matmuls are inside vmap or torch.func ({where}, ...): left as written, fp32 unless the"
        " program casts"
    )
    return [Advice("torch.func", text)]


def _uncounted(plans: Sequence[Plan]) -> list[Advice]:
    """Ops of other libraries, which may multiply matrices: no formula says how many operations they have."""
    found: dict[str, Counter[str]] = {}
    for row in (row for plan in plans for row in plan.nodes):
        namespace, is_named, _ = row.op.rpartition("::")
        if is_named and namespace not in _OF_TORCH and row.computed is not None and not row.flops:
            found.setdefault(row.op, Counter()).update([dtype_name(row.computed)])
    calls = [f"{times} x {op} in {dtype}" for op, row in found.items() for dtype, times in row.items()]
    text = f"FLOPs of other libraries' ops are not counted: {', '.join(calls)}"
    return [Advice("uncounted", text)] if calls else []


def _islands(plans: Sequence[Plan]) -> list[Advice]:
    """fp32 calls whose neighbours are all low, by op, dearest casts first."""
    found: dict[str, list[int]] = {}
    for plan in plans:
        casts = {cast.name: cast for cast in plan.casts}
        nodes = {node.name: node for node in plan.nodes}
        parameters = {given.name for given in plan.inputs if given.parameter}
        readers: dict[str, list[NodePlan]] = {}
        for node in plan.nodes:
            for name in node.inputs:
                readers.setdefault(_origin(name, casts), []).append(node)
        for node in plan.nodes:
            if node.dtype is not torch.float32 or not node.bytes or node.op_class is OpClass.KEEP:
                continue
            given = [name for name in node.inputs if _origin(name, casts) not in parameters]
            sources = [nodes.get(_origin(name, casts)) for name in given]
            after = readers.get(node.name, [])
            if sources and after and all(_is_low(row) for row in (*sources, *after)):
                size = sum(casts[name].bytes for name in given if name in casts)
                size += sum(cast.bytes for cast in plan.casts if cast.value == node.name)
                found.setdefault(node.op, []).append(size)
    return [
        Advice(
            "island",
            f"{op} x{len(sizes)} is fp32 between low neighbours ({sum(sizes) / 1e6:.1f} MB of casts)"
            "; if accuracy allows",
            _with_rule(plans, {"op": op, "precision": "low"}),
        )
        for op, sizes in sorted(found.items(), key=lambda row: -sum(row[1]))
    ]


def _origin(name: str, casts: Mapping[str, CastPlan]) -> str:
    """The value that a name stands for, through casts of casts."""
    while name in casts:
        name = casts[name].value
    return name


def _unaligned(plans: Sequence[Plan]) -> list[Advice]:
    found: Counter[tuple[str, str, int]] = Counter()
    for node in (node for plan in plans for node in plan.nodes):
        if not node.flops or node.op_class is not OpClass.LOW or len(node.shape) < 2:
            continue
        # features are last, channels of convolutions second
        axis = 1 if node.op.startswith("conv") else -1
        # addmm has its bias first
        given = next((shape for shape in node.operands if len(shape) >= 2), node.shape)
        sizes = dict.fromkeys(size for size in (given[axis], node.shape[axis]) if size % _ALIGNMENT)
        found.update((starred(node.module_path), node.op, size) for size in sizes)
    return [
        Advice(
            "dimensions",
            f"{where or '(no module)'} {op}{f' x{count}' if count > 1 else ''}: dimension {size} is no multiple"
            f" of {_ALIGNMENT}; {-(-size // _ALIGNMENT) * _ALIGNMENT} would run faster on the tensor cores of a GPU",
        )
        for (where, op, size), count in found.items()
    ]


def _small(plans: Sequence[Plan]) -> list[Advice]:
    nodes = (node for plan in plans for node in plan.nodes if node.computed is torch.float32)
    small = [node for node in nodes if node.is_because(ReasonKind.CASTS_COST_MORE)]
    if not small:
        return []
    where = small[0].module_path or small[0].op
    text = f"{len(small)} matmuls stay in fp32, faster than with casts ({where}, ...); to lower them anyway"
    return [Advice("small", text, {"profile": "off"})]
