"""The backward graph that adds to gradients, compiled when it is first needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from amp_fx._torch import autocast_disabled

__all__ = ["Compiled", "Second"]

#: takes its arguments in one list, and clears it
Compiled = Callable[[list[Any]], Sequence[Any]]


class Second:
    """The backward that adds to gradients.

    Args:
        positions: of the leaves, among the inputs of the program, whose gradients it adds to.
        make: compiles it.
    """

    def __init__(self, positions: Sequence[int], make: Callable[[], Compiled]) -> None:
        self.positions = positions
        self._make = make

    @functools.cached_property
    def _compiled(self) -> Compiled:
        return self._make()

    def run(self, args: list[Any], grads: Sequence[Tensor]) -> Sequence[Any]:
        """What the backward returns, with None for what it has added.

        Args:
            args: of the backward. Cleared, so that each can be freed after its last use.
            grads: written to.
        """
        args.extend(grads)
        with autocast_disabled():
            return self._compiled(args)
