"""Where a compiled run leaves a reference: values and gradients at module boundaries, taken from what runs.

``comparing.py`` says what is run, and tries what would mend an error; ``running.py`` runs a step whose values are
observed, ``taps.py`` makes them results of a graph; ``judging.py`` says how far two runs are apart, and what explains
that; ``comparison.py`` is what was found, in data and words.
Not here: what each rounding would do, one by one (``amp_fx.calibration``), and how pictures look (``amp_fx.viz``).
"""

from __future__ import annotations

from amp_fx.comparison.comparing import compare
from amp_fx.comparison.comparison import CallError, Comparison, ModuleError

__all__ = ["CallError", "Comparison", "ModuleError", "compare"]
