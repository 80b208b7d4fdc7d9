"""What plans say to a reader.

Here: ``amp_fx.explain``, the report and its text, advice, numeric histograms, which kernels exist for a cast alone, and
``amp_fx.record``.
Not here: pictures and the words of reasons (``amp_fx.viz``), and the decisions themselves (``amp_fx.plans``).
Open ``report.py`` first.
"""

from amp_fx.plans.plan import Cost
from amp_fx.reports.advice import Advice
from amp_fx.reports.explaining import explain
from amp_fx.reports.histograms import Histogram, histogram
from amp_fx.reports.report import Recording, Report, record

__all__ = ["Advice", "Cost", "Histogram", "Recording", "Report", "explain", "histogram", "record"]
