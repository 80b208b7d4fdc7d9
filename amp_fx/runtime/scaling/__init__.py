"""Loss scaling inside the compiled backward.

Here: :class:`amp_fx.GradScaler`, and what a step of it finds.
Not here: the arithmetic in the backward (``passes/inductor/scale_backward.py``), and graphs that take a scale
(``amp_fx/compiler/compiling.py``). The scaler does not know graphs; a graph finds its scaler by name.
Open ``scaler.py`` first.
"""

from amp_fx.runtime.scaling.scaler import GradScaler, find_scaler

__all__ = ["GradScaler", "find_scaler"]
