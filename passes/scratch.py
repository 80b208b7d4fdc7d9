"""What passes note for later passes, in ``meta`` of nodes and graphs: nothing of it is in a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import torch.fx as fx

from amp_fx.placement.cut import Var
from amp_fx.policy.levels import Level
from amp_fx.weights.recipes import Scaled

__all__ = ["BUDGET", "HARM", "LEVEL", "MAY_ROUND", "PART", "TIED", "Budget", "Key", "Part"]

T = TypeVar("T")


@dataclass(frozen=True)
class Key(Generic[T]):
    """A key of ``meta`` with the type of its values."""

    name: str

    def of(self, owner: fx.Node | fx.GraphModule) -> T | None:
        """What is noted; None where nothing is."""
        return owner.meta.get(self.name)

    def set(self, owner: fx.Node | fx.GraphModule, value: T) -> None:
        """Notes a value."""
        owner.meta[self.name] = value


@dataclass(frozen=True)
class Budget:
    """What the matmuls of a graph may add to the error.

    Attributes:
        harms: variable of the cut -> what it adds to the squared relative error of the gradient in the level below;
            what is missing was not measured, and stays low.
        limit: of their sum.
    """

    harms: tuple[tuple[Var, float], ...]
    limit: float


@dataclass(frozen=True)
class Part:
    """What a node holds of a matrix.

    Attributes:
        source: the matrix.
        recipe: of the copy.
        index: which of its tensors.
    """

    source: fx.Node
    recipe: Scaled
    index: int


#: of a call: its result shares a storage that somebody writes to, so it cannot be re-typed alone
TIED = Key[bool]("amp_fx_tied")

#: of a call: its result may be stored low where autocast has fp32
MAY_ROUND = Key[bool]("amp_fx_may_round")

#: of a matmul: the level below 16 bits in which it is to run
LEVEL = Key[Level]("amp_fx_level")

#: of a copy of a matrix that may be stored, and of its factors
PART = Key[Part]("amp_fx_part")

#: of a graph that was placed by harm: harm of the placement that was chosen, and of torch.autocast's
HARM = Key[tuple[float, float]]("amp_fx_harm")

#: of a graph that is placed by harm under a policy below 16 bits: for its matmuls
BUDGET = Key[Budget]("amp_fx_level_budget")
