"""A first look at what goes from module to module, as it is compiled; a second one at all calls."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from amp_fx.comparison.distances import Distance, apart, distances
from amp_fx.comparison.judging import Culprit, Judge
from amp_fx.comparison.mending import mend
from amp_fx.comparison.rows import CallError, call_error, call_errors
from amp_fx.comparison.running import (
    Compiled,
    OneByOne,
    Program,
    ProgramGraph,
    Taken,
    untapped,
    without_scaler,
)
from amp_fx.errors import AmpFxError
from amp_fx.plans.plan import Plan
from amp_fx.settings import Options

__all__ = ["Look", "SecondLook", "Setting", "look", "look_again"]

#: by which a scaler that finds inf makes its scale smaller, four steps at once
_BACK_OFF = 16.0

#: by which results may move when values are taken; what rounds otherwise in bf16 moves them less
_DISTURBED = 0.05


@dataclass(frozen=True)
class Setting:
    """What is compared with what.

    Attributes:
        program: the model and its step.
        options: of the run, as they were given.
        against: ``"fp32"``, ``"autocast"``, ``"eager"``, or options.
        scale: of the loss, where it begins.
        adapts: True where it becomes smaller while gradients are not finite, as by a scaler.
    """

    program: Program
    options: Mapping[str, Any]
    against: str | Mapping[str, Any]
    scale: float
    adapts: bool

    @functools.cached_property
    def opts(self) -> Options:
        """Of the run, validated."""
        return without_scaler(self.options)

    def reference(self, traced: OneByOne) -> Taken:
        """What a step of the reference hands out, op by op; of other options, what one in fp32 does."""
        if not isinstance(self.against, str) or self.against == "fp32":
            return traced.run(None)
        autocast = replace(Options(), dtype=self.opts.dtype, numerics="eager", profile="off")
        return traced.run(autocast, as_written=self.against == "eager")


@dataclass(frozen=True)
class Look:
    """What was seen at module boundaries.

    Attributes:
        graphs: of the model.
        plans: by which they are compiled.
        found: (graph, value) -> how far it is from the reference.
        findings: the values in order of execution, then their gradients.
        scale: of the loss, with which gradients are finite, if any.
        result_error: of the results of the run as it is without us.
        disturbance: by which taking the values has moved these.
        left_out: graphs that are not compared, and why.
        not_finite: names of the results of the run that are not finite, where those of the reference are.
    """

    graphs: list[ProgramGraph]
    plans: list[Plan]
    found: dict[tuple[int, str], Distance]
    findings: list[Culprit]
    scale: float
    result_error: float
    disturbance: float
    left_out: tuple[str, ...]
    not_finite: list[str]

    @property
    def culprit(self) -> Culprit | None:
        """What is wrong first: what is not finite, then the result that has grown most, then the gradient."""
        wrong = [each for each in self.findings if each.stands_out]
        first = [each for each in wrong if math.isinf(each.error)][:1]
        results = [each for each in wrong if each.of == "result"]
        return max(first or results or wrong, key=lambda each: each.growth, default=None)

    @property
    def is_disturbed(self) -> bool:
        """True where the values that were taken are not those of the run: without us, it has other results."""
        return self.disturbance > _DISTURBED


@dataclass(frozen=True)
class SecondLook:
    """What was seen of all calls.

    Attributes:
        call: of the module that stands out: the first that is not finite, or at which the error grows most.
        remedy: options that mend it; empty where none are known.
        calls: of the compiled run, each with its error; empty unless asked for.
        disturbance: by which taking all of them has moved the results.
    """

    call: CallError | None = None
    remedy: dict[str, Any] = field(default_factory=dict)
    calls: tuple[CallError, ...] = ()
    disturbance: float = 0.0


def look(setting: Setting) -> Look:
    """Runs reference and run, and the run once more without taking anything.

    Raises:
        AmpFxError: Dynamo made no graph that could be compared, or not the same twice.
    """
    program, opts, scale = setting.program, setting.opts, setting.scale
    with _apart():
        traced = OneByOne(program, every_call=False)
        reference = setting.reference(traced)
    if not traced.graphs:
        raise AmpFxError("Dynamo made no graph that mixed precision is about; nothing was compared.")
    if isinstance(setting.against, Mapping):
        with _apart():
            reference = Compiled(program, without_scaler(setting.against), traced.graphs).run(scale)
    with _apart():
        compiled = Compiled(program, opts, traced.graphs)
        taken = compiled.run(scale)
        while setting.adapts and scale > 1 and _overflows(taken):
            scale /= _BACK_OFF
            taken = compiled.run(scale)
    if len(compiled.plans) != len(traced.graphs):
        raise AmpFxError(
            f"Dynamo made {len(traced.graphs)} graphs of the model, and of an equal call {len(compiled.plans)}: "
            "nothing can be compared. The model should do the same twice: keep no state outside it."
        )
    with _apart():
        plain = untapped(program, opts, scale)
    found = distances(taken, reference)
    silent = [
        f"graph {plan.graph}: it is not rewritten, and hands out nothing"
        for number, plan in enumerate(compiled.plans)
        if traced.graphs[number].results and number not in {graph for graph, _ in found}
    ]
    return Look(
        traced.graphs,
        compiled.plans,
        found,
        list(Judge(compiled.plans, found).findings()),
        scale,
        apart(plain.results, reference.results),
        apart(taken.results, plain.results),
        (*traced.left_out, *silent),
        _not_finite(plain, reference),
    )


def look_again(setting: Setting, first: Look, *, calls: bool) -> SecondLook:
    """Looks at all calls: op by op where something stands out, and as compiled where that is asked for.

    Args:
        setting: of the first look.
        first: what that has seen.
        calls: whether calls are asked for.
    """
    culprit = first.culprit
    if culprit is None and not calls:
        return SecondLook()
    close, remedy, rows, disturbance = None, dict[str, Any](), (), 0.0
    with _apart():
        traced = OneByOne(setting.program, every_call=True)
        reference = setting.reference(traced)
        if culprit is not None:
            remedy = mend(culprit, setting.options, traced, reference, first.scale)
        if culprit is not None and culprit.of == "result":
            found = distances(traced.run(setting.opts, first.scale), reference)
            close = _inside(culprit, first.plans, found)
    if calls:
        with _apart():
            compiled = Compiled(setting.program, setting.opts, traced.graphs)
            taken = compiled.run(first.scale)
        rows = call_errors(compiled.plans, distances(taken, reference))
        with _apart():
            disturbance = apart(taken.results, untapped(setting.program, setting.opts, first.scale).results)
    return SecondLook(close, remedy, rows, disturbance)


def _inside(
    culprit: Culprit, plans: Sequence[Plan], found: Mapping[tuple[int, str], Distance]
) -> CallError | None:
    """The call of a module that is the first not to be finite, or at which the error grows most."""
    inside = [
        each
        for each in Judge(plans, found).findings()
        if (each.graph, each.module, each.of) == (culprit.graph, culprit.module, "result")
    ]
    rows = {row.name: row for row in plans[culprit.graph].nodes}
    first = [each for each in inside if math.isinf(each.error)][:1]
    call = max(first or inside, key=lambda each: each.growth, default=None)
    if call is None or call.value not in rows:
        return None
    return call_error(rows[call.value], found[call.graph, call.value])


def _not_finite(run: Taken, reference: Taken) -> list[str]:
    """Names of results that are not finite where those of the reference are."""
    found = [name for name, each in run.results.items() if not _is_finite(each)]
    return [name for name in found if name not in reference.results or _is_finite(reference.results[name])]


def _is_finite(value: torch.Tensor) -> bool:
    return bool(value.isfinite().all())


def _overflows(taken: Taken) -> bool:
    """True where gradients are not finite, and all values are."""
    values, gradients = (
        [largest.isfinite().item() for largest in found.values()]
        for found in (taken.largest, taken.largest_gradients)
    )
    gradients += [_is_finite(result) for result in taken.results.values()]
    return all(values) and not all(gradients)


@contextlib.contextmanager
def _apart() -> Iterator[None]:
    """Inside, nothing is found that was compiled outside, nor outside what was compiled inside."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()
