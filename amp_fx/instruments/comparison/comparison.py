"""The findings of a comparison: as data, as a picture, and in words on one screen of at most 80 columns."""

from __future__ import annotations

import json
import math
import os
import pprint
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from amp_fx.graphs.calls import short_source
from amp_fx.instruments.comparison.judging import Culprit, Distance, Distances, findings
from amp_fx.instruments.comparison.running import ProgramGraph
from amp_fx.instruments.reports.report import Report
from amp_fx.precision.plans.files import as_data, write_text
from amp_fx.precision.plans.plan import NodePlan, Plan
from amp_fx.viz.words import short_dtype

#: bumped when the JSON form changes incompatibly
_VERSION = 1
_WIDTH, _ROWS = 80, 10

_NO_RULE = (
    "no rule about these modules mends it; a plan by measured accuracy may: "
    "plan = amp_fx.calibrate(model, batch, loss).plan(budget=0.1)"
)


@dataclass(frozen=True)
class ModuleError:
    """The results of one module, beside the reference.

    Attributes:
        module: path; the model itself is ``""``.
        error: relative L2 error of its result, of the worst if there are several; infinite where one is not finite.
        gradient_error: of the gradient of its result; None without a loss, or where it has none.
        precision: that its result is computed in, ``"bfloat16"``.
        lost: share of the gradient's elements that are zero, of those that are not in the reference.
    """

    module: str
    error: float
    gradient_error: float | None
    precision: str
    lost: float


@dataclass(frozen=True)
class CallError:
    """The result of one call, beside the reference.

    Attributes:
        call: its name in the plan.
        op: ATen name.
        module: path of the module that it is in.
        source: the user's source line.
        precision: that it computes in.
        error: relative L2 error; infinite where it is not finite.
        gradient_error: of its gradient; None without a loss, or where it has none.
    """

    call: str
    op: str
    module: str
    source: str
    precision: str
    error: float
    gradient_error: float | None


@dataclass(frozen=True)
class Comparison:
    """The findings of :func:`amp_fx.compare`.

    Attributes:
        title: name of the model.
        against: what the run was compared with.
        worst: the modules, largest error of result or gradient first.
        calls: every call, likewise, of a run that returns the results of all; empty unless asked for.
        first_nonfinite: path of the module that computes the first value, or else the first gradient, with an inf or
            nan that the reference has not; None where all are finite.
        culprit: path of the module at which the error grows, or that is the first to leave what is finite; None where
            nothing is wrong.
        culprit_call: in that module, of a run op by op; None where a gradient is wrong, or nothing.
        healthy: True where nothing is wrong.
        verdict: what is wrong, in one sentence.
        remedy: options that mend it, found by running the model op by op with them; empty where none are known.
        result_error: relative L2 error of the gradients of all parameters, or without a loss of what the model returns,
            in a run of which nothing is observed.
        disturbance: by how much taking the values has moved these results.
        calls_disturbance: the same of the run that returns the result of every call.
        loss_scale: at which gradients were computed.
        left_out: graphs that are not compared, and gradients where there is no loss; and why.
        plans: of the graphs.
        errors: graph -> call -> error; what pictures are coloured by.
    """

    title: str
    against: str
    worst: tuple[ModuleError, ...]
    calls: tuple[CallError, ...]
    first_nonfinite: str | None
    culprit: str | None
    culprit_call: CallError | None
    healthy: bool
    verdict: str
    remedy: dict[str, Any]
    result_error: float
    disturbance: float
    calls_disturbance: float
    loss_scale: float
    left_out: tuple[str, ...] = ()
    plans: tuple[Plan, ...] = field(default=(), repr=False)
    errors: dict[str, dict[str, float | None]] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        first = self.first_nonfinite
        lines = [_clip(f"{self.title} against {self.against}: {len(self.worst)} modules compared"), ""]
        lines.append(f"  {'module':<42}{'precision':>10}{'result':>11}{'gradient':>11}")
        for row in self.worst[:_ROWS]:
            gradient = "" if row.gradient_error is None else _error(row.gradient_error)
            precision = short_dtype(row.precision)
            line = f"  {_end(_named(row.module), 41):<42}{precision:>10}{_error(row.error):>11}{gradient:>11}"
            lines.append(line.rstrip())
        lines += ["", _clip(f"first not finite: {'none' if first is None else _named(first)}")]
        lines += textwrap.wrap(self._results(), _WIDTH)
        lines += [_clip(f"not compared: {each}") for each in self.left_out[:2]]
        lines += ["", *textwrap.wrap(self.verdict, _WIDTH)]
        if self.remedy:
            lines += ["what mends it, as a run op by op shows:"]
            lines += f"options={pprint.pformat(self.remedy, width=_WIDTH - 8, sort_dicts=False)}".split("\n")
        elif not self.healthy:
            lines += textwrap.wrap(_NO_RULE, _WIDTH)
        return "\n".join(lines)

    def _results(self) -> str:
        moved = f"moved its results by {self.disturbance:.1e}" if self.disturbance else "changed no number"
        scale = f", at a loss scale of {self.loss_scale:g}" if self.loss_scale != 1 else ""
        lost = max((row.lost for row in self.worst if row.precision == "float16"), default=0.0)
        zeros = f", up to {lost:.1%} of a gradient became zero" if lost else ""
        return f"results of the run: {_error(self.result_error)}{scale}{zeros}; taking the values {moved}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-like form, without the plans; an infinite error is None."""
        own = {key: value for key, value in vars(self).items() if key not in ("plans", "errors")}
        return {"version": _VERSION, **_finite(as_data(own))}

    def to_json(self) -> str:
        """The comparison as indented JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes ``.json``, or the graphs coloured by error as ``.html``, ``.svg``, ``.png`` or ``.dot``."""
        path = Path(path)
        if path.suffix.lower() == ".json":
            write_text(path, self.to_json() + "\n")
            return path
        picture = _Picture(list(self.plans), self.title, sensitivities=self.errors, measured="error")
        picture.screen = str(self)
        return picture.save(path)


