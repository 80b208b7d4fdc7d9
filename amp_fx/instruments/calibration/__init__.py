"""Accuracy has a price: what each rounding does to a model's gradient, measured on the user's own data.

Here: the graphs of a model (``graphs.py``), run with every value observed (``measuring.py``, ``operands.py`` for the
matmuls inside calls, ``recurrent.py`` for LSTMs, ``writes.py`` for writes in place, ``smoothing.py`` for ReLUs) and
differentiated (``probing.py``), and what adds up (``meter.py``); graphs with their prices (``traced.py``) and their
placements (``cuts.py``, ``second_cut.py``); points, plans, figure and text (``frontier.py``), the compiled check
(``verifying.py``), and all of it for int8 in one call (``quantizing.py``).
Not here: sensitivity as plain data (``amp_fx.precision.plans.sensitivity``), and the cuts that weigh it
(``passes/forward/place_by_sensitivity.py``, and ``amp_fx.precision.placement.priced``), nor the step that is run
(``amp_fx.instruments.step``).
Open ``calibrating.py`` first.
"""

from amp_fx.instruments.calibration.calibrating import calibrate
from amp_fx.instruments.calibration.calibration import Calibration
from amp_fx.instruments.calibration.frontier import CalibratedPlan, Point
from amp_fx.instruments.calibration.quantizing import quantize

__all__ = ["CalibratedPlan", "Calibration", "Point", "calibrate", "quantize"]
