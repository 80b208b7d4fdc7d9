"""Plans, told to a reader.

Here: ``amp_fx.explain``, the report and its text, advice, numeric histograms, which kernels exist for a cast alone, and
``amp_fx.record``.
Not here: pictures and the words of reasons (``amp_fx.viz``), and the decisions themselves (``amp_fx.precision.plans``).
Open ``report.py`` first.
"""

from amp_fx.instruments.reports.advice import Advice
from amp_fx.instruments.reports.explaining import explain
from amp_fx.instruments.reports.histograms import Histogram, histogram
from amp_fx.instruments.reports.report import Recording, Report, record
from amp_fx.precision.plans.plan import Cost

__all__ = ["Advice", "Cost", "Histogram", "Recording", "Report", "explain", "histogram", "record"]
