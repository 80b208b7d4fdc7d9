"""The decisions as plain data: what every call computes in, every cast, and why.

Here: the label that passes write, the plan and how it is read off a rewritten graph, which row a call of another graph
follows, plan files, differences between plans, sensitivity as data, and JSON files.
Not here: making decisions (``amp_fx.passes``), and what plans say to a reader (``amp_fx.viz``,
``amp_fx.instruments.reports``).
Open ``plan.py`` first.
"""

from amp_fx.precision.plans.plan import CastPlan, NodePlan, Plan

__all__ = ["CastPlan", "NodePlan", "Plan"]
