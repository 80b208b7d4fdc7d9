"""Where casts are cheapest: the exact minimum cut, what a placement costs, and what devices can do.

Here: the cut and its terms, the cost model, device profiles (the data, the built-in tables, the measuring), and casts
that change the memory layout as well.
Not here: what is allowed (``amp_fx.policy`` and the hazards of ``amp_fx.passes``), and the pass that asks for a cut
(``passes/forward/place.py``).
Open ``cut.py`` first.
"""

from __future__ import annotations

from amp_fx.placement.cost import CostModel
from amp_fx.placement.cut import HIGH, LOW, ContradictionError, Problem, Shared, evaluate, solve
from amp_fx.placement.devices import builtin, resolve
from amp_fx.placement.profile import DeviceProfile, ProfileError

__all__ = [
    "HIGH",
    "LOW",
    "ContradictionError",
    "CostModel",
    "DeviceProfile",
    "Problem",
    "ProfileError",
    "Shared",
    "builtin",
    "evaluate",
    "resolve",
    "solve",
]
