"""Compiled graphs that are called with low copies of their weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.fx as fx

from amp_fx._torch import FakeTensor
from amp_fx.graphs.calls import COPY_META, is_parameter
from amp_fx.weights.copies import LowCopies
from amp_fx.weights.forms import form_of

__all__ = ["KeptWeights", "cached", "copied_weights", "is_plain", "low_copies", "weight_inputs"]

logger = logging.getLogger(__name__)

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


class KeptWeights(Protocol):
    """A compiled graph that is called with what was made of its weights."""

    def kept(self, args: Sequence[Any]) -> Any:
        """What is kept of the weights among the program's inputs, made or made again if necessary."""
        ...

    def anew(self, args: Sequence[Any]) -> Any:
        """The same, made for one call."""
        ...

    def run(self, args: Sequence[Any], made: Any) -> Any:
        """One call of the graph."""
        ...


def weight_inputs(gm: fx.GraphModule) -> frozenset[str]:
    """Names of the inputs whose casts can be kept across calls: parameters that are plain tensors."""
    return frozenset(
        node.name for node in gm.graph.find_nodes(op="placeholder") if is_parameter(node) and is_plain(node)
    )


def copied_weights(gm: fx.GraphModule) -> list[fx.Node]:
    """The inputs that :class:`amp_fx.passes.CacheWeights` has added."""
    return [node for node in gm.graph.find_nodes(op="placeholder") if COPY_META in node.meta]


class _CachedGraph:
    """A graph that takes copies of weights after the program's own inputs."""

    def __init__(self, compiled: Callable[..., Any], copies: LowCopies) -> None:
        self._compiled = compiled
        self.kept, self.anew = copies.of, copies.anew

    def run(self, args: Sequence[Any], made: Sequence[torch.Tensor]) -> Any:
        return self._compiled(*args, *made)


def cached(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile) -> KeptWeights:
    """Compiles a graph that takes low copies of its weights after the program's own inputs.

    Args:
        gm: the graph.
        example_inputs: one per input of the program's.
        compile_graph: compiles it.

    Returns:
        The compiled graph, which finds the copies that are current by itself.
    """
    inputs = copied_weights(gm)
    for node in inputs:
        # AOTAutograd wants the attribute on every placeholder of a graph of Dynamo's
        node._dynamo_source = None
    compiled = compile_graph(gm, [*example_inputs, *(node.meta["val"] for node in inputs)])
    return _CachedGraph(compiled, low_copies(gm))


def low_copies(gm: fx.GraphModule) -> LowCopies:
    """The copies that a graph takes after the program's own inputs."""
    position = {node.name: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    inputs = copied_weights(gm)
    return LowCopies([position[node.meta[COPY_META]] for node in inputs], [*map(form_of, inputs)])


def is_plain(node: fx.Node) -> bool:
    """True for tensors of known sizes, not for their subclasses and not for sizes."""
    value = node.meta.get("val")
    return type(value) is FakeTensor and not any(isinstance(size, torch.SymInt) for size in value.shape)
