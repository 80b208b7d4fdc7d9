"""Compiled graphs without gradients: called with low copies of their weights, or with their weights frozen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx._torch import FakeTensor
from amp_fx.errors import WeightsError
from amp_fx.graph import COPY_META, is_parameter, storage_of, written_storages
from amp_fx.weights import LowCopies, OnDeath, Watch

__all__ = ["FrozenGraph", "cached", "copied_weights", "in_inference_mode", "weight_inputs"]

logger = logging.getLogger(__name__)

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def weight_inputs(gm: fx.GraphModule) -> frozenset[str]:
    """Names of the inputs whose casts can be kept across calls: parameters that are plain tensors."""
    return frozenset(
        node.name for node in gm.graph.find_nodes(op="placeholder") if is_parameter(node) and _is_plain(node)
    )


def copied_weights(gm: fx.GraphModule) -> list[fx.Node]:
    """The inputs that :class:`amp_fx.passes.CacheWeights` has added."""
    return [node for node in gm.graph.find_nodes(op="placeholder") if COPY_META in node.meta]


def cached(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile) -> Callable[..., Any]:
    """Compiles a graph that takes low copies of its weights after the program's own inputs.

    Returns:
        The compiled graph with the program's own signature; it finds the copies that are current by itself.
    """
    position = {node.name: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    inputs = copied_weights(gm)
    for node in inputs:
        # AOTAutograd wants the attribute on every placeholder of a graph of Dynamo's
        node._dynamo_source = None
    compiled = compile_graph(gm, [*example_inputs, *(node.meta["val"] for node in inputs)])
    copies = LowCopies(
        [position[node.meta[COPY_META]] for node in inputs], [node.meta["val"].dtype for node in inputs]
    )
    return lambda *args: compiled(*args, *copies.of(args))


def in_inference_mode(yes: Callable[..., Any], no: Callable[..., Any]) -> Callable[..., Any]:
    """One of two compiled graphs, by the mode of each call: while Dynamo compiles, nothing tells the mode."""

    def run(*args: Any) -> Any:
        return (yes if torch.is_inference_mode_enabled() else no)(*args)

    return run


class FrozenGraph:
    """A graph whose weights are constants, which Inductor folds and packs; made again when a weight changes.

    Args:
        gm: rewritten, perhaps with inputs for low copies. Kept, to freeze again.
        compile_graph: compiles a graph with Inductor's freezing switched on.
        refreeze: False: a changed weight is an error.
    """

    def __init__(self, gm: fx.GraphModule, compile_graph: Compile, *, refreeze: bool) -> None:
        self._gm = gm
        self._compile_graph = compile_graph
        self._refreeze = refreeze
        placeholders = self._placeholders = gm.graph.find_nodes(op="placeholder")
        written = {key for node in gm.graph.nodes for key in written_storages(node)}
        self._weights = [
            at
            for at, node in enumerate(placeholders)
            if _is_weight(node) and _is_plain(node) and storage_of(node) not in written
        ]
        self._others = [
            at
            for at, node in enumerate(placeholders)
            if at not in self._weights and COPY_META not in node.meta
        ]
        # by id of the first weight: models of one class share their graphs
        self._found: dict[int, tuple[Watch, Callable[..., Any]]] = {}

    @property
    def has_weights(self) -> bool:
        """False for a graph in which nothing can be frozen, between two graph breaks, say."""
        return bool(self._weights)

    def freeze(self, args: Sequence[Any]) -> Callable[..., Any]:
        """Freezes the graph with the weights among ``args``; the result takes the others.

        Args:
            args: while Dynamo compiles, its example inputs; later, those of a call.
        """
        weights = [args[at] for at in self._weights]
        watch = Watch(weights, OnDeath(self._found, id(weights[0])))
        watch.sum_up(weights)
        compiled = self._compile_graph(
            self._with_constants(weights), [self._example(at, args[at]) for at in self._others]
        )
        self._found[id(weights[0])] = watch, compiled
        return compiled

    def __call__(self, *args: Any) -> Any:
        """One call, with all inputs of the program.

        Raises:
            WeightsError: a weight has changed, and is not to be frozen again.
        """
        weights = [args[at] for at in self._weights]
        found = self._found.get(id(weights[0]))
        if found is not None and found[0].is_same(weights):
            compiled = found[1]
        elif found is not None and not self._refreeze:
            raise WeightsError(
                "weights have changed since the graph was frozen, and strict=True forbids to freeze it again. Use "
                "weights='cache' for weights that change, or torch.compiler.reset() after changing them."
            )
        else:
            logger.info("weights changed or belong to another model: freezing %d again", len(weights))
            with torch.inference_mode(False), torch.no_grad():
                compiled = self.freeze(args)
        return compiled(*(args[at] for at in self._others))

    def _example(self, at: int, arg: Any) -> Any:
        """The argument, or what Dynamo traced if that has any size."""
        value = self._placeholders[at].meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        return value if any(isinstance(size, torch.SymInt) for size in sizes) else arg

    def _with_constants(self, weights: Sequence[Tensor]) -> fx.GraphModule:
        """A copy of the graph that holds the weights."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.output(graph.graph_copy(self._gm.graph, copies))
        holder = nn.Module()
        values = {self._placeholders[at].name: w for at, w in zip(self._weights, weights, strict=True)}
        for node in self._placeholders:
            value = values.get(node.meta.get(COPY_META, node.name))
            if value is None:
                continue
            name = f"amp_fx_frozen_{node.name}"
            holder.register_buffer(name, value.detach().to(node.meta["val"].dtype))
            with graph.inserting_before(copies[node]):
                constant = graph.get_attr(name)
            constant.meta = {"val": node.meta["val"]}
            copies[node].replace_all_uses_with(constant)
            graph.erase_node(copies[node])
        for name, module in self._gm.named_children():
            holder.register_module(name, module)
        for name, value in self._gm.named_buffers(recurse=False):
            holder.register_buffer(name, value)
        for node in reversed(graph.find_nodes(op="call_function", target=torch.ops.aten.item.default)):
            # Dynamo's Python scalars, which only its own trace knows the values of
            if not node.users:
                graph.erase_node(node)
        return fx.GraphModule(holder, graph)


def _is_plain(node: fx.Node) -> bool:
    return type(node.meta.get("val")) is FakeTensor


def _is_weight(node: fx.Node) -> bool:
    """True for parameters and for buffers of the user's modules."""
    source = getattr(node, "_dynamo_source", None)
    return is_parameter(node) or (source is not None and "_buffers[" in str(source.name))
