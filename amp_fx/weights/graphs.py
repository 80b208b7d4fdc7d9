"""Compiled graphs that are called with what is derived from their weights, or frozen by Inductor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx._torch import FakeTensor, borrowed, is_wrapper
from amp_fx.errors import WeightsError
from amp_fx.graphs.calls import convolves, is_parameter, start
from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.keys import COPY_META
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.values import storage_of, storages_written_in
from amp_fx.weights.changes import Fingerprint
from amp_fx.weights.derived import CacheEntry, DerivedInputs, Input, WeightCache
from amp_fx.weights.packing import pack
from amp_fx.weights.recipes import recipe_of

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


def is_plain(node: fx.Node) -> bool:
    """True for tensors of known sizes, not for their subclasses and not for sizes."""
    value = node.meta.get("val")
    if is_wrapper(node.meta.get("example_value")):
        # a plain tensor stands for a DTensor
        return False
    return type(value) is FakeTensor and not any(isinstance(size, torch.SymInt) for size in value.shape)


def _stored_weights(gm: fx.GraphModule, *, wide: bool) -> list[fx.Node]:
    """Inputs that hold parameters and buffers of known sizes which nobody writes to.

    ``wide``: False leaves out what linears in fp32 read; packed, that would take twice a low copy.
    """
    left_out = set(storages_written_in(gm.graph))
    if not wide:
        left_out.update(
            key
            for node in gm.graph.nodes
            if is_matmul(node) and not convolves(node)
            if getattr(node.meta["val"], "dtype", None) is torch.float32
            for arg in node.all_input_nodes
            if (key := storage_of(arg)) is not None
        )
    inputs = gm.graph.find_nodes(op="placeholder")
    return [node for node in inputs if _is_weight(node) and storage_of(node) not in left_out]


def _is_weight(node: fx.Node) -> bool:
    """True for parameters and for buffers of the user's modules that are plain tensors of known sizes."""
    source = getattr(node, "_dynamo_source", None)
    is_stored = is_parameter(node) or (source is not None and "_buffers[" in str(source.name))
    return is_stored and COPY_META not in node.meta and is_plain(node)


def _expand_copies(gm: fx.GraphModule) -> list[fx.Node]:
    """Has a graph compute the copies of weights that are its inputs; returns what computes them."""
    graph, before, made = gm.graph, {*gm.graph.nodes}, dict[object, Any]()
    inputs = graph.find_nodes(op="placeholder")
    weights = {node.name: node for node in inputs}
    first, work = start(graph), Rewriter(graph)
    for copy in inputs:
        if COPY_META not in copy.meta:
            continue
        weight, (recipe, part) = weights[copy.meta[COPY_META]], recipe_of(copy)
        with graph.inserting_before(first):
            if (weight, recipe) not in made:
                made[weight, recipe] = recipe.steps(weight, work)
        copy.replace_all_uses_with(made[weight, recipe][part])
        graph.erase_node(copy)
    return [node for node in graph.nodes if node not in before]


# ---- what is derived are inputs


def cached(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile) -> CachedGraph:
    """Compiles a graph that takes low copies of its weights after the program's own inputs."""
    return CachedGraph(gm, example_inputs, compile_graph, copied_weights(gm), *_copies_of(gm))


def packed(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile, *, may_change: bool, wide: bool
) -> CachedGraph | None:
    """Compiles a graph that takes what it computes of its weights, packed; None if that is nothing.

    ``may_change``: False makes a changed weight an error. ``wide``: weights of matmuls in fp32 are packed, too.
    """
    weights = _stored_weights(gm, wide=wide)
    if not weights and not copied_weights(gm):
        return None
    inputs, positions, derived = pack(gm, weights, _expand_copies(gm), wide=wide)
    if not inputs:
        return None
    return CachedGraph(gm, example_inputs, compile_graph, inputs, positions, derived, may_change=may_change)


class CachedGraph:
    """A graph that takes what is derived from its weights after the program's own inputs."""

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        compile_graph: Compile,
        inputs: Sequence[fx.Node],
        positions: Sequence[int],
        derived: DerivedInputs,
        *,
        may_change: bool = True,
    ) -> None:
        programs = gm.graph.find_nodes(op="placeholder")[: len(example_inputs)]
        # each tensor that a graph is given takes time, read or not
        unread = {at for at in positions if not programs[at].users}
        for at in unread:
            gm.graph.erase_node(programs[at])
        self._read = [at for at in range(len(programs)) if at not in unread]
        gm.recompile()
        given = [*(example_inputs[at] for at in self._read), *(node.meta["val"] for node in inputs)]
        self._compiled = compile_graph(gm, given)
        self._positions, self._inputs = positions, derived
        self._cache = WeightCache(derived.derive, may_change=may_change)

    def derived(self, args: Sequence[Any]) -> list[Tensor]:
        """What is derived from the weights among the program's inputs, and kept across calls."""
        return self._cache.of([args[at] for at in self._positions])

    def once(self, args: Sequence[Any]) -> list[Tensor]:
        """The same, derived for one call."""
        return self._inputs.once([args[at] for at in self._positions])

    def run(self, args: Sequence[Any], derived: Any) -> Any:
        """One call of the graph."""
        return self._compiled(*map(args.__getitem__, self._read), *derived)


