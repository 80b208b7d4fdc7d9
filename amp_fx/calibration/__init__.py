"""Accuracy has a price: what each rounding does to a model's gradient, measured on the user's own data.

``calibrating.py`` is the way from a model and data to a ``Calibration``; ``measuring.py`` runs graphs, ``operands.py``
the matmuls inside calls, and ``meter.py`` adds up. ``traced.py`` has the graphs and their prices, ``cuts.py`` the
placements of all of them, ``frontier.py`` points, plans, figure and text, ``verifying.py`` the compiled check.
Not here: sensitivity as plain data (``amp_fx.plans.sensitivity``), and the cuts that weigh it
(``passes/forward/place_by_sensitivity.py``, and ``amp_fx.placement.priced``), nor the step that is run
(``amp_fx.reports.step``).
"""

from __future__ import annotations

from amp_fx.calibration.calibrating import calibrate
from amp_fx.calibration.calibration import Calibration
from amp_fx.calibration.frontier import CalibratedPlan, Point

__all__ = ["CalibratedPlan", "Calibration", "Point", "calibrate"]
