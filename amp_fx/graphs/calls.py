"""Calls: their arguments by name, what they return, and what the graph says about gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload

__all__ = [
    "argument_value",
    "arguments",
    "differentiated",
    "grad_modes",
    "is_cast",
    "is_gradient_call",
    "is_leaf_call",
    "is_parameter",
    "is_returned",
    "output_nodes",
    "tensor_nodes",
]


def arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The node's arguments with their schema names, positional ones first."""
    if isinstance(node.target, OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]
    else:
        names = [str(index) for index in range(len(node.args))]
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()


def argument_value(node: fx.Node, name: str) -> Any:
    """The argument called ``name``, or None where the program leaves it out."""
    return next((value for given, value in arguments(node) if given == name), None)


def tensor_nodes(value: Any) -> list[fx.Node]:
    """The nodes inside one argument (a node, or a list of nodes as ``cat`` takes)."""
    found: list[fx.Node] = []
    fx.map_arg(value, lambda node: found.append(node) or node)
    return found


def output_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that the graph returns, in order, repeats included."""
    return tensor_nodes(gm.graph.output_node().args[0])


def is_cast(node: fx.Node) -> bool:
    """True for ``aten.to.dtype``, the one form of cast in a graph after ``pin_dtypes``."""
    return node.target is torch.ops.aten.to.dtype


def is_parameter(node: fx.Node) -> bool:
    """True for a graph input that is a parameter of the user's module."""
    return node.op == "placeholder" and isinstance(
        node.meta.get("example_value", node.meta.get("val")), torch.nn.Parameter
    )


def is_returned(node: fx.Node) -> bool:
    """True if the graph may return the value itself, or a view of it: there are only ops with one input in between."""
    return any(
        user.op == "output" or (len(user.all_input_nodes) == 1 and is_returned(user)) for user in node.users
    )


def grad_modes(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Whether gradients are on at each node, as far as the graph itself says; True at its start.

    A cast made where they are off has no gradient, so it must not be shared with readers where they are on.
    """
    modes: dict[fx.Node, bool] = {}
    enabled = True
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        modes[node] = enabled
    return modes


def is_gradient_call(node: fx.Node) -> bool:
    """True for ``torch.autograd.grad``, as a train step has it that Dynamo captured whole."""
    return node.target is torch.autograd.grad


def is_leaf_call(node: fx.Node) -> bool:
    """True for ``y.requires_grad_()``, which ATen does not have."""
    return node.op == "call_method" and node.target == "requires_grad_"


def differentiated(graph: fx.Graph) -> set[fx.Node]:
    """What the graph itself takes gradients by, or makes a leaf for that. Readers must read this very node."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_gradient_call(node):
            found.update(tensor_nodes(node.kwargs.get("inputs", node.args[1:2])))
        elif is_leaf_call(node):
            found.update((node, *node.all_input_nodes))
    return found
