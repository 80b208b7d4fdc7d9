"""A graph as FX text, as docstrings of passes show it."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload
from amp_fx.graphs.calls import target_name
from amp_fx.graphs.keys import (
    ATTENTION_MARK,
    CAST_META,
    CUSTOM,
    KEPT_META,
    LEVEL,
    MARK,
    MAY_ROUND,
    RESULT_MARK,
    STEP_META,
    TIED,
)
from amp_fx.precision.plans.label import label_of
from amp_fx.precision.plans.plan import dtype_name

#: what passes note of a node for others -> its words in a text
NOTED = {
    CAST_META: "inserted", STEP_META: "step", TIED: "tied", MAY_ROUND: "may round", KEPT_META: "kept", LEVEL: "level",
    MARK: "may run below", RESULT_MARK: "wide result", ATTENTION_MARK: "attention",
    "inductor_realize_to_strides": "written as it is",
}  # fmt: skip


def graph_text(gm: fx.GraphModule) -> str:
    """Each node of a graph in a line: the call, then dtype and sizes of its result, its label, and what is noted."""
    return "\n".join(map(_line, gm.graph.nodes))


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op == "placeholder":
        return f"{node.name}: {_type(node.meta.get('val'))}"
    given = ", ".join([*map(repr, node.args), *(f"{name}={value!r}" for name, value in node.kwargs.items())])
    path = "torch.ops." if isinstance(node.target, OpOverload) else ""
    call = (
        str(node.target)
        if node.op == "get_attr"
        else f"{path}{node.target if path else target_name(node)}({given})"
    )
    return "; ".join([f"{node.name} = {call}  # {_type(node.meta.get('val'))}", *_said(node)])


def _type(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_type, value))})"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{_short(value.dtype)}{[*value.shape]}"


def _short(dtype: torch.dtype) -> str:
    return dtype_name(dtype).replace("float", "f")


def _said(node: fx.Node) -> list[str]:
    label, said = label_of(node), list[str]()
    if label is not None:
        dtype = "" if label.dtype is None else f" in {_short(label.dtype)}"
        said.append(f"{label.op_class.value}{dtype}: {', '.join(reason.kind for reason in label.reasons)}")
    noted = {**node.meta, **(node.meta.get(CUSTOM) or {})}
    for key, words in NOTED.items():
        value = noted.get(key)
        parts = value if isinstance(value, tuple) else () if value is True else (value,)
        if value not in (None, False):
            said.append(
                " ".join([words, *(str(getattr(part, "name", part)) for part in parts if part is not None)])
            )
    return said
