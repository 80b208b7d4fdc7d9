"""Which op may run in which precision.

Here: op lists as data, one row per group with its reason, the classes they give, what ``fast`` adds, and the user's
rules on top.
Not here: what a whole graph makes of them (``passes/forward/classify.py``), and costs (``amp_fx.precision.placement``).
Open ``common.py`` first.
"""

from amp_fx.precision.policy.classes import OpClass, OpGroup, Origin
from amp_fx.precision.policy.rules import Policy, Rule

__all__ = ["OpClass", "OpGroup", "Origin", "Policy", "Rule"]
