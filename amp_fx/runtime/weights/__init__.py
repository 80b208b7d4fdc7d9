"""A graph's weights: what is computed from them alone is lifted out of the graph, and lives across calls.

Here: the split of a graph, the patterns before it (norms folded in, products joined, weights packed), what becomes of
weights and why, the cache of what was made of them, how a changed weight is noticed, copies that are renewed on a GPU,
and compiled graphs that are called with all that.
Not here: the passes that mark copies (``passes/forward/weights.py``), and weights of exported programs
(``amp_fx.exporting``).
Open ``lift.py`` first, then ``cache.py`` and ``changes.py``.
"""

from __future__ import annotations

from amp_fx.runtime.weights.cache import clear, held_bytes
from amp_fx.runtime.weights.changes import touch

__all__ = ["clear", "held_bytes", "touch"]
