"""What is derived from weights and lives across calls: low copies, with scales or without, and what Inductor folds.

Here: the recipes, the cache of what they derive, how a changed weight is noticed, copies that are renewed on a GPU,
products by several weights that become one, and graphs that take derived tensors.
Not here: the passes that make weights inputs or fold them (``passes/forward``), and weights of exported programs
(``amp_fx.exporting``).
Open ``recipes.py`` first, then ``derived.py`` and ``changes.py``.
"""

from __future__ import annotations

from amp_fx.weights.changes import touch
from amp_fx.weights.derived import clear, held_bytes

__all__ = ["clear", "held_bytes", "touch"]
