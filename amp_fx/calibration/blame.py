"""Who is to blame for the error of torch.autocast, on one screen."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from amp_fx.calibration.points import Point
from amp_fx.graphs.calls import short_source
from amp_fx.passes.forward.place_by_sensitivity import PricedGraph
from amp_fx.placement.priced import SensitivityTerm
from amp_fx.plans.plan import NodePlan, dtype_name
from amp_fx.plans.sensitivity import OUTPUTS, Sensitivity
from amp_fx.policy.levels import LEVELS

__all__ = ["blame_lines"]

#: roundings that are listed; and of each kind where a level below 16 bits was measured, too
_SHOWN, _SHOWN_EACH = 12, 7

#: above it a prediction says only that the error is large
_LARGE = 5e-2


def blame_lines(
    sensitivity: Sensitivity,
    parts: Sequence[PricedGraph],
    calls: Mapping[str, NodePlan],
    known: Mapping[str, Point],
    below: Sequence[SensitivityTerm] | None = None,
) -> list[str]:
    """The lines of ``print(calibration)``.

    Args:
        sensitivity: what was measured.
        parts: graphs with their prices.
        calls: what is known of each call, by name.
        known: placements to compare with.
        below: what the policy below 16 bits would add, worst first; None where that was not measured.
    """
    terms = [term for part in parts for term in part.priced.blame(part.autocast)]
    terms.sort(key=lambda term: -term.sensitivity)
    measured = sum(len(graph.calls) for graph in sensitivity.graphs)
    low = dtype_name(sensitivity.dtype)
    lines = [
        f"{sensitivity.model} in {low}: {measured} calls, graphs: {len(sensitivity.graphs)}, batches: "
        f"{sensitivity.batches}"
        + (f", the worst of {sensitivity.states} states" if sensitivity.states > 1 else "")
        + (f", loss scale {sensitivity.scale:g}" if sensitivity.scale != 1 else ""),
        "",
        f"{sensitivity.what} error, predicted",
        *(f"  {_point(point)}" for point in known.values()),
        "",
        "what torch.autocast's error is made of",
    ]
    shown = _SHOWN if below is None else _SHOWN_EACH
    lines += _shares([(term.sensitivity, _what(term, calls), term.call) for term in terms], calls, shown)
    if below is not None:
        policy = LEVELS[sensitivity.level].policy
        lines += ["", f"what policy {policy} adds ({sensitivity.level})"]
        rows = [(each.sensitivity, each.slot, each.call) for each in below]
        lines += _shares(rows, calls, shown) or [f"  nothing: it would run nothing in {policy}"]
    return [*lines, "", *_notes(sensitivity, known)]


def _shares(rows: Sequence[tuple[float, str, str]], calls: Mapping[str, NodePlan], shown: int) -> list[str]:
    """(sensitivity, what is rounded, call) -> lines, worst first."""
    total = sum(sensitivity for sensitivity, _, _ in rows if math.isfinite(sensitivity)) or 1
    lines = [f"  {_row(sensitivity, total, what, calls[call])}" for sensitivity, what, call in rows[:shown]]
    if len(rows) > shown:
        rest = sum(sensitivity for sensitivity, _, _ in rows[shown:] if math.isfinite(sensitivity)) / total
        lines.append(f"  {rest:>8.1%}  {len(rows) - shown} other roundings")
    return lines


def _point(point: Point) -> str:
    time = "" if point.time is None else f"  {point.time * 1e3:9.3f} ms"
    error = "overflows" if math.isinf(point.error) else f"{point.error:.2e}"
    return f"{point.name!s:<10}{error:>10}{time}  {point.bytes_moved / 1e6:9.1f} MB moved"


def _row(sensitivity: float, total: float, what: str, call: NodePlan) -> str:
    share = "overflow" if math.isinf(sensitivity) else f"{sensitivity / total:.1%}"
    return f"{share:>8}  {what:<36.36}  {call.module_path:<24.24}  {short_source(call.source)}".rstrip()


def _what(term: SensitivityTerm, calls: Mapping[str, NodePlan]) -> str:
    return f"{'gradient of ' if term.backward else ''}{calls[term.call].op} {term.slot or 'result'}"


def _notes(sensitivity: Sensitivity, known: Mapping[str, Point]) -> list[str]:
    if sensitivity.of == OUTPUTS:
        notes = ["Sensitivity is that of these batches: take some that are like those to come."]
    else:
        notes = [
            "Sensitivity changes while a model trains: calibrate a trained checkpoint, and again when it has moved on."
            + ("" if sensitivity.states > 1 else " Calibration.worst plans for several.")
        ]
    if sensitivity.kinks:
        notes.append(
            f"{sensitivity.kinks} calls have a derivative that jumps (ReLU): flips are predicted within a "
            f"factor of about "
            "three for ReLU, and not for the others. The check of a plan by a compiled step counts them."
        )
    if known["autocast"].error > _LARGE:
        notes.append(f"An error above {_LARGE:g} is only known to be large.")
    return notes
