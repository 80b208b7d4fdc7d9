"""Small modules without a class of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["Parts"]


class Parts(nn.Module):
    """Modules by name, and what is computed with them.

    Args:
        call: gets the module itself and what it is called with.
        parts: ``Parts(lambda m, x: x + m.up(x), up=nn.Linear(8, 8))``.
    """

    def __init__(self, call: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self._call = call
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *args: Any) -> Any:
        """What the function says."""
        return self._call(self, *args)
