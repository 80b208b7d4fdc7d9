"""What is made of weights: low copies, with scales or without, and what Inductor folds and packs.

All of it is one thing: a value that a recipe makes of weights, kept until these change.

Here: the recipes, the values, how a changed weight is noticed, copies that are renewed on a GPU, and graphs that take
such values.
Not here: the passes that make weights inputs or fold them (``passes/forward``), and weights of exported programs
(``amp_fx.exporting``).
Open ``recipes.py`` first, then ``derived.py``, ``kept.py`` and ``changes.py``.
"""

from __future__ import annotations

from amp_fx.weights.changes import touch
from amp_fx.weights.derived import held_bytes
from amp_fx.weights.freezing import FrozenGraph, freeze
from amp_fx.weights.inference import KeptWeights, cached, copied_weights, weight_inputs
from amp_fx.weights.kept import clear

__all__ = [
    "FrozenGraph",
    "KeptWeights",
    "cached",
    "clear",
    "copied_weights",
    "freeze",
    "held_bytes",
    "touch",
    "weight_inputs",
]
