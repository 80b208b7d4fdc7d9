"""What a comparison holds. Its words are in ``text.py``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from amp_fx.comparison.rows import CallError, ModuleError
from amp_fx.plans.plan import Plan

__all__ = ["ComparisonData"]


@dataclass(frozen=True)
class ComparisonData:
    """The fields of :class:`amp_fx.Comparison`, which says what they are."""

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
