"""Low-precision copies of weights.

Here: copies that live across calls, in graphs without gradients, how a changed weight is noticed, copies on a GPU that
renew themselves, what Inductor folds and packs weights to, and how that follows the weights.
Not here: the passes that make weights inputs or fold them (``passes/forward``), and weights of exported programs
(``amp_fx.exporting``).
Open ``watch.py`` first, then ``copies.py``.
"""

from __future__ import annotations

from amp_fx.weights.copies import LowCopies
from amp_fx.weights.freezing import FrozenGraph, freeze
from amp_fx.weights.held import clear, held_bytes
from amp_fx.weights.inference import KeptWeights, cached, copied_weights, weight_inputs
from amp_fx.weights.watch import touch

__all__ = [
    "FrozenGraph",
    "KeptWeights",
    "LowCopies",
    "cached",
    "clear",
    "copied_weights",
    "freeze",
    "held_bytes",
    "touch",
    "weight_inputs",
]
