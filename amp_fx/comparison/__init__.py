"""Where a compiled run leaves a reference: values and gradients at module boundaries, taken from what runs.

Here: which values are taken, and the extra inputs and results by which a graph hands them out; the runs; how far two
runs are apart; what explains an error, and the rule that mends what nothing explains.
Not here: what each rounding would do, one by one (``amp_fx.calibration``), and how pictures look (``amp_fx.viz``).
Open ``comparing.py`` first.
"""

from __future__ import annotations

from amp_fx.comparison.comparing import compare
from amp_fx.comparison.comparison import Comparison
from amp_fx.comparison.rows import CallError, ModuleError

__all__ = ["CallError", "Comparison", "ModuleError", "compare"]
