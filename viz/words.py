"""Plans in words: why a call computes as it does, and one line about a graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from amp_fx.errors import PlanError
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.precision.plans.label import SENSITIVITY, Reason, ReasonKind
from amp_fx.precision.plans.plan import Cost, NodePlan, Plan
from amp_fx.precision.plans.saved import SavedValue
from amp_fx.precision.policy.levels import LEVELS

#: dtype -> what casts and boxes call it; the others have their own name
_SHORT = {"float8_e4m3fn": "fp8", "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}


def short_dtype(dtype: object) -> str:
    """``"bf16"`` for ``"bfloat16"``."""
    name = str(dtype).removeprefix("torch.")
    return _SHORT.get(name, name)


def size(nbytes: int, form: str = ".3g") -> str:
    """``"1.05 MB"``."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= unit:
            return f"{nbytes / unit:{form}} {name}"
    return f"{nbytes} B"


def per_cent(part: float, whole: float) -> str:
    """``"15 %"``; one digit more below ten."""
    share = 100 * part / whole if whole else 0.0
    return f"{share:.{int(0 < share < 9.95)}f}\N{NO-BREAK SPACE}%"


def cost_text(cost: Cost) -> str:
    """``"57 cast kernels of 115 casts, 2.79 MB of 14 MB"``."""
    if not cost.moved or cost.kernel_bytes is None:
        return f"{cost.casts} casts, {size(cost.cast_bytes)}"
    moved = f"{size(cost.kernel_bytes)} of {size(cost.moved)}, {per_cent(cost.kernel_bytes, cost.moved)}"
    return f"{cost.kernels} cast kernels of {cost.casts} casts move {moved}"


def saved_text(row: SavedValue) -> str:
    """``"2 x h.*.mlp: gelu, 524 kB, bf16 in 8 bits, groups of 64; read by the weight gradient of h.*.out"``."""
    times, where = f"{row.times} x " * (row.times > 1), f"{row.module_path}: " * bool(row.module_path)
    return f"{times}{where}{row.op}, {kept_text(row)}"


def kept_text(row: SavedValue) -> str:
    """``"524 kB, bf16 in 8 bits, groups of 64; read by the weight gradient of h.0.out"``."""
    return ", ".join(filter(None, (size(row.bytes), kept_form(row), row.reason)))


def kept_form(row: SavedValue) -> str:
    """``"bf16"``, or ``"bf16 in 8 bits"`` where that is less."""
    return short_dtype(row.dtype) + (f" {in_bits([row.bits])}" if row.is_smaller else "")


def in_bits(bits: Iterable[int]) -> str:
    """``"in 4 and 8 bits"``."""
    found = [*bits]
    return f"in {' and '.join(map(str, found))} bit{'s' * (found != [1])}"


def because(row: NodePlan) -> str:
    """Why a call computes as it does, and each of its matmuls."""
    # of a call that is one matmul its role says nothing
    roles = [reason.values.get("role") if len(row.levels) > 1 else None for reason in row.reasons]
    pairs = zip(roles, map(sentence, row.reasons), strict=True)
    return "; ".join(f"{role}: {text}" if role else text for role, text in pairs)


def sentence(reason: Reason) -> str:
    """One reason; of a matmul that a plan has below 16 bits and that stays low, that, too.

    PlanError for a reason that lacks a value of its sentence.
    """
    try:
        text = reason.kind.sentence.format(**reason.values)
    except (KeyError, TypeError, ValueError) as error:
        raise PlanError(
            f"reason {reason.kind.value!r} in the plan has no value {error}, or one of another form; make a new plan."
        ) from error
    return f"{text}, though the plan has {reason.values['planned']}" if "planned" in reason.values else text


