"""How a plan is read off a rewritten graph, which of the user's rules matched nothing, and who is told of the plan."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import HigherOrderOperator, OpOverload, size_hint
from amp_fx.errors import did_you_mean
from amp_fx.graphs.calls import is_cast, is_parameter, output_nodes, source_line, tensor_nodes
from amp_fx.graphs.fake_runs import is_matmul, matmul_flops
from amp_fx.graphs.keys import CAST_META, COPY_META, GONE, KEPT_META, STEP_META
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import cast_bytes, is_eligible, is_view, numel, tensors
from amp_fx.precision.plans.label import Label, label_of
from amp_fx.precision.plans.plan import CastPlan, InputPlan, NodePlan, Plan
from amp_fx.precision.policy.levels import is_narrow

_NUMBERS = (bool, int, float, torch.SymBool, torch.SymInt, torch.SymFloat)

#: told of each plan; Dynamo may compile from any thread, and each of these steps on a list is one
_listeners: list[Callable[[Plan], object]] = []


def add_graph(plan: Plan, gm: fx.GraphModule, path: str = "") -> None:
    """Appends the rows of a rewritten graph to a plan, which has those of its bodies.

    ``path`` is the prefix of node names, ``"wrap_body_0."`` for a body.
    """
    aliases: dict[str, str] = {}
    flops: dict[Any, int] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder" and (given := input_plan(node, path, is_parameter(node))) is not None:
            plan.inputs.append(given)
        if (label := row_label(node)) is not None:
            results = _connect_body(gm, node, path, aliases)
            plan.nodes.append(node_plan(label, node, flops, path, results))
        plan.nodes += node.meta.get(GONE, ())
    plan.casts += casts_in(gm, path)
    plan.inputs += kept_plans(gm, path)
    plan.inputs = [replace(each, alias=aliases.get(each.name, each.alias)) for each in plan.inputs]


def casts_in(gm: fx.GraphModule, path: str = "") -> list[CastPlan]:
    """The conversions that a captured graph does in each call; ``path`` is the prefix of names in a body."""
    calls = [node for node in gm.graph.nodes if not {STEP_META, KEPT_META} & node.meta.keys()]
    casts = [node for node in calls if is_cast(node) and conversion(node) is not None]
    return [cast_plan(node, path, inserted=CAST_META in node.meta) for node in casts]


def row_label(node: fx.Node) -> Label | None:
    """The label of a call that has a row in a plan, else None."""
    # a cast that was inserted is no call of the program: plans of other dtypes at its ends match without
    return None if CAST_META in node.meta or _is_about_numbers(node) else label_of(node)


def node_plan(
    label: Label, node: fx.Node, seen: dict[Any, int], path: str = "", also_read: tuple[str, ...] = ()
) -> NodePlan:
    """The row of a call: its label, sizes and neighbours, with ``path`` before their names.

    ``seen`` has FLOPs of calls so far by op and shapes: repeated layers are looked at once. ``also_read`` are values
    that reach the call otherwise than as arguments.
    """
    results = tensors(node.meta.get("val"))
    read, matmul = _read(node)
    shape = _shape(results[0]) if results else ()
    floating = [] if is_view(node) else [value for value in results if value.is_floating_point()]
    operands = tuple(
        _shape(value) for source in read if is_eligible(value := source.meta.get("val")) or is_narrow(value)
    )
    key = None
    if matmul is not None and operands:
        key = matmul.target, operands, shape
        if key not in seen:
            seen[key] = matmul_flops(matmul, label.low)
    return NodePlan(
        **vars(label),
        shape=shape,
        bytes=sum(numel(value) * (label.result_dtype or value.dtype).itemsize for value in floating),
        flops=0 if key is None else seen[key],
        inputs=(*dict.fromkeys(f"{path}{_name(source)}" for source in read), *also_read),
        operands=operands,
    )


def input_plans(gm: fx.GraphModule, weights: Collection[str]) -> list[InputPlan]:
    """The plans of a graph's inputs, once its weights are lifted; ``weights``: names of those that a program stores."""
    inputs = gm.graph.find_nodes(op="placeholder")
    stored = {*weights} | {node.name for node in inputs if node.meta.get(COPY_META) in weights}
    plans = (input_plan(node, "", node.name in stored) for node in inputs)
    return [plan for plan in plans if plan is not None]


def kept_plans(gm: fx.GraphModule, path: str = "") -> list[InputPlan]:
    """Copies of weights that are made once: the graph is given them beside the weights."""
    kept: dict[str, list[fx.Node]] = {}
    for node in gm.graph.nodes:
        if KEPT_META in node.meta and node.meta[KEPT_META].suffix:
            kept.setdefault(node.meta[KEPT_META].weight, []).append(node)
    weights = (node.name for node in gm.graph.find_nodes(op="placeholder"))
    plans = (input_plan(node, path, parameter=False) for name in weights for node in kept.get(name, ()))
    return [*{plan.name: plan for plan in plans if plan is not None}.values()]


def _name(node: fx.Node) -> str:
    """The name of a value in a plan; a copy of a weight that is made once has the weight's name and a suffix."""
    kept = node.meta.get(KEPT_META)
    return node.name if kept is None else f"{kept.weight}{kept.suffix}"


