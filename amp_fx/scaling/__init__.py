"""Loss scaling inside the compiled backward.

Here: :class:`amp_fx.GradScaler`, what a step of it finds, and graphs that take a scale.
Not here: the arithmetic in the backward (``passes/inductor/scale_backward.py``). The scaler does not know graphs; a
graph finds its scaler by name.
Open ``scaler.py`` first.
"""

from __future__ import annotations

from amp_fx.scaling.scaled_graph import ScaledGraph
from amp_fx.scaling.scaler import GradScaler, find_scaler

__all__ = ["GradScaler", "ScaledGraph", "find_scaler"]
