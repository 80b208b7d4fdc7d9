"""How a plan is read off a rewritten graph: rows, inputs, casts, and the sizes of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import HigherOrderOperator, OpOverload, size_hint
from amp_fx.graphs.calls import is_cast, is_parameter, output_nodes, source_line, tensor_nodes
from amp_fx.graphs.fake_runs import is_matmul, matmul_flops
from amp_fx.graphs.keys import CAST_META, COPY_META, STEP_META
from amp_fx.graphs.values import cast_bytes, is_eligible, is_view, numel, tensors
from amp_fx.plans.label import Label, label_of
from amp_fx.plans.plan import CastPlan, InputPlan, NodePlan, Plan
from amp_fx.plans.reasons import Kind
from amp_fx.policy.levels import is_narrow

__all__ = ["add_graph", "input_plan", "node_plan"]

_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)


def add_graph(plan: Plan, gm: fx.GraphModule, path: str = "") -> None:
    """Appends the decisions that a rewritten graph carries.

    Args:
        plan: is extended.
        gm: a graph after the passes.
        path: prefix of its node names, ``"wrap_body_0."`` for a body.
    """
    aliases: dict[str, str] = {}
    flops: dict[Any, int] = {}
    inputs: list[InputPlan] = []
    for node in gm.graph.nodes:
        label = label_of(node)
        if node.op == "placeholder" and (given := input_plan(node, path)) is not None:
            inputs.append(given)
        if label is not None and not _is_about_numbers(node):
            row = node_plan(label, node, path, flops)
            plan.nodes.append(replace(row, inputs=row.inputs + _connect_body(gm, node, path, aliases)))
        if is_cast(node) and STEP_META not in node.meta and _changes_dtype(node):
            plan.casts.append(_cast_plan(node, path))
    given = [*plan.inputs, *inputs]
    plan.inputs = [replace(each, alias=aliases.get(each.name, each.alias)) for each in given]


def node_plan(label: Label, node: fx.Node, path: str, seen: dict[Any, int]) -> NodePlan:
    """The row of a call: its label, sizes and neighbours.

    Args:
        label: of the call.
        node: in its final graph.
        path: prefix of node names.
        seen: FLOPs of calls so far, by op and shapes: repeated layers are looked at once.
    """
    results = tensors(node.meta.get("val"))
    read, matmul = _read(node)
    shape = _shape(results[0]) if results else ()
    wide = torch.float32 if label.is_because(Kind.WIDE_RESULT) else None
    floating = [] if is_view(node) else [value for value in results if value.is_floating_point()]
    operands = tuple(
        _shape(value) for source in read if is_eligible(value := source.meta.get("val")) or is_narrow(value)
    )
    key = None if matmul is None or not operands else (matmul.target, operands, shape)
    if key is not None and matmul is not None and key not in seen:
        seen[key] = matmul_flops(matmul)
    return NodePlan(
        **vars(label),
        shape=shape,
        bytes=sum(numel(value) * (wide or value.dtype).itemsize for value in floating),
        flops=0 if key is None else seen[key],
        inputs=tuple(f"{path}{source.name}" for source in dict.fromkeys(read)),
        operands=operands,
    )


def _read(node: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """What a call reads, and what it multiplies with if that is itself or one of its steps."""
    read: list[fx.Node] = []
    matmul = node if is_matmul(node) else None
    for source in tensor_nodes((node.args, node.kwargs)):
        if STEP_META not in source.meta:
            read.append(source)
            continue
        more, found = _read(source)
        read += [each for each in more if each not in read]
        matmul = matmul or found
    return read, matmul


def _shape(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(size_hint(size) for size in value.shape)


def input_plan(node: fx.Node, path: str) -> InputPlan | None:
    """The plan of a graph input; None for inputs that are not tensors."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return InputPlan(
        name=f"{path}{node.name}",
        parameter=is_parameter(node),
        dtype=value.dtype if value.is_floating_point() or COPY_META in node.meta else None,
        shape=_shape(value),
        bytes=numel(value) * value.dtype.itemsize,
        copy_of=node.meta.get(COPY_META, ""),
    )


def _is_about_numbers(node: fx.Node) -> bool:
    """True for arithmetic on sizes and Python numbers, and its checks: where shapes are static, there is none."""
    value = node.meta.get("val")
    if value is None and isinstance(node.target, OpOverload):
        return not any(tensors(source.meta.get("val")) for source in node.all_input_nodes)
    return isinstance(value, _NUMBERS)


def _connect_body(gm: fx.GraphModule, node: fx.Node, path: str, aliases: dict[str, str]) -> tuple[str, ...]:
    """Notes which outer values a higher-order op's body is given; returns what the body hands back."""
    if not isinstance(node.target, HigherOrderOperator):
        return ()
    found: Sequence[fx.Node] = node.all_input_nodes
    bodies = [arg for arg in found if isinstance(getattr(gm, str(arg.target), None), fx.GraphModule)]
    results: list[str] = []
    given = [arg for arg in tensor_nodes(node.args) if arg not in bodies]
    for body in bodies:
        inner = getattr(gm, str(body.target))
        prefix = f"{path}{body.target}."
        # operands are handed on in order; where there are more or fewer, the op has a meaning of its own
        placeholders = inner.graph.find_nodes(op="placeholder")
        if len(placeholders) == len(given):
            aliases.update(
                {f"{prefix}{p.name}": f"{path}{g.name}" for p, g in zip(placeholders, given, strict=True)}
            )
        results += [f"{prefix}{output.name}" for output in output_nodes(inner)]
    return tuple(results)


def _changes_dtype(cast: fx.Node) -> bool:
    before, after = cast.all_input_nodes[0].meta.get("val"), cast.meta.get("val")
    return is_eligible(before) and is_eligible(after) and before.dtype is not after.dtype


def _readers(node: fx.Node) -> dict[fx.Node, None]:
    """The calls that read a value, themselves or by their steps."""
    found: dict[fx.Node, None] = {}
    for user in node.users:
        found.update(_readers(user) if STEP_META in user.meta else {user: None})
    return found


def _cast_plan(cast: fx.Node, path: str) -> CastPlan:
    value, after = cast.all_input_nodes[0], cast.meta["val"].dtype
    before = value.meta["val"]
    return CastPlan(
        name=f"{path}{cast.name}",
        value=f"{path}{value.name}",
        from_dtype=before.dtype,
        to_dtype=after,
        bytes=cast_bytes(before, after),
        users=tuple(f"{path}{user.name}" for user in _readers(cast)),
        inserted=CAST_META in cast.meta,
        source=source_line(cast),
    )
