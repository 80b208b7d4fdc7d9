"""The spec of every node of a graph at each stage, as data. Tests check it after each pass; users' runs do not."""

from __future__ import annotations

from collections.abc import Callable

import torch.fx as fx

from amp_fx.graphs.calls import CAST, PROGRAM_CAST
from amp_fx.graphs.keys import CAST_META, LEVEL, STEP_META
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.passes.base import Pass
from amp_fx.passes.forward.insert_casts import retyped_arguments
from amp_fx.precision.plans.label import Takes, label_of


def _is_no_inserted_cast(node: fx.Node) -> bool:
    # ends of a program may be narrowed before passes run
    ends = (*node.all_input_nodes, *node.users)
    return CAST_META not in node.meta or any(end.op in ("placeholder", "output") for end in ends)


def _is_labelled(node: fx.Node) -> bool:
    return node.op != "call_function" or STEP_META in node.meta or label_of(node) is not None


def _has_dtype_if_floating(node: fx.Node) -> bool:
    return (label := label_of(node)) is None or label.traced is None or label.dtype is not None


def _reads_dtype_of_its_label(node: fx.Node) -> bool:
    label = label_of(node)
    # a level has dtypes of its own, and norms may be widened
    is_free = LEVEL in node.meta or has_trait(node, Trait.NORM, Trait.BATCH_NORM)
    if label is None or label.takes != Takes.DTYPE or label.dtype is None or is_free:
        return True
    read = [source for _, source in retyped_arguments(node, label)]
    # a step of int8 may be what a value is written by for all its readers
    return all(source.meta["val"].dtype is label.dtype or STEP_META in source.meta for source in read)


def _is_of_inductor(node: fx.Node) -> bool:
    return node.target is not PROGRAM_CAST and label_of(node) is None


def _is_of_program(node: fx.Node) -> bool:
    return node.target is not CAST


#: what holds once calls are labelled
_LABELLED = (_is_of_program, _is_no_inserted_cast, _is_labelled)
#: name of a pass that runs before casts are inserted -> what holds when it has run
_BEFORE_CASTS = {
    "pin-dtypes": _LABELLED[:2],
    **dict.fromkeys(("classify", "constrain", "keep-weights"), _LABELLED),
    **dict.fromkeys(
        ("place", "replay", "place-by-sensitivity", "choose-attention"), (*_LABELLED, _has_dtype_if_floating)
    ),
}


def spec_after(step: Pass) -> tuple[Callable[[fx.Node], bool], ...]:
    """The spec of each node of a graph on which a pass has run."""
    if ".inductor." in type(step).__module__ or getattr(step, "joint", False):
        return (_is_of_inductor,)
    return _BEFORE_CASTS.get(step.name, (_is_of_program, _has_dtype_if_floating, _reads_dtype_of_its_label))
