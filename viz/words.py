"""What plans say in words: why a call computes as it does, and one line about a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from amp_fx.errors import PlanError
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.plans.label import Kind, Reason
from amp_fx.plans.plan import NodePlan, Plan, dtype_name

__all__ = ["because", "more_bytes", "sentence", "short_dtype", "summary"]

#: dtype -> what casts and boxes call it; the others have their own name
_SHORT = {"float8_e4m3fn": "fp8", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}

_TO_THE_ERROR = "to the error"

#: one for each kind, with the names of its values
_SENTENCES = {
    Kind.ELEMENT: "an element of its producer's result",
    Kind.NOT_ATEN: "not an ATen op: left as traced",
    Kind.NOT_FLOATING: "no floating tensor that autocast may re-type",
    Kind.SUBCLASS: "takes a tensor subclass, which has its own dtype",
    Kind.CAST: "the program's own cast",
    Kind.NAMES_DTYPE: "the program names the dtype of the result",
    Kind.OWN_DTYPES: "returns each argument in its own dtype",
    Kind.REGION: "inside torch.autocast(enabled=False)",
    Kind.LOW_ALREADY: "already low as the program wrote it",
    Kind.WRITES: "writes in place: runs in the dtype of what it writes to",
    Kind.GRADIENT: "{of}: reads {dtypes}, as the forward left it",
    Kind.RULE: "user rule {rule}",
    Kind.WIDE_RESULT: "the fp32 sum is its result, not rounded to {low}",
    Kind.NO_WIDE_RESULT: "in fp32: {device} has no kernel for {op} that reads {low} and returns fp32",
    Kind.PRODUCTS: "two products around a softmax in fp32: {why}",
    Kind.FLASH: "flash kernel: {why}",
    Kind.LISTED: "{why}",
    Kind.UNLISTED: "not on the op lists: left as traced",
    Kind.NO_MATMUL: "no matrix product in these shapes: autocast casts nothing",
    Kind.LOW_IO: "policy fast: fp32 inside the kernel, low in and out",
    Kind.SCALAR_RANGE: "scalar-range: {constant:g} is beyond {low}",
    Kind.TINY_EPS: "tiny-eps: {eps:g} is below {low}'s smallest normal number",
    Kind.EXP_SUM: "exp-sum: exponentials that are summed need fp32's range and digits",
    Kind.POSITIONS: "positions: integers beyond 256 are not exact in a 16-bit dtype",
    Kind.NO_KERNEL: "no-kernel: oneDNN has no LSTM in {low} for this CPU",
    Kind.SHARED_STORAGE: "a view of a storage that is written to or visible outside",
    Kind.WEIGHT_RANGE: "{weight} has values beyond the range of {low}",
    Kind.CASTS_COST_MORE: "in fp32 because casting would cost more than {low} saves on this device",
    Kind.CHEAPER: "cut: cheaper in {dtype}, same values",
    Kind.NO_DEARER: "cut: no dearer in fp32",
    Kind.STORED_LOW: "policy fast: stored in {low}",
    Kind.ROUNDED_AT_ONCE: "policy fast: rounded at once to {low}",
    Kind.ROUNDING_ADDS: f"sensitivity: rounding adds {{error:.1e}} {_TO_THE_ERROR}",
    Kind.ROUNDING_WOULD_ADD: f"sensitivity: rounding would add {{error:.1e}} {_TO_THE_ERROR}",
    Kind.ROUNDING_ADDS_UP_TO: f"sensitivity: rounding adds up to {{error:.1e}} {_TO_THE_ERROR}",
    Kind.ROUNDING_OVERFLOWS: f"sensitivity: rounding overflows, and adds infinitely much {_TO_THE_ERROR}",
    Kind.LEVEL: "{policy}, {level}",
    Kind.LEVEL_PLANNED: "{policy}, {level}, as the plan has it",
    Kind.LEVEL_ADDS: f"{{policy}}, {{level}}, adds {{error:.1e}} {_TO_THE_ERROR}",
    Kind.LEVEL_WOULD_ADD: f"{{low}}, {{policy}} would add {{error:.1e}} {_TO_THE_ERROR}",
    Kind.LEVEL_DEARER: "converting would cost more than {policy} saves on this device",
    Kind.LEVEL_OVER_BUDGET: "{policy} would cost more time or error than the budget allows",
    Kind.PLANNED_LOW: "low, as the plan has it",
    Kind.OTHER_DEVICE: "it does not run on {device}",
    Kind.UNKNOWN_ROWS: "{level} has no scales for a number of rows that is not known",
    Kind.NO_COPY: "{level} multiplies by weights of which copies are kept",
    Kind.NO_SCALE: "its scale was not measured",
    Kind.NOT_A_PRODUCT: "{level} has no convolutions",
    Kind.NOT_A_WEIGHT: "{policy} multiplies by weights",
    Kind.NO_ROWS: "it has no rows",
    Kind.FEW_ROWS: "{level} multiplies {fewest} rows or more",
    Kind.INDIVISIBLE: "{grain} does not divide its sizes {sizes}",
    Kind.UNEVEN_BLOCKS: "{block} does not divide the {contracted} that it contracts",
    Kind.LAST_LINEAR: "the last linear stays in the low dtype",
    Kind.WEIGHT_GRADIENT: "{level} leaves gradients of weights in the low dtype",
    Kind.STORED_TABLE: "the table is stored in {dtype}, its rows are widened",
}


def short_dtype(dtype: torch.dtype | str) -> str:
    """``"bf16"`` for ``"bfloat16"``."""
    name = dtype if isinstance(dtype, str) else dtype_name(dtype)
    return _SHORT.get(name, name)


def because(row: NodePlan) -> str:
    """Why a call computes as it does, and each of its matmuls."""
    # of a call that is one matmul its role says nothing
    roles = [reason.values.get("role") if len(row.levels) > 1 else None for reason in row.reasons]
    pairs = zip(roles, map(sentence, row.reasons), strict=True)
    return "; ".join(f"{role}: {text}" if role else text for role, text in pairs)


def sentence(reason: Reason) -> str:
    """One reason; of a matmul that a plan has below 16 bits and that stays low, that, too."""
    try:
        text = _SENTENCES[reason.kind].format(**reason.values)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"reason {reason.kind.value!r} in the plan has no value {error}, or one of another form; make a new plan."
        ) from error
    return f"{text}, though the plan has {reason.values['planned']}" if "planned" in reason.values else text


def summary(plan: Plan) -> str:
    """What a compiled graph computes in which precision.

    ``"12 of 14 matmuls in bf16, 9 casts; 2 in fp32: too small to gain on cpu avx512_bf16 zen5 (options={'profile':
    'off'} forces them)"``. Matmuls are convolutions, attention and recurrent layers, too.
    """
    if plan.fallback:
        return f"not rewritten: {plan.fallback}"
    casts = f"{len(plan.casts)} cast{'s' * (len(plan.casts) != 1)}"
    outside, inside = plan.matmuls, plan.untouched_matmuls
    total = len(outside) + len(inside)
    if not total:
        return f"no matmuls, {casts}"
    low = Counter(_dtype(row) for row in outside if row.dtype in LOW_DTYPES)
    wide = Counter((_dtype(row), _why_wide(row, plan)) for row in outside if row.dtype not in LOW_DTYPES)
    lowered = " and ".join(f"{count} in {dtype}" for dtype, count in low.items())
    if len(low) == 1:
        ((dtype, count),) = low.items()
        text = f"{count} of {total} matmuls in {dtype}, {casts}"
    else:
        text = f"{total} matmul{'s' * (total != 1)}, {lowered or 'none in low precision'}, {casts}"
    parts = [f"{count} in {dtype}: {why}" for (dtype, why), count in wide.items()]
    if inside:
        parts.append(f"{len(inside)} inside vmap or torch.func: left as written")
    if plan.meaning:
        parts.append(f"below 16 bits: {plan.meaning}")
    return "; ".join([text, *parts])


def more_bytes(plans: Sequence[Plan], ours: int | None, theirs: int | None) -> str:
    """Why all kernels move more bytes than under torch.autocast; empty where they do not, or nobody counted."""
    if not ours or not theirs or ours < 1.0005 * theirs:
        return ""
    rows = [row for plan in plans if plan.phase == "forward" for row in plan.matmuls]
    wide = [row for row in rows if row.dtype not in LOW_DTYPES]
    causes = []
    if small := sum(row.is_because(Kind.CASTS_COST_MORE) for row in wide):
        text = "matmuls stay in fp32, where their casts would take longer than low precision saves"
        causes.append(f"{small} of {len(rows)} {text}")
    if ruled := sum(row.is_because(Kind.RULE) for row in wide):
        causes.append(f"rules keep {ruled} of {len(rows)} matmuls in fp32")
    why = " and ".join(causes)
    more = f"{100 * (ours / theirs - 1):.1f} % more bytes than torch.autocast moves"
    return f"{more}, because {why}" if why else more


def _why_wide(row: NodePlan, plan: Plan) -> str:
    if row.is_because(Kind.CASTS_COST_MORE):
        device = f" on {plan.profile}" if plan.profile else ""
        return f"too small to gain{device} (options={{'profile': 'off'}} forces them)"
    # what comes after the list's own reason overruled it
    return sentence(row.reasons[-1]) if row.reasons else "the plan gives no reason"


def _dtype(row: NodePlan) -> str:
    return "mixed dtypes" if row.computed is None else short_dtype(row.computed)