def summary(plan: Plan) -> str:
    """A sentence about a compiled graph: its calls by precision.

    ``"12 of 14 matmuls in bf16, 9 casts; 2 in fp32: faster than with casts on avx512_bf16 zen5 (options={'profile':
    'off'} forces them)"``. Matmuls are convolutions, attention and recurrent layers, too.
    """
    if plan.fallback:
        return f"not rewritten: {plan.fallback}"
    casts = f"{len(plan.casts)} cast{'s' * (len(plan.casts) != 1)}"
    outside, inside = plan.matmuls, plan.untouched_matmuls
    total = len(outside) + len(inside)
    if not total:
        return f"no matmuls, {casts}"
    low = Counter(_dtype(row) for row in outside if not _is_wide(row))
    wide = Counter((_dtype(row), _why_wide(row, plan)) for row in outside if _is_wide(row))
    lowered = " and ".join(f"{count} in {dtype}" for dtype, count in low.items())
    if len(low) == 1:
        ((dtype, count),) = low.items()
        text = f"{count} of {total} matmuls in {dtype}, {casts}"
    else:
        text = f"{total} matmul{'s' * (total != 1)}, {lowered or 'none in low precision'}, {casts}"
    parts = [f"{count} in {dtype}: {why}" for (dtype, why), count in wide.items()]
    if inside:
        under = sum(row.is_because(ReasonKind.TRANSFORMED) for row in inside)
        counts = {"under torch.autocast": under, "left as written": len(inside) - under}
        parts += [f"{count} inside vmap or torch.func: {how}" for how, count in counts.items() if count]
    if plan.meaning:
        why = why_none_below(plan)
        parts.append(f"below 16 bits: {plan.meaning}{why and f', but no matmul runs in it: {why}'}")
    return "; ".join([text, *parts])


def more_bytes(plans: Sequence[Plan], ours: int | None, theirs: int | None) -> str:
    """Why all kernels move more bytes than under torch.autocast; empty where they do not, or nobody counted."""
    if not ours or not theirs or ours < 1.0005 * theirs:
        return ""
    rows = [row for plan in plans if plan.phase == "forward" for row in plan.matmuls]
    wide = list(filter(_is_wide, rows))
    causes = []
    if small := sum(row.is_because(ReasonKind.CASTS_COST_MORE) for row in wide):
        text = "matmuls stay in fp32, where their casts would take longer than low precision saves"
        causes.append(f"{small} of {len(rows)} {text}")
    if ruled := sum(row.is_because(ReasonKind.RULE) for row in wide):
        causes.append(f"rules keep {ruled} of {len(rows)} matmuls in fp32")
    if written := sum(row.computed_by.startswith("products") for row in rows):
        causes.append(f"{written} of {len(rows)} matmuls are attention as two products, which take less time")
    why = " and ".join(causes)
    more = f"{100 * (ours / theirs - 1):.1f} % more bytes than torch.autocast moves"
    return f"{more}, because {why}" if why else more


def _is_wide(row: NodePlan) -> bool:
    return row.dtype not in LOW_DTYPES and not row.levels_below


def _why_wide(row: NodePlan, plan: Plan) -> str:
    if row.is_because(ReasonKind.CASTS_COST_MORE):
        device = f" on {plan.profile}" if plan.profile else ""
        return f"faster than with casts{device} (options={{'profile': 'off'}} forces them)"
    # what comes after the list's own reason overruled it
    return sentence(row.reasons[-1]) if row.reasons else "the plan gives no reason"


def without_budget(plan: Plan) -> str:
    """What runs matmuls below 16 bits whatever they add to the error; empty where no budget has kept them."""
    kinds = {*SENSITIVITY, ReasonKind.LEVEL_WOULD_ADD, ReasonKind.LEVEL_OVER_BUDGET}
    # the last one stays as it is without a budget, too
    rows = plan.matmuls[:-1]
    if plan.meaning not in LEVELS or not any(row.is_because(*kinds) for row in rows):
        return ""
    return f"A budget decides; policy={LEVELS[plan.meaning].policy!r} without a plan has none"


def why_none_below(plan: Plan) -> str:
    """Why no matmul runs in the level that a policy means; empty where one does, or the backward decides."""
    rows = plan.matmuls
    if plan.training or plan.meaning not in LEVELS or any(row.levels_below for row in rows):
        return ""
    of_roles = Counter(sentence(reason) for row in rows for reason in row.reasons if "role" in reason.values)
    why = of_roles or Counter(_why_wide(row, plan) for row in rows if _is_wide(row))
    return "".join(text for text, _ in why.most_common(1))


def _dtype(row: NodePlan) -> str:
    return "mixed dtypes" if row.computed is None else short_dtype(row.computed)
