"""What is held of weights: low copies, and what frozen graphs have made of them."""

from __future__ import annotations

from amp_fx.state import register
from amp_fx.weights.constants import folded_bytes
from amp_fx.weights.copies import clear_copies, copied_bytes
from amp_fx.weights.watch import forget

__all__ = ["clear", "held_bytes"]


def clear() -> None:
    """Drops all copies, and makes all that was computed from weights again before it is used."""
    clear_copies()
    forget()


def held_bytes() -> int:
    """Bytes of all copies that are alive, and of the constants that frozen graphs have made of weights."""
    return copied_bytes() + folded_bytes()


register("copies of weights", clear)
