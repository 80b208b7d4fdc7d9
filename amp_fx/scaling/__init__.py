"""Loss scaling inside the compiled backward.

Here: :class:`amp_fx.GradScaler`, and graphs that take a scale and return flags.
Not here: the arithmetic in the backward (``passes/joint/scale_backward.py``). The scaler does not know graphs; a graph
finds its scaler by name.
Open ``scaler.py`` first.
"""

from __future__ import annotations

from amp_fx.scaling.scaled_graph import ScaledGraph, is_scaled, warn_unscaled, without_scaling
from amp_fx.scaling.scaler import GradScaler, find_scaler

__all__ = ["GradScaler", "ScaledGraph", "find_scaler", "is_scaled", "warn_unscaled", "without_scaling"]
