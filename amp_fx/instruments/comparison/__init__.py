"""Where a compiled run leaves a reference: values and gradients at module boundaries, taken from what runs.

Here: runs of a step whose values are observed (``running.py``), as results of a graph (``taps.py``); how far two
runs are apart, and what explains that (``judging.py``); what was found, in data and words (``comparison.py``).
Not here: what each rounding would do, one by one (``amp_fx.instruments.calibration``), and how pictures look
(``amp_fx.viz``).
Open ``comparing.py`` first.
"""

from amp_fx.instruments.comparison.comparing import compare
from amp_fx.instruments.comparison.comparison import CallError, Comparison, ModuleError

__all__ = ["CallError", "Comparison", "ModuleError", "compare"]