def input_plan(node: fx.Node, path: str, parameter: bool) -> InputPlan | None:
    """The plan of a graph input, or of what a graph is given beside; None for values that are not tensors."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    kept = node.meta.get(KEPT_META)
    copy_of = node.meta.get(COPY_META, "") if kept is None else kept.weight
    return InputPlan(
        name=f"{path}{_name(node)}",
        parameter=parameter,
        dtype=value.dtype if value.is_floating_point() or copy_of else None,
        shape=_shape(value),
        bytes=numel(value) * value.dtype.itemsize,
        copy_of=copy_of,
    )


def conversion(node: fx.Node) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The fake values before and after, if the node turns one floating dtype into another."""
    if has_trait(node, Trait.CAST):
        before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
        if is_eligible(before) and is_eligible(after) and before.dtype is not after.dtype:
            return before, after
    return None


def cast_plan(cast: fx.Node, path: str = "", *, inserted: bool, kernel: bool | None = None) -> CastPlan:
    """The plan of a conversion between floating dtypes."""
    value, after = cast.all_input_nodes[0], cast.meta["val"].dtype
    before = value.meta["val"]
    return CastPlan(
        name=f"{path}{cast.name}",
        value=f"{path}{value.name}",
        from_dtype=before.dtype,
        to_dtype=after,
        bytes=cast_bytes(before, after),
        users=tuple(f"{path}{user.name}" for user in _readers(cast)),
        inserted=inserted,
        source=source_line(cast),
        kernel=kernel,
    )


def _read(node: fx.Node) -> tuple[list[fx.Node], fx.Node | None]:
    """The values that a call reads, and the node that multiplies them if that is the call or one of its steps."""
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


def _readers(node: fx.Node) -> dict[fx.Node, None]:
    """The calls that read a value, themselves or by their steps."""
    found: dict[fx.Node, None] = {}
    for user in node.users:
        found.update(_readers(user) if STEP_META in user.meta else {user: None})
    return found


def _shape(value: torch.Tensor) -> tuple[int, ...]:
    return tuple(size_hint(size) for size in value.shape)


def _is_about_numbers(node: fx.Node) -> bool:
    """True for arithmetic on sizes and Python numbers, and its checks: where shapes are static, there is none."""
    value = node.meta.get("val")
    if value is None and isinstance(node.target, OpOverload):
        return not any(tensors(source.meta.get("val")) for source in node.all_input_nodes)
    return isinstance(value, _NUMBERS)


def _connect_body(gm: fx.GraphModule, node: fx.Node, path: str, aliases: dict[str, str]) -> tuple[str, ...]:
    """Notes which outer values a higher-order op's body is given; returns what the body returns."""
    if not isinstance(node.target, HigherOrderOperator):
        return ()
    modules = [(arg, getattr(gm, str(arg.target), None)) for arg in node.all_input_nodes]
    bodies = [arg for arg, module in modules if isinstance(module, fx.GraphModule)]
    given = [f"{path}{arg.name}" for arg in tensor_nodes(node.args) if arg not in bodies]
    results: list[str] = []
    for body in bodies:
        inner = getattr(gm, str(body.target))
        prefix = f"{path}{body.target}."
        placeholders = [f"{prefix}{each.name}" for each in inner.graph.find_nodes(op="placeholder")]
        # operands are given in order; where there are more or fewer, the op has a meaning of its own
        if len(placeholders) == len(given):
            aliases.update(zip(placeholders, given, strict=True))
        results += [f"{prefix}{output.name}" for output in output_nodes(inner)]
    return tuple(results)


# --- rules that match nothing ---


def unused_rules(plans: Sequence[Plan]) -> list[str]:
    """The rules that match no call in any of these graphs, each with the nearest name that is there, in words.

    Graphs that were planned under one policy are taken together: each may have what another has not.
    """
    # no rule holds where torch.autocast decides, and gradients have none of their own
    forward = [plan for plan in plans if plan.phase == "forward" and not plan.fallback]
    found: list[str] = []
    for policy in dict.fromkeys(plan.policy for plan in forward):
        alike = [plan for plan in forward if plan.policy == policy]
        unused = [rule for rule in alike[0].unused_rules if all(rule in plan.unused_rules for plan in alike)]
        found += [_unused_rule(rule, alike) for rule in unused]
    return found


def _unused_rule(rule: dict[str, str], plans: Sequence[Plan]) -> str:
    where = f"graph {plans[0].graph}" if len(plans) == 1 else f"any of {len(plans)} graphs"
    rows = [row for plan in plans for row in plan.nodes]
    # overloads do not count
    ops = sorted({row.op.partition(".")[0] for row in rows})
    op, module = rule.get("op", "").partition(".")[0], rule.get("module", "")
    modules = sorted({row.module_path for row in rows})
    hint = did_you_mean(op, ops) if op and op not in ops else did_you_mean(module, modules) if module else ""
    return f"policy rule {json.dumps(rule)} matched no call in {where}{'.' if hint else ''}{hint}"


# --- who is told: the backend does not know its listeners ---


@contextlib.contextmanager
def listen(listener: Callable[[Plan], object]) -> Iterator[None]:
    """Calls ``listener`` with the plan of every graph that this process compiles inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def is_heard() -> bool:
    """True while somebody listens: what only a report needs is worked out then."""
    return bool(_listeners)


def publish(plan: Plan) -> None:
    """Gives a finished plan to every listener."""
    for listener in _listeners:
        listener(plan)
