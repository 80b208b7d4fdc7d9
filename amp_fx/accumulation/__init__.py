"""Gradient accumulation inside the compiled backward: from the second micro-batch on, it adds to ``.grad`` itself.

Here: when that gives the same gradients as autograd's own addition, and how a compiled graph comes to do it.
Not here: the addition in the graph (``passes/partitioned/accumulate_gradients.py``).
Open ``compiled.py`` first.
"""

from __future__ import annotations

from amp_fx.accumulation.compiled import adding

__all__ = ["adding"]