def _copies_of(gm: fx.GraphModule) -> tuple[list[int], DerivedInputs]:
    """The positions of the weights that a graph takes copies of, and these copies."""
    position = {node.name: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    wanted = [(position[node.meta[COPY_META]], *recipe_of(node)) for node in copied_weights(gm)]
    positions = list(dict.fromkeys(at for at, _, _ in wanted))
    recipes = list(dict.fromkeys((recipe, at) for at, recipe, _ in wanted))
    inputs = [Input(recipes.index((recipe, at)), part) for at, recipe, part in wanted]
    return positions, DerivedInputs([(recipe, (positions.index(at),)) for recipe, at in recipes], inputs)


# ---- weights are part of the code


def freeze(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile, *, may_change: bool, wide: bool
) -> FrozenGraph | None:
    """Compiles a graph with Inductor's freezing; None if it has no weights.

    Raises:
        WeightsError: the weights are fake: compiled for an absent GPU, they hold nothing to fold.
    """
    graph = FrozenGraph(gm, compile_graph, may_change=may_change, wide=wide)
    if not graph.weights:
        # between two graph breaks, say
        return None
    if any(isinstance(value, FakeTensor) and isinstance(value, nn.Parameter) for value in example_inputs):
        raise WeightsError(
            "weights='freeze' folds what weights hold, and fake ones hold nothing. For an absent GPU use "
            "weights='cache', whose graph is the same but for what Inductor folds."
        )
    # the first, while Dynamo compiles
    graph.derived(example_inputs)
    return graph


class FrozenGraph:
    """A graph whose weights are constants of the code, which is compiled again when they change.

    Args:
        gm: rewritten, perhaps with inputs for low copies. Kept, to freeze again.
        compile_graph: compiles a graph with Inductor's freezing switched on.
        may_change: False: a changed weight is an error.
        wide: False: weights of matmuls in fp32 stay inputs.
    """

    def __init__(self, gm: fx.GraphModule, compile_graph: Compile, *, may_change: bool, wide: bool) -> None:
        self._gm, self._compile_graph = gm, compile_graph
        self._inputs = [node for node in gm.graph.find_nodes(op="placeholder") if COPY_META not in node.meta]
        whole = {node.name for node in _stored_weights(gm, wide=wide)}
        copied = {node.meta[COPY_META] for node in copied_weights(gm)}
        #: positions of what is frozen
        self.weights = [at for at, node in enumerate(self._inputs) if node.name in whole | copied]
        self._others = [at for at, node in enumerate(self._inputs) if node.name not in whole]
        self._cache = WeightCache(self._freeze, may_change=may_change)

    def derived(self, args: Sequence[Any]) -> Callable[..., Any]:
        """What was compiled for the weights of a call with all inputs of the program."""
        return self._cache.of([args[at] for at in self.weights], args)

    def once(self, args: Sequence[Any]) -> Callable[..., Any]:
        """For one call the graph runs op by op."""
        positions, copies = _copies_of(self._gm)
        made = copies.once([args[at] for at in positions])
        return lambda *_: self._gm(*args, *made)

    def run(self, args: Sequence[Any], derived: Any) -> Any:
        """One call with what :meth:`derived` or :meth:`once` has found."""
        return derived(*[args[at] for at in self._others])

    def _freeze(
        self, weights: Sequence[Tensor], _before: object, args: Sequence[Any]
    ) -> CacheEntry[Callable[..., Any]]:
        """``args`` are inputs of a call, or examples while Dynamo compiles."""
        logger.debug("freezing %d weights", len(weights))
        # before they are read: a write in between is seen by the next call
        fingerprint = Fingerprint(weights, weights)
        # inference tensors could not be given other values outside inference mode
        with torch.inference_mode(False), torch.no_grad():
            gm = self._with_constants(weights)
            compiled = self._compile_graph(gm, [self._example(at, args[at]) for at in self._others])
        return CacheEntry(fingerprint if fingerprint.matches(weights) else None, compiled)

    def _example(self, at: int, arg: Any) -> Any:
        """The argument, or what Dynamo traced if that has any size."""
        value = self._inputs[at].meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        return value if any(isinstance(size, torch.SymInt) for size in sizes) else arg

    def _with_constants(self, weights: Sequence[Tensor]) -> fx.GraphModule:
        """A copy of the graph that holds the weights."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self._gm.graph, {}))
        gm = fx.GraphModule(self._gm, graph)
        steps, inputs = {*_expand_copies(gm)}, gm.graph.find_nodes(op="placeholder")
        first = start(gm.graph)
        for at, weight in zip(self.weights, weights, strict=True):
            node = inputs[at]
            gm.register_buffer(name := f"amp_fx_frozen_{node.name}", borrowed(weight.detach()))
            with gm.graph.inserting_before(first):
                constant = gm.graph.get_attr(name)
            constant.meta = {"val": node.meta.get("val")}
            for user in list(node.users):
                if at not in self._others or user in steps:
                    user.replace_input_with(node, constant)
        for at, node in enumerate(inputs):
            if at not in self._others:
                gm.graph.erase_node(node)
        for node in reversed(gm.graph.find_nodes(op="call_function", target=torch.ops.aten.item.default)):
            # Dynamo's Python scalars, which only its own trace knows the values of
            if not node.users:
                gm.graph.erase_node(node)
        gm.recompile()
        return gm


#: a compiled graph that is called with what is derived from its weights
WeightsGraph = CachedGraph | FrozenGraph
