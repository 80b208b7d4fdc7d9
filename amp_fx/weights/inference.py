"""Compiled graphs that are called with low copies of their weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.fx as fx

from amp_fx._torch import FakeTensor
from amp_fx.graphs.calls import is_parameter
from amp_fx.graphs.keys import COPY_META
from amp_fx.weights.kept import Kept
from amp_fx.weights.recipes import recipe_of
from amp_fx.weights.values import Input, Values

__all__ = ["KeptWeights", "cached", "copied_weights", "copies_of", "is_plain", "weight_inputs"]

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

    def __init__(self, compiled: Callable[..., Any], positions: Sequence[int], copies: Values) -> None:
        self._compiled, self._positions, self._copies = compiled, positions, copies
        self._kept = Kept(copies.make)

    def kept(self, args: Sequence[Any]) -> list[torch.Tensor]:
        return self._kept.of([args[at] for at in self._positions])

    def anew(self, args: Sequence[Any]) -> list[torch.Tensor]:
        return self._copies.anew([args[at] for at in self._positions])

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
    return _CachedGraph(compiled, *copies_of(gm))


def copies_of(gm: fx.GraphModule) -> tuple[list[int], Values]:
    """The copies that a graph takes after the program's own inputs, and the positions of the weights they are of."""
    position = {node.name: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    inputs = copied_weights(gm)
    wanted = [(position[node.meta[COPY_META]], *recipe_of(node)) for node in inputs]
    positions = list(dict.fromkeys(at for at, _, _ in wanted))
    recipes = list(dict.fromkeys((recipe, at) for at, recipe, _ in wanted))
    taken = [Input(recipes.index((recipe, at)), part) for at, recipe, part in wanted]
    return positions, Values([(recipe, (positions.index(at),)) for recipe, at in recipes], taken)


def is_plain(node: fx.Node) -> bool:
    """True for tensors of known sizes, not for their subclasses and not for sizes."""
    value = node.meta.get("val")
    return type(value) is FakeTensor and not any(isinstance(size, torch.SymInt) for size in value.shape)
