"""Loss scaling inside the compiled backward.

Here: :class:`amp_fx.GradScaler`, graphs that take a scale, and the warnings where scaling is missing or ignored.
Not here: the arithmetic in the backward (``passes/joint/scale_backward.py``). The scaler does not know graphs; a graph
finds its scaler by name.
Open ``scaler.py`` first.
"""

from __future__ import annotations

from amp_fx.scaling.registry import find_scaler
from amp_fx.scaling.scaled_graph import ScaledGraph
from amp_fx.scaling.scaler import GradScaler
from amp_fx.scaling.unscaled import expect_scaler, is_scaled, warn_ignored, without_scaling

__all__ = [
    "GradScaler",
    "ScaledGraph",
    "expect_scaler",
    "find_scaler",
    "is_scaled",
    "warn_ignored",
    "without_scaling",
]
