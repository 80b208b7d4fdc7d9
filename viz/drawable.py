"""What a picture needs of a report. Pictures are below reports: they know this, not :class:`amp_fx.Report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from amp_fx.plans.diff import Diff
from amp_fx.plans.plan import Cost, ModuleCasts, Plan

__all__ = ["Drawable"]


class Drawable(Protocol):
    """What a picture is made from; :class:`amp_fx.Report` is one."""

    plans: list[Plan]
    title: str
    #: graph -> call -> error of the gradient that rounding adds, None for an overflow; empty where none was measured
    sensitivities: dict[str, dict[str, float | None]]
    #: what that is: a key of :data:`amp_fx.viz.style.MEASURED`
    measured: str

    @property
    def modules(self) -> Sequence[ModuleCasts]:
        """Casts by module, of what is compared."""
        ...

    def compared(self) -> Mapping[str, Cost]:
        """Costs by name, of amp_fx first."""
        ...

    def diff(self, other: Any) -> Diff:
        """What another report changes against this one."""
        ...
