"""Compiled graphs that are called with low copies of their weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import FakeTensor
from amp_fx.graphs.calls import COPY_META, is_parameter
from amp_fx.weights.copies import LowCopies
from amp_fx.weights.forms import form_of

__all__ = ["cached", "copied_weights", "is_plain", "weight_inputs"]

logger = logging.getLogger(__name__)

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def weight_inputs(gm: fx.GraphModule) -> frozenset[str]:
    """Names of the inputs whose casts can be kept across calls: parameters that are plain tensors."""
    return frozenset(
        node.name for node in gm.graph.find_nodes(op="placeholder") if is_parameter(node) and is_plain(node)
    )


def copied_weights(gm: fx.GraphModule) -> list[fx.Node]:
    """The inputs that :class:`amp_fx.passes.CacheWeights` has added."""
    return [node for node in gm.graph.find_nodes(op="placeholder") if COPY_META in node.meta]


def cached(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile) -> Callable[..., Any]:
    """Compiles a graph that takes low copies of its weights after the program's own inputs.

    Args:
        gm: the graph.
        example_inputs: one per input of the program's.
        compile_graph: compiles it.

    Returns:
        The compiled graph with the program's own signature; it finds the copies that are current by itself.
    """
    position = {node.name: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    inputs = copied_weights(gm)
    for node in inputs:
        # AOTAutograd wants the attribute on every placeholder of a graph of Dynamo's
        node._dynamo_source = None
    compiled = compile_graph(gm, [*example_inputs, *(node.meta["val"] for node in inputs)])
    weights = [position[node.meta[COPY_META]] for node in inputs]
    copies = LowCopies(weights, [*map(form_of, inputs)])
    return lambda *args: compiled(*args, *copies.of(args))


def is_plain(node: fx.Node) -> bool:
    """True for tensors of known sizes, not for their subclasses and not for sizes."""
    value = node.meta.get("val")
    return type(value) is FakeTensor and not any(isinstance(size, torch.SymInt) for size in value.shape)
