"""What weights' copies and constants cost: bytes that they take, and compiles."""

from __future__ import annotations

import gc
from typing import Any

import pytest

import amp_fx.compiling
from amp_fx import weights

__all__ = ["Compiles", "Held"]


class Compiles:
    """Counts how often Inductor is asked for a graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = amp_fx.compiling.compile_with_inductor

        def count(*args: Any) -> Any:
            self.count += 1
            return original(*args)

        monkeypatch.setattr(amp_fx.compiling, "compile_with_inductor", count)


class Held:
    """Bytes that the models of one test make the process hold."""

    def __init__(self) -> None:
        # models of other tests that are garbage
        gc.collect()
        self._before = weights.held_bytes()

    def bytes(self) -> int:
        return weights.held_bytes() - self._before
