"""Graphs as FX text, as docstrings of passes show them: written of a graph, and a graph made of a text.

A text has the graph's inputs with dtype and sizes, a line for each call, and what is returned if that is not the last::

    x: f32[8, 4]; w: f32[16, 4]
    linear = torch.ops.aten.linear.default(x, w)    # f32[8, 16]; low in bf16: listed

The comment says dtype and sizes of the result, the label, and what passes have noted (:data:`NOTED`); a text need not
have all of it. Lines that are comments are for people. Names of calls are any.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import FakeTensorMode

from amp_fx._torch import OpOverload
from amp_fx.graphs.calls import target_name
from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.keys import (
    AGAIN,
    ATTENTION_MARK,
    CAST_META,
    CUSTOM,
    KEPT_META,
    LEVEL,
    MARK,
    MAY_ROUND,
    REGION_META,
    RESULT_MARK,
    STEP_META,
    TIED,
    TRACED_META,
)
from amp_fx.graphs.regions import Region
from amp_fx.graphs.values import dtypes_and_sizes
from amp_fx.precision.plans.label import label_of
from amp_fx.precision.plans.plan import dtype_name

#: what passes note of a node for others -> its words in a text
NOTED = {
    CAST_META: "inserted", STEP_META: "step", TIED: "tied", MAY_ROUND: "may round", KEPT_META: "kept", LEVEL: "level",
    MARK: "may run below", RESULT_MARK: "wide result", ATTENTION_MARK: "attention",
    AGAIN: "again", "inductor_realize_to_strides": "written as it is",
}  # fmt: skip

_DTYPES = {
    "bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32, "f8": torch.float8_e4m3fn,
    "bool": torch.bool, "int64": torch.int64, "uint8": torch.uint8,
}  # fmt: skip

#: a call, without its name, and what is said of it
Line = tuple[str, list[str]]


# ---- a graph of a text


def graph_of(
    text: str, device: str, low: torch.dtype, constants: Mapping[str, torch.Tensor] | None = None
) -> fx.GraphModule:
    """The graph of a text, as it was captured on a device where ``low`` is the low dtype.

    ``constants`` are what it reads of itself, ``self.w``.
    """
    graph, root = fx.Graph(), dict(constants or {})
    env = {"torch": torch, "inf": float("inf"), "getitem": operator.getitem}
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        for statement, said in _statements(text):
            if isinstance(statement, ast.AnnAssign):
                name, kind = ast.unparse(statement.target), ast.unparse(statement.annotation)
                env[name] = node = graph.placeholder(name)
                dtype, _, sizes = kind.partition("[")
                shape = ast.literal_eval(f"[{sizes}") if sizes else []
                node.meta["val"] = torch.empty(shape, dtype=_DTYPES[dtype], device=device)
            elif isinstance(statement, ast.Return):
                assert statement.value is not None
                node = graph.output(eval(ast.unparse(statement.value), env))
                node.meta[TRACED_META] = [dtypes_and_sizes(value) for value in node.all_input_nodes]
            elif isinstance(statement, ast.Assign):
                name = ast.unparse(statement.targets[0])
                env[name] = node = _call(graph, name, statement.value, {**env, **root}, mode)
                node.meta |= {key: True for key, words in NOTED.items() if words in said}
    for node in graph.nodes:
        node.meta[REGION_META] = {device: Region(True, low, by_user=False)}
    return fx.GraphModule(root, graph)


def _statements(text: str) -> Iterator[tuple[ast.stmt, list[str]]]:
    """The statements of a text, and what is said of each in the comment behind it."""
    said = {
        n: line.partition("# ")[2].split("; ") for n, line in enumerate(text.splitlines(), 1) if "# " in line
    }
    statement = ast.Pass()
    for statement in ast.parse(text).body:
        yield statement, said.get(statement.end_lineno or 0, [])
    if isinstance(statement, ast.Assign):
        yield ast.Return(ast.Name(ast.unparse(statement.targets[0]), ast.Load())), []


def _call(graph: fx.Graph, name: str, value: ast.expr, env: dict[str, Any], mode: FakeTensorMode) -> fx.Node:
    if isinstance(value, ast.Attribute):
        node = graph.get_attr(value.attr)
        node.meta["val"] = mode.from_tensor(env[value.attr])
        return node
    assert isinstance(value, ast.Call), ast.unparse(value)
    args = tuple(eval(ast.unparse(each), env) for each in value.args)
    kwargs = {str(each.arg): eval(ast.unparse(each.value), env) for each in value.keywords}
    node = graph.create_node("call_function", eval(ast.unparse(value.func), env), args, kwargs, name)
    node.meta["val"] = run_fake(node, None if node.all_input_nodes else mode)
    return node


# ---- a text of a graph


def text_of(gm: fx.GraphModule) -> str:
    """Each node of a graph in a line: the call, then dtype and sizes of its result, its label, and what is noted."""
    return "\n".join(map(_line, gm.graph.nodes))


def lines_of(text: str) -> list[Line]:
    """The calls of a text in order, whose names are numbers, and what is said of each."""
    names, lines, numbers = dict[str, str](), list[Line](), itertools.count()
    for statement, said in _statements(text):
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                node.id = names.get(node.id, node.id)
        if isinstance(statement, ast.Assign):
            names[ast.unparse(statement.targets[0])] = f"_{next(numbers)}"
            lines.append((ast.unparse(statement.value), said))
        elif isinstance(statement, ast.AnnAssign):
            names[ast.unparse(statement.target)] = f"_{next(numbers)}"
        else:
            lines.append((ast.unparse(statement), []))
    return lines


def differences(wanted: str, found: str) -> list[str]:
    """What one text says, and another does not."""
    ours, theirs = lines_of(wanted), lines_of(found)
    calls = [
        f"{one[0]} is not {other[0]}" for one, other in zip(ours, theirs, strict=False) if one[0] != other[0]
    ]
    if len(ours) != len(theirs):
        calls.append(f"{len(ours)} lines are not {len(theirs)}")
    return calls or [
        f"{call}: {part!r} is none of {actual}"
        for (call, said), (_, actual) in zip(ours, theirs, strict=True)
        for part in said
        if not any(re.match(rf"{re.escape(part)}($|[ :])", each) for each in actual)
    ]


def _line(node: fx.Node) -> str:
    if node.op == "output":
        return f"return {node.args[0]}"
    if node.op == "placeholder":
        return f"{node.name}: {_type(node.meta.get('val'))}"
    given = ", ".join([*map(repr, node.args), *(f"{name}={value!r}" for name, value in node.kwargs.items())])
    target = f"torch.ops.{node.target}" if isinstance(node.target, OpOverload) else target_name(node)
    call = f"self.{node.target}" if node.op == "get_attr" else f"{target}({given})"
    return f"{node.name} = {call}  # {'; '.join([_type(node.meta.get('val')), *_said(node)])}"


def _type(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_type, value))})"
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{_short(value.dtype)}{[*value.shape] if value.ndim else ''}"


def _short(dtype: torch.dtype) -> str:
    return dtype_name(dtype).replace("float", "f")


def _said(node: fx.Node) -> list[str]:
    label, said = label_of(node), list[str]()
    if label is not None:
        dtype = "" if label.dtype is None else f" in {_short(label.dtype)}"
        said.append(f"{label.op_class.value}{dtype}: {', '.join(reason.kind for reason in label.reasons)}")
    noted: Mapping[str, Any] = {**node.meta, **(node.meta.get(CUSTOM) or {})}
    for key, words in NOTED.items():
        value = noted.get(key)
        parts = value if isinstance(value, tuple) else () if value is True else (value,)
        if value not in (None, False):
            names = [str(getattr(part, "name", part)) for part in parts if part is not None]
            said.append(" ".join([words, *filter(None, names)]))
    return said
