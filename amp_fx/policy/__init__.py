"""Which op may run in which precision: op lists as data, and the user's rules on top."""

from __future__ import annotations

from amp_fx.policy.classes import OpClass, OpGroup, Origin
from amp_fx.policy.rules import Policy, Rule

__all__ = ["OpClass", "OpGroup", "Origin", "Policy", "Rule"]
