"""Names of values and modules as remedies have them, and the options that add a rule."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from amp_fx.plans.plan import Plan
from amp_fx.policy import Policy

__all__ = ["origin_of", "starred", "with_rule"]


def with_rule(plans: Sequence[Plan], rule: dict[str, str]) -> dict[str, Any]:
    """The options that add a rule to the policy in use."""
    policies = [Policy.parse(plan.policy) for plan in plans]
    policy = policies[0] if policies else Policy()
    form = {key: value for key, value in policy.to_dict().items() if (key, value) != ("base", Policy.base)}
    return {"policy": {**form, "rules": [*form["rules"], rule]}}


def origin_of(name: str, casts: dict[str, str]) -> str:
    """The value that a name stands for, through casts of casts; ``casts`` says what each cast converts."""
    while name in casts:
        name = casts[name]
    return name


def starred(path: str) -> str:
    """A module path with ``*`` for the numbers of repeated blocks: ``"layers.*.up"``."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)
