"""Bytes that weights' copies and constants take, of one test's models."""

from __future__ import annotations

import gc

from amp_fx import weights

__all__ = ["Held"]


class Held:
    """Bytes that the models of one test make the process hold."""

    def __init__(self) -> None:
        # models of other tests that are garbage
        gc.collect()
        self._before = weights.held_bytes()

    def bytes(self) -> int:
        return weights.held_bytes() - self._before
