"""The rule that would mend what stands out, tried by running the model op by op with it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from amp_fx.comparison.distances import Distance, distances
from amp_fx.comparison.judging import Finding
from amp_fx.comparison.running import OneByOne, Taken
from amp_fx.options import Options
from amp_fx.policy.rules import Rule

__all__ = ["mend"]

#: the error that a remedy may leave, of that which it mends
_LEFT = 0.2


def mend(
    finding: Finding,
    options: Mapping[str, Any],
    opts: Options,
    traced: OneByOne,
    reference: Taken,
    scale: float,
) -> dict[str, Any]:
    """Options that mend what was found; empty where none are known.

    Args:
        finding: what stands out.
        options: of the run, as they were given.
        opts: the same, validated.
        traced: the model.
        reference: what it is compared with.
        scale: of the loss.
    """
    if opts.plan is not None or opts.harm is not None:
        # they decide, and not the rules
        return {}
    for changed in _candidates(finding, opts):
        found = distances(traced.run(Options.parse(None, changed), scale), reference)
        here = found.get((finding.graph, finding.value))
        if here is not None and _mends(here, finding):
            return {**{key: value for key, value in options.items() if key not in changed}, **changed}
    return {}


def _mends(here: Distance, finding: Finding) -> bool:
    error = here.error if finding.of == "result" else here.gradient_error
    return error is not None and error <= min(_LEFT * finding.error, _LEFT)


def _candidates(finding: Finding, opts: Options) -> Iterator[dict[str, Any]]:
    """Options to add, the smallest change first: the module in fp32, with what feeds it; another dtype."""
    low = opts.low_dtype("cpu") if opts.dtype is None else opts.dtype
    dtype = {} if opts.dtype is None else {"dtype": str(opts.dtype).removeprefix("torch.")}
    for modules in dict.fromkeys([(finding.module,), (finding.module, *finding.feeds)]):
        yield {**dtype, "policy": _with_rule(opts, modules)}
    if low is torch.float16:
        yield {"dtype": "bfloat16"}


def _with_rule(opts: Options, modules: tuple[str, ...]) -> dict[str, Any]:
    names = [re.escape(module) for module in modules]
    pattern = names[0] if len(names) == 1 else f"({'|'.join(names)})"
    policy = replace(opts.policy, name=None, rules=(*opts.policy.rules, Rule("fp32", module=f"^{pattern}$")))
    return policy.to_dict()
