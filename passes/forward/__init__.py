"""Passes on the captured forward graph, before AOTAutograd: they decide precision and insert casts."""
