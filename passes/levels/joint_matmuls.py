"""The matmuls of a joint graph, forward and backward together."""

from __future__ import annotations

import torch
import torch.fx as fx

from amp_fx._torch import joint_roles
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.passes.base import marked
from amp_fx.passes.levels.matmuls import Matmul, Operand, aten
from amp_fx.placement.layout import CAST
from amp_fx.policy.levels import FORWARD, INPUT, WEIGHT

__all__ = ["gradients_in", "joint_matmuls"]


def gradients_in(gm: fx.GraphModule) -> set[fx.Node]:
    """What depends on a gradient that enters the backward; nothing in a graph without one."""
    roles = joint_roles(gm)
    found = set() if roles is None else set(roles.tangents)
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def joint_matmuls(gm: fx.GraphModule) -> list[Matmul]:
    """The 16-bit ``mm`` and ``addmm`` of a graph that are, or give gradients of, a marked call, in order."""
    gradients = gradients_in(gm)
    pairs = {node: pair for node in gm.graph.nodes if (pair := _arguments(node)) is not None}
    readers: dict[fx.Node, set[fx.Node]] = {}
    for node, pair in pairs.items():
        for argument in pair:
            readers.setdefault(_behind(argument)[0], set()).add(node)
    found: list[Matmul] = []
    forward: dict[str | None, list[Matmul]] = {}
    for node, pair in pairs.items():
        first = _operand(pair[0], readers, gradients, transposed=False)
        second = _operand(pair[1], readers, gradients, transposed=True)
        name = marked(node)
        role = _role(first, second, forward.get(name, []))
        if name is None or role is None:
            continue
        (rows, contracted), (_, columns) = (argument.meta["val"].shape for argument in pair)
        bias = node.args[0] if node.target is aten.addmm.default else None
        found.append(Matmul(node, name, role, (first, second), (rows, contracted, columns), bias))
        if role is FORWARD:
            forward.setdefault(name, []).append(found[-1])
    return found


def _arguments(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two matrices of a 16-bit matmul that has a counterpart with scales."""
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is aten.mm.default:
        first, second = node.args
    elif node.target is aten.addmm.default and _is_bias(node):
        _, first, second = node.args
    else:
        return None
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    same = first.meta["val"].dtype is second.meta["val"].dtype is node.meta["val"].dtype
    return (first, second) if same and node.meta["val"].dtype in LOW_DTYPES else None


def _is_bias(node: fx.Node) -> bool:
    """True where what ``addmm`` adds is one number for each column, in the dtype of the result."""
    bias = node.args[0]
    if not isinstance(bias, fx.Node) or len(node.args) != 3:
        return False
    value, result = bias.meta["val"], node.meta["val"]
    return value.ndim == 1 and value.shape[0] == result.shape[1] and value.dtype is result.dtype


def _behind(argument: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The value behind all views, and the views from it on."""
    views: list[fx.Node] = []
    while has_trait(argument, Trait.RESHAPES):
        views.append(argument)
        argument = argument.all_input_nodes[0]
    return argument, tuple(reversed(views))


def _operand(
    argument: fx.Node, readers: dict[fx.Node, set[fx.Node]], gradients: set[fx.Node], *, transposed: bool
) -> Operand:
    """The matrix that is an argument of a matmul.

    Its source is an input of the graph as it is, not as it is cast for a low matmul; else the base. A weight is then
    rounded once, and the low copy is not made.
    """
    base, views = _behind(argument)
    value, source = argument.meta["val"], base
    rows, columns = (1, 0) if transposed else (0, 1)
    if base.target is CAST:
        given = base.all_input_nodes[0]
        before, after = given.meta["val"], base.meta["val"]
        if given.op == "placeholder" and before.dtype is torch.float32 and before.stride() == after.stride():
            source = given
    # as text: symbolic sizes have no hash
    layout = str((value.shape[rows], value.shape[columns], value.stride(rows), value.stride(columns)))
    in_rows = value.stride(columns) == 1 and value.stride(rows) == value.shape[columns]
    return Operand(
        base, source, layout, in_rows, frozenset(readers[base]), views, transposed, base in gradients
    )


def _role(first: Operand, second: Operand, forward: list[Matmul]) -> str | None:
    if not (first.is_gradient or second.is_gradient):
        return FORWARD
    if first.is_gradient and second.is_gradient:
        return None
    other = second if first.is_gradient else first
    for call in forward:
        if other.base is call.operands[1].base:
            return INPUT
        if other.base is call.operands[0].base:
            return WEIGHT
    return None