class _Picture(Report):
    """The picture of the plans with the text of the comparison."""

    screen = ""

    def __str__(self) -> str:
        return self.screen


def _finite(data: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, list):
        return [_finite(value) for value in data]
    return None if data == math.inf else data


def _end(text: str, most: int) -> str:
    return text if len(text) <= most else f"...{text[3 - most :]}"


def _named(module: str) -> str:
    return module or "(the model)"


def _error(error: float) -> str:
    return "not finite" if math.isinf(error) else f"{error:.1e}"


def _clip(line: str) -> str:
    return line if len(line) <= _WIDTH else f"{line[: _WIDTH - 3]}..."


def module_errors(
    model: nn.Module, graphs: Sequence[ProgramGraph], plans: Sequence[Plan], found: Distances
) -> tuple[ModuleError, ...]:
    """The modules of a model that return something, largest error first."""
    # they only hold others
    lists = nn.ModuleList, nn.ModuleDict
    holders = {path for path, module in model.named_modules() if isinstance(module, lists)}
    rows: dict[str, tuple[Distance, str]] = {}
    for number, (graph, plan) in enumerate(zip(graphs, plans, strict=True)):
        calls = {row.name: row for row in plan.nodes}
        for value, modules in graph.results.items():
            if (here := found.get((number, value))) is None:
                continue
            for path in modules:
                before, _ = rows.get(path, (here, ""))
                rows[path] = here.worse(before), calls[value].precision if value in calls else ""
    ranked = sorted(rows.items(), key=lambda row: -row[1][0].worst)
    return tuple(
        ModuleError(path, each.error, each.gradient_error, precision, each.lost)
        for path, (each, precision) in ranked
        if path not in holders
    )


def call_errors(plans: Sequence[Plan], found: Distances) -> tuple[CallError, ...]:
    """The calls whose results were observed, largest error first."""
    calls = {(number, row.name): row for number, plan in enumerate(plans) for row in plan.nodes}
    ranked = sorted(found.items(), key=lambda item: -item[1].worst)
    return tuple(_call_error(calls[key], here) for key, here in ranked if key in calls)


def culprit_call(culprit: Culprit, plans: Sequence[Plan], found: Distances) -> CallError | None:
    """The call that is the first not to be finite, or at which the error grows most; none where a gradient is wrong."""
    here = culprit.graph, culprit.module, "result"
    inside = [each for each in findings(plans, found) if (each.graph, each.module, each.of) == here]
    first = [each for each in inside if math.isinf(each.error)][:1]
    call = max(first or inside, key=lambda each: each.growth, default=None)
    rows = {row.name: row for row in plans[culprit.graph].nodes}
    if culprit.of != "result" or call is None or call.value not in rows:
        return None
    return _call_error(rows[call.value], found[call.graph, call.value])


def _call_error(row: NodePlan, here: Distance) -> CallError:
    return CallError(
        row.name, row.op, row.module_path, row.source, row.precision, here.error, here.gradient_error
    )


def verdict(
    culprit: Culprit | None,
    call: CallError | None,
    not_finite: Sequence[str],
    zeroed: Sequence[str],
    moved: float,
    of_outputs: bool,
) -> str:
    """The fault, in one sentence: at a call of the culprit, in results, or because observing ``moved`` these."""
    if culprit is None and not_finite and of_outputs:
        place = f" at {not_finite[0]}" if not_finite[0] else ""
        return f"What the model returns{place} is not finite, though all values between modules are."
    if culprit is None and not_finite:
        return f"The gradient of {not_finite[0]} is not finite, though all values and their gradients are."
    if culprit is None and zeroed:
        more = f" and of {len(zeroed) - 1} more" if len(zeroed) > 1 else ""
        return f"The gradient of {zeroed[0]}{more} is zero, and not so in the reference."
    if culprit is None and moved:
        return (
            f"No module stands out, but taking the values has moved the results by {moved:.1e}: what was "
            "measured is not what runs."
        )
    if culprit is None:
        return (
            f"Nothing is wrong{' with results' * of_outputs}: all is finite, and no module is further from the "
            "reference than its inputs and its precision explain."
        )
    name = culprit.module or "the model itself"
    if call is not None:
        name += f" (at {short_source(call.source) or call.op})"
    what = "result" if culprit.of == "result" else "gradient that goes back through it"
    if math.isinf(culprit.error):
        return f"{name} is the first whose {what} is not finite."
    far = f"{name}: the {what} is {culprit.error:.1e} from the reference"
    if culprit.underflows:
        return f"{far}, and {culprit.lost:.1%} of it has become zero, which a larger loss scale keeps."
    return f"{far}, {culprit.growth:.0f} times what its inputs and its precision explain."
