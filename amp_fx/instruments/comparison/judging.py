"""The reason of a value's error, the module at which an error grows without one, and the remedy.

A value is computed from others that were taken, by calls of which some round. It is expected to have the largest error
of those others, and what the calls round: the unit roundoff of the lowest precision among them, times the root of one
more than their matmuls, since what follows a matmul is one kernel, and roundings have no sign in common. A gradient is
computed by the calls that read the value, from the gradients of their results, and from values whose errors are in it.

What has many times the error that is expected stands out: by cancellation (a variance as E[x^2] - E[x]^2), a function
that magnifies (a softmax of numbers far from zero), or a range that is left.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from amp_fx.compiler.settings import Options
from amp_fx.instruments.calibration.calibrating import FIRST_SCALE
from amp_fx.instruments.comparison.running import Observed, OneByOne, without_scaler
from amp_fx.instruments.comparison.taps import Sample
from amp_fx.instruments.step import relative_error
from amp_fx.precision.plans.plan import NodePlan, Plan
from amp_fx.precision.policy.rules import Rule

#: times the error that is expected from which on a value, and a gradient, stands out: of models that train well, values
#: were at most at 1.5, gradients at 77 where they cancel
_TIMES, _TIMES_GRADIENT = 4.0, 16.0
#: error below which nothing stands out
_LEAST, _LEAST_GRADIENT = 1e-2, 0.1
#: weight, of the largest, below which a gradient is of no account: where all of it cancels, what is left is rounding
_WEIGHS = 1e-3
#: share of a gradient in fp16 from which on what became zero is a fault of its own
_LOST = 0.01
#: share of the error that a remedy may leave where it does not mend all of it
_LEFT = 0.2
#: share of the error that a run op by op has to have, too
_SEEN = 0.3
#: modules that feed what stands out, each tried by itself
_FEEDS = 3


@dataclass(frozen=True)
class Distance:
    """One value of a run beside that of the reference, in the worst call of its graph.

    A relative L2 error is infinite where there is inf or nan that the reference has not, or both have nan. ``lost`` is
    the share of the gradient's elements that are zero, of those that are not in the reference, ``weight`` the norm of
    the value times that of its gradient: how much it matters for the loss. ``single`` is True for one number.
    """

    error: float
    gradient_error: float | None = None
    lost: float = 0.0
    weight: float = 0.0
    single: bool = False

    @property
    def worst(self) -> float:
        """The larger of both errors."""
        return max(self.error, self.gradient_error or 0.0)

    def worse(self, other: Distance) -> Distance:
        """The worst of both."""
        gradients = [each.gradient_error for each in (self, other) if each.gradient_error is not None]
        return Distance(
            max(self.error, other.error),
            max(gradients, default=None),
            max(self.lost, other.lost),
            max(self.weight, other.weight),
            self.single and other.single,
        )


#: (graph, value) -> how far it is from the reference
Distances = Mapping[tuple[int, str], Distance]


def distances(run: Observed, reference: Observed) -> Distances:
    """How far a run is from the reference, of the values that both have."""
    found: dict[tuple[int, str], Distance] = {}
    for key, exact in reference.values.items():
        value = run.values.get(key)
        if value is None or value.elements.shape != exact.elements.shape:
            continue
        here = Distance(_error(value, exact), single=exact.elements.numel() == 1)
        gradient, true = run.gradients.get(key), reference.gradients.get(key)
        if gradient is not None and true is not None:
            some = true.elements != 0
            here = replace(
                here,
                gradient_error=_error(gradient, true),
                lost=(some & (gradient.elements == 0)).sum().item() / max(int(some.sum()), 1),
                weight=(exact.elements.norm() * true.elements.norm()).nan_to_num(0.0).item(),
            )
        name = key[:2]
        found[name] = here.worse(found.get(name, here))
    return found


def _error(found: Sample, exact: Sample) -> float:
    # what is infinite in the reference, too, as the mask of an attention, is no fault
    if not math.isfinite(found.largest) and found.largest.item() != exact.largest.item():
        return math.inf
    return relative_error({"": found.elements}, {"": exact.elements})


@dataclass(frozen=True)
class Culprit:
    """The result of a call, or its gradient, with its error and how much of that is expected.

    ``module`` computes it: of a gradient, the one that reads the value. ``lost`` is the share of a gradient in fp16
    that has become zero; ``weighs`` is False for a gradient that hardly matters for the loss, and for one number, such
    as a loss near zero; ``feeds`` are modules that compute in a low dtype what it is computed from.
    """

    graph: int
    value: str
    of: Literal["result", "gradient"]
    module: str
    error: float
    expected: float
    lost: float
    weighs: bool
    feeds: tuple[str, ...]

    @property
    def growth(self) -> float:
        """Times the error that is expected."""
        return self.error / max(self.expected, 1e-12)

    @property
    def underflows(self) -> bool:
        """True where gradients have become zero."""
        return self.lost > _LOST

    @property
    def stands_out(self) -> bool:
        """True where nothing explains the error."""
        if math.isinf(self.error):
            return not math.isinf(self.expected)
        if self.of == "result":
            return self.weighs and self.error > max(_LEAST, _TIMES * self.expected)
        grown = self.error > _TIMES_GRADIENT * self.expected
        return self.error > _LEAST_GRADIENT and self.weighs and (grown or self.underflows)


def findings(plans: Sequence[Plan], found: Distances) -> Iterator[Culprit]:
    """Every value in order of execution, then every gradient in that of the backward; plans of the graphs, in order."""
    heaviest = max((each.weight for each in found.values()), default=0.0)
    graphs = [_Graph(number, plan, found) for number, plan in enumerate(plans)]
    for graph in graphs:
        yield from (graph.of_result(name) for name in graph.names if name in graph.found)
    for graph in reversed(graphs):
        for name in reversed(graph.names):
            if name in graph.found and (error := graph.found[name].gradient_error) is not None:
                yield graph.of_gradient(name, error, heaviest)


class _Graph:
    """The calls of one graph, who reads whom, and what was found of them; casts are no calls."""

    def __init__(self, number: int, plan: Plan, found: Distances) -> None:
        self._number = number
        self.found = {name: here for (graph, name), here in found.items() if graph == number}
        casts = {cast.name: cast.value for cast in plan.casts if cast.inserted}
        self._calls = {row.name: row for row in plan.nodes}
        self.names = [*(given.name for given in plan.inputs), *self._calls]
        aliases = {given.name: given.alias for given in plan.inputs if given.alias}
        self._sources: dict[str, list[str]] = {}
        self._readers: dict[str, list[str]] = {}
        for row in plan.nodes:
            for read in row.inputs:
                while read in casts or read in aliases:
                    read = casts.get(read) or aliases[read]
                self._sources.setdefault(row.name, []).append(read)
                self._readers.setdefault(read, []).append(row.name)

    def of_result(self, name: str) -> Culprit:
        """A value, by the values that it is computed from."""
        here, own = self.found[name], self._own(name)
        before, calls = self._nearest(name, self._sources)
        path = own[0].module_path if own else ""
        expected = max((self.found[each].error for each in before), default=0.0) + _rounded([*own, *calls])
        feeds = self._low_modules(before, path)
        return Culprit(self._number, name, "result", path, here.error, expected, 0.0, not here.single, feeds)

    def of_gradient(self, name: str, error: float, heaviest: float) -> Culprit:
        """The gradient of a value, by those that it is computed from."""
        here, own = self.found[name], self._own(name)
        after, calls = self._nearest(name, self._readers)
        calls += [call for each in after for call in self._own(each)]
        errors = [self.found[each].error for each in (name, *after)]
        errors += [self.found[each].gradient_error or 0.0 for each in after]
        # what it reads besides has errors, too
        for call in calls:
            errors += [self.found[each].error for each in self._nearest(call.name, self._sources)[0]]
        path = own[0].module_path if own else ""
        module = next((call.module_path for call in calls if call.module_path != path), path)
        expected = max(errors, default=0.0) + _rounded(calls)
        feeds = self._low_modules([name, *after], module)
        lost = here.lost if own and own[0].computed is torch.float16 else 0.0
        weighs = here.weight >= _WEIGHS * heaviest
        return Culprit(self._number, name, "gradient", module, error, expected, lost, weighs, feeds)

    def _own(self, name: str) -> list[NodePlan]:
        """The call of a value; none of an input."""
        return [self._calls[name]] if name in self._calls else []

    def _nearest(self, name: str, edges: Mapping[str, Sequence[str]]) -> tuple[list[str], list[NodePlan]]:
        """The nearest values that were observed along the edges, and the calls on the way to them."""
        observed, passed = dict[str, None](), dict[str, None]()
        pending = list(edges.get(name, ()))
        while pending:
            each = pending.pop()
            if each in observed or each in passed or each == name:
                continue
            if each in self.found:
                observed[each] = None
                continue
            passed[each] = None
            pending += edges.get(each, ())
        return list(observed), [call for each in passed for call in self._own(each)]

    def _low_modules(self, names: Sequence[str], but: str) -> tuple[str, ...]:
        """Modules that compute these values in a low dtype, but for one."""
        rows = [call for name in names for call in self._own(name)]
        low = [row.module_path for row in rows if row.low is not None and row.computed is row.low]
        return tuple(dict.fromkeys(path for path in low if path != but))


def _rounded(calls: Sequence[NodePlan]) -> float:
    """The error that calls add by rounding; all calls after one matmul up to the next are one kernel."""
    dtypes = {call.computed for call in calls if call.computed is not None and not call.is_passage}
    # the largest relative error of one rounding, in int8 too
    units = [torch.finfo(dtype).eps / 2 if dtype.is_floating_point else 2.0**-7 for dtype in dtypes]
    return max(units, default=0.0) * math.sqrt(1 + sum(call.flops > 0 for call in calls))


def remedy(
    culprit: Culprit, options: Mapping[str, Any], traced: OneByOne, reference: Observed, scale: float
) -> dict[str, Any]:
    """Options with which nothing stands out, else those that mend most of what does; empty where none are known.

    They are tried by running the model op by op with them, beside what it does with ``options``.
    """
    opts, wrong = without_scaler(options), min(culprit.error, 1.0)
    if opts.plan is not None or opts.sensitivity is not None:
        # they decide, and not the rules
        return {}

    def error(found: Distances) -> float:
        """Infinite where the culprit is not there, or has no gradient."""
        here = found.get((culprit.graph, culprit.value), Distance(math.inf))
        error = here.error if culprit.of == "result" else here.gradient_error
        return math.inf if error is None else error

    if error(distances(traced.run_with(opts, scale), reference)) < _SEEN * wrong:
        # op by op it does not go wrong, so that nothing can be tried
        return {}
    best, least = dict[str, Any](), _LEFT * wrong
    for changed, at in _candidates(culprit, opts, scale):
        mended = {key: value for key, value in {**options, **changed}.items() if value is not None}
        found = distances(traced.run_with(without_scaler(mended), at), reference)
        if not any(each.stands_out for each in findings(traced.plans, found)):
            return mended
        if (left := error(found)) < least:
            best, least = mended, left
    return best


def _candidates(culprit: Culprit, opts: Options, scale: float) -> Iterator[tuple[dict[str, Any], float]]:
    """Options to add, the smallest change first: a scaler; the module in fp32, with what feeds it; another dtype."""
    if culprit.underflows and scale < FIRST_SCALE:
        yield {"scaler": "default"}, FIRST_SCALE
    module, feeds = culprit.module, culprit.feeds
    few = [(module,), *((feed,) for feed in feeds[:_FEEDS]), *((module, feed) for feed in feeds[:_FEEDS])]
    for modules in dict.fromkeys([*few, (module, *feeds)]):
        names = [re.escape(each) for each in modules]
        rule = Rule("fp32", module=f"^{names[0]}$" if len(names) == 1 else f"^({'|'.join(names)})$")
        policy = replace(opts.policy, name=None, rules=(*opts.policy.rules, rule))
        yield {"policy": policy.to_dict()}, scale
    if opts.dtype is torch.float16 and opts.policy.dtype is None:
        yield {"dtype": "bfloat16", "scaler": None}, 1.0
