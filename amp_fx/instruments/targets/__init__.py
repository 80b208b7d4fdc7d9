"""GPUs that need not be in this machine: what they are, and how to compile for them.

Here: targets by name, the device that torch, Inductor and Triton are made to believe in, the process in which they do,
and graphs that are traced on the CPU, moved to a target and compiled for it.
Not here: published numbers (``amp_fx.precision.placement.gpus``), and what is done with compiled graphs
(``amp_fx.instruments.reports``).
Open ``tracing.py`` first.
"""

from amp_fx.instruments.targets.process import TARGETS, Target, find_target

__all__ = ["TARGETS", "Target", "find_target"]
