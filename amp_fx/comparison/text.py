"""A comparison in words: one screen of at most 80 columns."""

from __future__ import annotations

import math
import pprint
import textwrap

from amp_fx.comparison.comparison_data import ComparisonData
from amp_fx.comparison.looking import Look, SecondLook
from amp_fx.graphs.calls import short_source
from amp_fx.viz.words import short_dtype

__all__ = ["screen", "verdict"]

_WIDTH, _ROWS = 80, 10

_NO_RULE = (
    "no rule about these modules mends it; a plan by measured accuracy may: "
    "plan = amp_fx.calibrate(model, batch, loss).plan(budget=0.1)"
)


def screen(found: ComparisonData) -> str:
    """The ten worst modules, the first that is not finite, the verdict, and what would mend it."""
    named = {"": "(the model)"}
    lines = [_clip(f"{found.title} against {found.against}: {len(found.worst)} modules compared"), ""]
    lines.append(f"  {'module':<42}{'precision':>10}{'result':>11}{'gradient':>11}")
    for row in found.worst[:_ROWS]:
        name = named.get(row.module, row.module)
        lines.append(
            f"  {name[-41:]:<42}{short_dtype(row.precision):>10}"
            f"{_error(row.error):>11}{'' if row.gradient_error is None else _error(row.gradient_error):>11}".rstrip()
        )
    first = found.first_nonfinite
    lines += ["", _clip(f"first not finite: {'none' if first is None else named.get(first, first)}")]
    lines += textwrap.wrap(_results(found), _WIDTH)
    lines += [_clip(f"not compared: {each}") for each in found.left_out[:2]]
    lines += ["", *textwrap.wrap(found.verdict, _WIDTH)]
    if found.remedy:
        lines += ["what mends it, as a run op by op shows:"]
        lines += f"options={pprint.pformat(found.remedy, width=_WIDTH - 8, sort_dicts=False)}".split("\n")
    elif not found.healthy:
        lines += textwrap.wrap(_NO_RULE, _WIDTH)
    return "\n".join(lines)


def _results(found: ComparisonData) -> str:
    moved = f"moved its results by {found.disturbance:.1e}" if found.disturbance else "changed no number"
    scale = f", at a loss scale of {found.loss_scale:g}" if found.loss_scale != 1 else ""
    lost = max((row.lost for row in found.worst if row.precision == "float16"), default=0.0)
    zeros = f", up to {lost:.1%} of a gradient became zero" if lost else ""
    return f"results of the run: {_error(found.result_error)}{scale}{zeros}; taking the values {moved}"


def _error(error: float) -> str:
    return "not finite" if math.isinf(error) else f"{error:.1e}"


def _clip(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."


def verdict(first: Look, second: SecondLook) -> str:
    """What is wrong, in one sentence."""
    culprit = first.culprit
    if culprit is None and first.not_finite:
        return (
            f"The gradient of {first.not_finite[0]} is not finite, though all values and their gradients are."
        )
    if culprit is None and first.is_disturbed:
        return (
            f"No module stands out, but taking the values has moved the results by {first.disturbance:.1e}: what was "
            "measured is not what runs."
        )
    if culprit is None:
        return (
            "Nothing is wrong: all is finite, and no module is further from the reference than its inputs and its "
            "precision explain."
        )
    name = culprit.module or "the model itself"
    if second.call is not None:
        name += f" (at {short_source(second.call.source) or second.call.op})"
    what = "result" if culprit.of == "result" else "gradient that goes back through it"
    if math.isinf(culprit.error):
        return f"{name} is the first whose {what} is not finite."
    if culprit.underflows:
        return (
            f"{name}: the {what} is {culprit.error:.1e} from the reference, and {culprit.lost:.1%} of it has become "
            "zero, which a larger loss scale keeps."
        )
    return (
        f"{name}: the {what} is {culprit.error:.1e} from the reference, {culprit.growth:.0f} times what its inputs and "
        "its precision explain."
    )
