"""All keys of ``node.meta`` and ``graph_module.meta`` that are amp_fx's own: what they are on, and what they hold."""

from __future__ import annotations

from typing import Any, NamedTuple

#: how all of them begin; nodes of a program that is exported have none of them
OWN = "amp_fx_"

# what capture notes

#: call -> type of a device -> the autocast region that the call is in
REGION_META = "amp_fx_region"
#: the graph's output -> of each result, dtypes and sizes as Dynamo traced them; ``classify`` notes them of each call
TRACED_META = "amp_fx_traced"
#: input of a graph that was moved to a GPU that is not there -> what it is in the program
SOURCE_META = "amp_fx_source"

# what passes decide, and what they add to a graph

#: call -> its label (:class:`amp_fx.precision.plans.label.Label`)
LABEL = "amp_fx_label"
#: cast that amp_fx has inserted -> True
CAST_META = "amp_fx_cast"
#: node -> rows of the plan for calls behind it that nothing reads any more
GONE = "amp_fx_gone"
#: call that a pass has added to compute what another call did -> True: it has no row in a plan; what it reads counts
#: as read by the call that reads it
STEP_META = "amp_fx_step"
#: call -> the fake values with which it ran last
RAN_META = "amp_fx_ran"
#: copy of a weight that is made once, and kept or stored -> :class:`Kept`
KEPT_META = "amp_fx_kept"
#: input of an exported program that holds what was made of a weight -> name of the weight's input
COPY_META = "amp_fx_copy_of"
#: module that was exported -> its plan
PLAN_META = "amp_fx_plan"

# what one pass notes for a later one

#: call -> True where its result shares a storage that somebody writes to, so that it cannot be re-typed alone
TIED = "amp_fx_tied"
#: call -> whether its result may be stored low where autocast has fp32
MAY_ROUND = "amp_fx_may_round"
#: matmul -> the level below 16 bits in which it is to run
LEVEL = "amp_fx_level"
#: copy of a matrix that may be kept, or its factors -> of which matrix, in which form
PART = "amp_fx_part"
#: graph that is placed by sensitivity under a policy below 16 bits -> what its matmuls may add to the error
BUDGET = "amp_fx_level_budget"

#: value that a forward graph returns to its backward -> True where the backward is to compute it, from what it reads;
#: and in the backward the calls that do
AGAIN = "amp_fx_again"
#: value that a forward graph returns to its backward -> :class:`Saved`
SAVED = "amp_fx_saved"

#: what AOTAutograd copies to all that a call becomes, backward included: the keys below stand in this one
CUSTOM = "custom"
#: call that policy and plan let run below 16 bits -> its name in the plan
MARK = "amp_fx_may_run_below"
#: product whose result a rule has in fp32 -> its name in the plan
RESULT_MARK = "amp_fx_result"
#: attention of which an implementation was chosen -> its name in the plan
ATTENTION_MARK = "amp_fx_attention"


class Saved(NamedTuple):
    """The note on what a forward graph keeps of a value for its backward.

    Attributes:
        value: name of the call that returns the value; of several that share a storage, the first.
        bits: of an element of it: 8, 4 or 1; None where it is kept as it is.
        how: in words, what else is to be said of the form, or why it is kept as it is.
    """

    value: str
    bits: int | None
    how: str


class Kept(NamedTuple):
    """The note on a copy of a weight that is made once.

    Attributes:
        weight: name of the input that holds the weight.
        suffix: what the copy's name has behind that; empty for the copy that is stored in the weight's place.
        form: the dtype that the weight is cast to, or :class:`amp_fx.precision.policy.forms.ScaledRows`; None for
        anything else.
    """

    weight: str
    suffix: str
    form: Any = None
