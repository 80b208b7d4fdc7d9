"""Accuracy has a price: what each rounding does to a model's gradient, measured on the user's own data.

Here: measuring by one double backward, the calibration with its blame, frontier and plans, the check of a plan by a
compiled step, and the figures.
Not here: sensitivity as plain data (``amp_fx.plans.sensitivity``), and the cuts that weigh it
(``passes/forward/place_by_sensitivity.py``, and ``amp_fx.placement.priced``).
Open ``calibrating.py`` first.
"""

from __future__ import annotations

from amp_fx.calibration.calibrating import calibrate
from amp_fx.calibration.calibration import Calibration
from amp_fx.calibration.points import CalibratedPlan, Point

__all__ = ["CalibratedPlan", "Calibration", "Point", "calibrate"]
