"""The rule that would mend what stands out, tried by running the model op by op with it."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from amp_fx.calibration.step import FIRST_SCALE
from amp_fx.comparison.distances import Distance, distances
from amp_fx.comparison.judging import Culprit, Judge
from amp_fx.comparison.running import OneByOne, Taken, without_scaler
from amp_fx.policy.rules import Rule
from amp_fx.settings import Options

__all__ = ["mend"]

#: share of the error that a remedy may leave where it does not mend all of it
_LEFT = 0.2

#: share of the error that a run op by op has to have, too
_SEEN = 0.3

#: modules that feed what stands out, each tried by itself
_FEEDS = 3


def mend(
    finding: Culprit,
    options: Mapping[str, Any],
    traced: OneByOne,
    reference: Taken,
    scale: float,
) -> dict[str, Any]:
    """Options with which nothing stands out, else those that mend most of what does; empty where none are known.

    Args:
        finding: what stands out.
        options: of the run, as they were given.
        traced: the model.
        reference: what it is compared with.
        scale: of the loss.
    """
    opts = without_scaler(options)
    if opts.plan is not None or opts.sensitivity is not None:
        # they decide, and not the rules
        return {}
    wrong = min(finding.error, 1.0)
    if _error(finding, distances(traced.run(opts, scale), reference)) < _SEEN * wrong:
        # op by op it does not go wrong, so that nothing can be tried
        return {}
    best, least = dict[str, Any](), _LEFT * wrong
    for changed, at in _candidates(finding, opts, scale):
        mended = {key: value for key, value in {**options, **changed}.items() if value is not None}
        found = distances(traced.run(without_scaler(mended), at), reference)
        if not any(each.stands_out for each in Judge(traced.plans, found).findings()):
            return mended
        if (error := _error(finding, found)) < least:
            best, least = mended, error
    return best


def _error(finding: Culprit, found: Mapping[tuple[int, str], Distance]) -> float:
    """That of what was found, in another run; infinite where it is not there."""
    here = found.get((finding.graph, finding.value), Distance(math.inf))
    error = here.error if finding.of == "result" else here.gradient_error
    return math.inf if error is None else error


def _candidates(finding: Culprit, opts: Options, scale: float) -> Iterator[tuple[dict[str, Any], float]]:
    """Options to add, the smallest change first: a scaler; the module in fp32, with what feeds it; another dtype."""
    if finding.underflows and scale < FIRST_SCALE:
        yield {"scaler": "default"}, FIRST_SCALE
    module, feeds = finding.module, finding.feeds
    few = [(module,), *((feed,) for feed in feeds[:_FEEDS]), *((module, feed) for feed in feeds[:_FEEDS])]
    for modules in dict.fromkeys([*few, (module, *feeds)]):
        yield {"policy": _with_rule(opts, modules)}, scale
    if opts.dtype is torch.float16 and opts.policy.dtype is None:
        yield {"dtype": "bfloat16", "scaler": None}, 1.0


def _with_rule(opts: Options, modules: tuple[str, ...]) -> dict[str, Any]:
    names = [re.escape(module) for module in modules]
    pattern = names[0] if len(names) == 1 else f"({'|'.join(names)})"
    rule = Rule("fp32", module=f"^{pattern}$")
    return replace(opts.policy, name=None, rules=(*opts.policy.rules, rule)).to_dict()
