"""The decisions as plain data: what every node computes in, every cast, and why.

Here: the plan and how it is read off a rewritten graph, plan files and their match with a graph, differences between
plans, JSON into dataclasses, files that are written whole or not at all, and who is told of a finished plan.
Not here: making decisions (``amp_fx.passes``), and what plans say to a reader (``amp_fx.viz``, ``amp_fx.reports``).
Open ``plan.py`` first.
"""

from __future__ import annotations

from amp_fx.plans.diff import Diff, diff_plans
from amp_fx.plans.label import Takes
from amp_fx.plans.plan import CastPlan, InputPlan, NodePlan, Plan
from amp_fx.plans.plan_files import choose_plan, load_plans
from amp_fx.plans.publish import is_heard, listen, publish

__all__ = [
    "CastPlan",
    "Diff",
    "InputPlan",
    "NodePlan",
    "Plan",
    "Takes",
    "choose_plan",
    "diff_plans",
    "is_heard",
    "listen",
    "load_plans",
    "publish",
]
