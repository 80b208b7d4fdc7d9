"""``with amp_fx.record() as rec:`` collects the plans of everything compiled inside.

``torch.compile(model, backend="amp_fx")`` returns nothing that says what was decided; this does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from amp_fx.plans.plan import Plan
from amp_fx.plans.reading import listen
from amp_fx.reports.report import Report

__all__ = ["Recording", "record"]


@dataclass(eq=False)
class Recording:
    """What :func:`record` yields.

    Attributes:
        plans: one per compiled graph, in order of compilation.
    """

    plans: list[Plan] = field(default_factory=list)

    @property
    def reports(self) -> list[Report]:
        """One report per compiled graph, in order of compilation. ``Report(recording.plans)`` is one of all.

        They show the forward; :func:`amp_fx.explain` shows the backward, too.
        """
        return [Report([plan]) for plan in self.plans]


@contextlib.contextmanager
def record() -> Iterator[Recording]:
    """Collects the plan of every graph that amp_fx compiles inside the block, in any thread."""
    recording = Recording()
    with listen(recording.plans.append):
        yield recording
