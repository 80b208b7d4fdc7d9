"""The cut between the low dtype and a level below, of one graph: what its products read there adds to the error."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from amp_fx.instruments.calibration.traced import Below
from amp_fx.precision.placement.cut import HIGH, LOW, Problem, Var
from amp_fx.precision.placement.priced import Priced, SensitivityTerm
from amp_fx.precision.plans.sensitivity import (
    INPUT,
    MEASURED,
    MEASURED_WEIGHT,
    WEIGHT,
    CallSensitivity,
    as_number,
)


class PricedMatmuls(NamedTuple):
    """The second cut of one graph: times and bytes are those that the level takes more, so negative where it gains."""

    priced: Priced
    by_bytes: Priced
    #: names of the calls that read by measured scales
    measured: Collection[str]


def price_matmuls(
    below: Below,
    calls: Sequence[CallSensitivity],
    low: Collection[str],
    rounded: Mapping[str, Mapping[str, float]],
) -> PricedMatmuls:
    """The second cut with measured sensitivity, of calls that have the dtype they are priced in; others read no copies.

    What was not measured is never placed below. ``rounded``: call, operand -> what the first cut adds by rounding it on
    its way into the call. Below 16 bits it is rounded from fp32 at once, and only what that adds more counts.
    """
    kinds = {row.name: MEASURED if INPUT in row.scales else INPUT for row in calls}
    second = below(
        {row.name: row.scales[INPUT] for row in calls if INPUT in row.scales},
        {row.name: row.equalisation.get(kinds[row.name], ()) for row in calls},
    )

    def more(call: str, operand: str, sensitivity: float | None) -> float:
        known = {MEASURED: INPUT, MEASURED_WEIGHT: WEIGHT}.get(operand, operand)
        return max(as_number(sensitivity) - rounded.get(call, {}).get(known, 0.0), 0.0)

    terms = [
        SensitivityTerm(
            more(row.name, operand, sensitivity),
            LOW,
            (row.name, role),
            call=row.name,
            slot=f"{role}: {operand}",
        )
        for row in calls
        for role in row.roles
        for operand, sensitivity in row.operands(role, measured=row.name in second.measured).items()
    ]

    def is_low(var: Var) -> bool:
        name, _ = var  # type: ignore[misc]  # as PlaceLevels names them
        return name in low

    def only_low(problem: Problem) -> Problem:
        kept = Problem({var: times for var, times in problem.unary.items() if is_low(var)})
        for term in problem.shared:
            if readers := tuple(filter(is_low, term.readers)):
                kept.shared.append(replace(term, readers=readers))
        kept.implies = [pair for pair in problem.implies if is_low(pair[0])]
        # what is not low here is HIGH
        kept.pins = problem.pins | {b: HIGH for a, b in problem.implies if not is_low(a)}
        return kept

    time, by_bytes = map(only_low, (second.time, second.by_bytes))
    unknown = time.unary.keys() - {term.var for term in terms}
    terms += [SensitivityTerm(math.inf, LOW, var) for var in time.unary if var in unknown]
    by_time, moved = (Priced(problem, terms, relative=True) for problem in (time, by_bytes))
    return PricedMatmuls(by_time, moved, second.measured)
