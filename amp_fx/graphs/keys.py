"""All keys of ``node.meta`` and ``graph_module.meta`` that are amp_fx's own: what they are on, and what they hold."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import torch.fx as fx

__all__ = [
    "BUDGET", "CAST_META", "COPY_META", "LABEL", "LEVEL", "MARK", "MARKS", "MAY_ROUND", "NODE_KEYS", "OUTPUT_META",
    "PART", "PLAN_META", "PRODUCTS_MARK", "RAN_META", "RECIPE_META", "REGION_META", "RESULT_MARK", "SENSITIVITY",
    "SOURCE_META", "STEP_META", "TIED", "Key",
]  # fmt: skip

T = TypeVar("T")


class Key(Generic[T]):
    """A key with the type of its values."""

    def __init__(self, name: str) -> None:
        self.name = name

    def of(self, owner: fx.Node | fx.GraphModule) -> T | None:
        """The value that a node or graph has, or None."""
        return owner.meta.get(self.name)

    def set(self, owner: fx.Node | fx.GraphModule, value: T) -> None:
        """Notes a value."""
        owner.meta[self.name] = value


# what capture notes

#: call -> type of a device -> the autocast region that the call is in
REGION_META = "amp_fx_region"
#: the graph's output -> dtypes of each result as Dynamo traced them
OUTPUT_META = "amp_fx_traced"
#: input of a graph that was moved to a GPU that is not there -> what it is in the program
SOURCE_META = "amp_fx_source"

# what passes decide, and what they add to a graph

#: call -> its label (:class:`amp_fx.plans.label.Label`)
LABEL = "amp_fx_label"
#: cast that amp_fx has inserted -> True
CAST_META = "amp_fx_cast"
#: call that a pass has added to compute what another call did -> True: it has no row in a plan; what it reads counts
#: as read by the call that reads it
STEP_META = "amp_fx_step"
#: call -> the fake values with which it ran last
RAN_META = "amp_fx_ran"
#: input that holds what was made of a weight -> name of the weight
COPY_META = "amp_fx_copy_of"
#: likewise -> its recipe, and which of the recipe's tensors it is
RECIPE_META = "amp_fx_copy_recipe"
#: module that was exported -> its plan
PLAN_META = "amp_fx_plan"

# what one pass notes for a later one

#: call -> True where its result shares a storage that somebody writes to, so that it cannot be re-typed alone
TIED = Key[bool]("amp_fx_tied")
#: call -> whether its result may be stored low where autocast has fp32
MAY_ROUND = Key[bool]("amp_fx_may_round")
#: matmul -> the level below 16 bits in which it is to run
LEVEL = Key[Any]("amp_fx_level")
#: copy of a matrix that may be stored, or its factors -> of which matrix, by which recipe
PART = Key[Any]("amp_fx_part")
#: graph that was placed by sensitivity -> sensitivity of the placement that was chosen, and of torch.autocast's
SENSITIVITY = Key[tuple[float, float]]("amp_fx_sensitivity")
#: graph that is placed by sensitivity under a policy below 16 bits -> what its matmuls may add to the error
BUDGET = Key[Any]("amp_fx_level_budget")

# keys inside of ``node.meta["custom"]``, which AOTAutograd copies to all that a call becomes, backward included

#: call that policy and plan let run below 16 bits -> its name in the plan
MARK = "amp_fx_may_run_below"
#: product whose result a rule has in fp32 -> its name in the plan
RESULT_MARK = "amp_fx_result"

#: attention that is written as two products around a softmax -> its name in the plan
PRODUCTS_MARK = "amp_fx_products"

#: the three that passes on Inductor's graphs may read, where their names are in a pass's fields
MARKS = (MARK, RESULT_MARK, PRODUCTS_MARK)
#: keys of nodes; a program that is exported has none of them
NODE_KEYS = frozenset(
    (REGION_META, OUTPUT_META, SOURCE_META, LABEL, CAST_META, STEP_META, RAN_META, COPY_META, RECIPE_META)
).union(key.name for key in (TIED, MAY_ROUND, LEVEL, PART))
