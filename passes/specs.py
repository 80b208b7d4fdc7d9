"""What holds of every node of a graph at each stage, as data. Tests check it after each pass; users' runs do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.fx as fx

from amp_fx.graphs.calls import CAST, PROGRAM_CAST
from amp_fx.graphs.keys import CAST_META, LEVEL, STEP_META
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.passes.base import Pass
from amp_fx.passes.forward.insert_casts import retyped_arguments
from amp_fx.precision.plans.label import Takes, label_of

#: what is said of a node -> whether it holds
Spec = Mapping[str, Callable[[fx.Node], bool]]


def _is_not_inserted(node: fx.Node) -> bool:
    # ends of a program may be narrowed before passes run
    ends = (*node.all_input_nodes, *node.users)
    return CAST_META not in node.meta or any(end.op in ("placeholder", "output") for end in ends)


def _is_labelled(node: fx.Node) -> bool:
    return node.op != "call_function" or STEP_META in node.meta or label_of(node) is not None


def _has_dtype(node: fx.Node) -> bool:
    label = label_of(node)
    return label is None or label.traced is None or label.dtype is not None


def _reads_its_dtype(node: fx.Node) -> bool:
    label = label_of(node)
    # a level has dtypes of its own, and norms may be widened
    is_free = LEVEL in node.meta or has_trait(node, Trait.NORM, Trait.BATCH_NORM)
    if label is None or label.takes != Takes.DTYPE or label.dtype is None or is_free:
        return True
    return all(source.meta["val"].dtype is label.dtype for _, source in retyped_arguments(node, label))


_CAPTURED: Spec = {
    "no cast is inserted": _is_not_inserted,
    "casts are the program's op": lambda node: node.target is not CAST,
}
_LABELLED: Spec = {**_CAPTURED, "every call has a label": _is_labelled}
_PLACED: Spec = {**_LABELLED, "every floating result has a dtype": _has_dtype}
_LOWERED: Spec = {
    "casts are the program's op": _CAPTURED["casts are the program's op"],
    "every floating result has a dtype": _has_dtype,
    "every operand has the dtype of its call's label": _reads_its_dtype,
}
_JOINT: Spec = {
    "casts are Inductor's op": lambda node: node.target is not PROGRAM_CAST,
    "no call has a label": lambda node: label_of(node) is None,
}

#: name of a pass on captured graphs -> what holds when it has run, if casts are not inserted yet
_AFTER: Mapping[str, Spec] = {
    "pin-dtypes": _CAPTURED,
    **dict.fromkeys(("classify", "constrain", "keep-weights"), _LABELLED),
    **dict.fromkeys(("place", "replay", "place-by-sensitivity", "choose-attention"), _PLACED),
}


def spec_after(step: Pass) -> Spec:
    """What holds of a graph on which a pass has run."""
    if ".inductor." in type(step).__module__ or getattr(step, "joint", False):
        return _JOINT
    return _AFTER.get(step.name, _LOWERED)
