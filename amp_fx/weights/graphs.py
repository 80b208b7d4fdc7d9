"""Compiled graphs that are called with what is derived from their weights: low copies, or what Inductor has folded."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx._torch import FakeTensor, observe_freezing
from amp_fx.errors import WeightsError
from amp_fx.graphs.calls import is_parameter
from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.keys import COPY_META
from amp_fx.graphs.values import storage_of, storages_written_in
from amp_fx.weights.changes import Fingerprint
from amp_fx.weights.derived import CacheEntry, DerivedInputs, Input, WeightCache
from amp_fx.weights.folding import FoldingRecord
from amp_fx.weights.recipes import Cast, recipe_of

__all__ = ["FrozenGraph", "WeightsGraph", "cached", "copied_weights", "freeze", "weight_inputs"]

logger = logging.getLogger(__name__)

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

#: a compiled graph, and the constants that it is called with
_Frozen = tuple[Callable[..., Any], Sequence[Tensor]]


def weight_inputs(gm: fx.GraphModule) -> frozenset[str]:
    """Names of the inputs whose casts can be kept across calls: parameters that are plain tensors."""
    return frozenset(
        node.name for node in gm.graph.find_nodes(op="placeholder") if is_parameter(node) and _is_plain(node)
    )


def copied_weights(gm: fx.GraphModule) -> list[fx.Node]:
    """The inputs that :class:`amp_fx.passes.CacheWeights` has added."""
    return [node for node in gm.graph.find_nodes(op="placeholder") if COPY_META in node.meta]


def _is_plain(node: fx.Node) -> bool:
    """True for tensors of known sizes, not for their subclasses and not for sizes."""
    value = node.meta.get("val")
    return type(value) is FakeTensor and not any(isinstance(size, torch.SymInt) for size in value.shape)


# ---- low copies ----


def cached(gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile) -> CachedGraph:
    """Compiles a graph that takes low copies of its weights after the program's own inputs."""
    inputs = copied_weights(gm)
    for node in inputs:
        # AOTAutograd wants the attribute on every placeholder of a graph of Dynamo's
        node._dynamo_source = None
    compiled = compile_graph(gm, [*example_inputs, *(node.meta["val"] for node in inputs)])
    return CachedGraph(compiled, *_copies_of(gm))


class CachedGraph:
    """A graph that takes copies of weights after the program's own inputs."""

    def __init__(self, compiled: Callable[..., Any], positions: Sequence[int], copies: DerivedInputs) -> None:
        self._compiled, self._positions, self._copies = compiled, positions, copies
        self._cache = WeightCache(copies.derive)

    def derived(self, args: Sequence[Any]) -> list[Tensor]:
        """What is derived from the weights among the program's inputs, and kept across calls."""
        return self._cache.of([args[at] for at in self._positions])

    def once(self, args: Sequence[Any]) -> list[Tensor]:
        """The same, derived for one call."""
        return self._copies.once([args[at] for at in self._positions])

    def run(self, args: Sequence[Any], derived: Any) -> Any:
        """One call of the graph."""
        return self._compiled(*args, *derived)


def _copies_of(gm: fx.GraphModule) -> tuple[list[int], DerivedInputs]:
    """The positions of the weights that a graph takes copies of, and these copies."""
    position = {node.name: at for at, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    wanted = [(position[node.meta[COPY_META]], *recipe_of(node)) for node in copied_weights(gm)]
    positions = list(dict.fromkeys(at for at, _, _ in wanted))
    recipes = list(dict.fromkeys((recipe, at) for at, recipe, _ in wanted))
    inputs = [Input(recipes.index((recipe, at)), part) for at, recipe, part in wanted]
    return positions, DerivedInputs([(recipe, (positions.index(at),)) for recipe, at in recipes], inputs)


# ---- folded and packed by Inductor ----


def freeze(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: Compile,
    *,
    may_change: bool,
    packs_wide: bool,
) -> FrozenGraph | None:
    """Compiles a graph with its weights folded and packed, as :class:`FrozenGraph` says; None if it has none.

    Raises:
        WeightsError: the weights are fake: compiled for an absent GPU, they hold nothing to fold.
    """
    graph = FrozenGraph(gm, compile_graph, may_change=may_change, packs_wide=packs_wide)
    if not graph.has_weights:
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
    """A graph whose weights are folded and packed.

    What they become is computed once and given to the compiled graph in each call. Where it is not known what that is
    computed from, it is part of the compiled graph, which is compiled again when weights change.

    Args:
        gm: rewritten, perhaps with inputs for low copies. Kept, to freeze again.
        compile_graph: compiles a graph with Inductor's freezing switched on.
        may_change: False: a changed weight is an error.
        packs_wide: False: weights of matmuls in fp32 stay as they are; packed, they would take twice a low copy.
    """

    def __init__(
        self, gm: fx.GraphModule, compile_graph: Compile, *, may_change: bool, packs_wide: bool
    ) -> None:
        self._gm, self._compile_graph = gm, compile_graph
        placeholders = self._placeholders = gm.graph.find_nodes(op="placeholder")
        # a weight that is read in fp32 as well may become a constant only in low
        stays = storages_written_in(gm.graph) | (set() if packs_wide else _read_wide(gm))
        copied = {node.meta.get(COPY_META) for node in placeholders}
        self._is_constant = [
            COPY_META in node.meta or (_is_weight(node) and _is_plain(node) and storage_of(node) not in stays)
            for node in placeholders
        ]
        self._weights = [
            at
            for at, node in enumerate(placeholders)
            if COPY_META not in node.meta and (self._is_constant[at] or node.name in copied)
        ]
        self._others = [at for at, is_constant in enumerate(self._is_constant) if not is_constant]
        #: what is common to all models, if the constants are inputs of the compiled graph
        self._shared: tuple[Callable[..., Any], DerivedInputs] | None = None
        self._call = _Call()
        self._cache = WeightCache(self._freeze, may_change=may_change)

    @property
    def has_weights(self) -> bool:
        """False for a graph in which nothing can be frozen, between two graph breaks, say."""
        return bool(self._weights)

    def derived(self, args: Sequence[Any]) -> _Frozen:
        """The compiled graph and its constants, for a call with all inputs of the program."""
        return self._cache.of(self._weights_of(args), args)

    def once(self, args: Sequence[Any]) -> _Frozen:
        """As :meth:`derived`, for one call; where constants are part of the code, the graph runs op by op."""
        if self._shared is not None:
            compiled, constants = self._shared
            return compiled, constants.once(self._weights_of(args))
        positions, copies = _copies_of(self._gm)
        made = copies.once([args[at] for at in positions])
        return lambda *_: self._gm(*args, *made), ()

    def run(self, args: Sequence[Any], derived: Any) -> Any:
        """One call with what :meth:`derived` or :meth:`once` has found."""
        compiled, self._call.constants = derived
        try:
            return compiled(*[args[at] for at in self._others])
        finally:
            self._call.constants = ()

    def _weights_of(self, args: Sequence[Any]) -> list[Tensor]:
        return [args[at] for at in self._weights]

    def _freeze(
        self, weights: Sequence[Tensor], before: CacheEntry[_Frozen] | None, args: Sequence[Any]
    ) -> CacheEntry[_Frozen]:
        """What the graph has of some weights; ``args`` are inputs of a call, or examples while Dynamo compiles."""
        if self._shared is None:
            # before they are read: a write in between is seen by the next call
            fingerprint = Fingerprint(weights, weights)
            compiled, constants = self._compile(args, weights)
            if constants is None:
                return CacheEntry(fingerprint if fingerprint.matches(weights) else None, (compiled, ()))
            # two threads may compile at a time; nobody waits, as Dynamo, which may compile, too, has a lock
            self._shared = self._shared or (compiled, constants)
        compiled, constants = self._shared
        entry = constants.derive(weights, before)
        return CacheEntry(entry.fingerprint, (compiled, entry.value), entry.derived, entry.renewal)

    def _compile(
        self, args: Sequence[Any], weights: Sequence[Tensor]
    ) -> tuple[Callable[..., Any], DerivedInputs | None]:
        logger.debug("freezing %d weights", len(weights))
        # inference tensors could not be given other values outside inference mode
        with torch.inference_mode(False), torch.no_grad():
            record = FoldingRecord(weights, self._call.of_now)
            gm = self._with_constants(record)
            with observe_freezing(record):
                compiled = self._compile_graph(gm, [self._example(at, args[at]) for at in self._others])
        return compiled, record.finish()

    def _example(self, at: int, arg: Any) -> Any:
        """The argument, or what Dynamo traced if that has any size."""
        value = self._placeholders[at].meta.get("val")
        sizes = value.shape if isinstance(value, Tensor) else (value,)
        return value if any(isinstance(size, torch.SymInt) for size in sizes) else arg

    def _with_constants(self, record: FoldingRecord) -> fx.GraphModule:
        """A copy of the graph that holds the weights."""
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.output(graph.graph_copy(self._gm.graph, copies))
        holder = nn.Module()
        positions = {self._placeholders[at].name: position for position, at in enumerate(self._weights)}
        values = {node.name: node.meta.get("val") for node in self._placeholders}
        for node, is_constant in zip(self._placeholders, self._is_constant, strict=True):
            if not is_constant:
                continue
            source = node.meta.get(COPY_META, node.name)
            recipe, part = recipe_of(node)
            # what is more than a cast is folded by Inductor
            is_cast = isinstance(recipe, Cast)
            value = node.meta["val"] if is_cast else values[source]
            name = f"amp_fx_frozen_{node.name}"
            holder.register_buffer(name, record.value(positions[source], value.dtype))
            with graph.inserting_before(copies[node]):
                made = constant = graph.get_attr(name)
                constant.meta = {"val": value}
                if not is_cast:
                    steps = recipe.steps(
                        constant, lambda op, *args, **kwargs: graph.call_function(op, args, kwargs)
                    )
                    made = steps[part]
            copies[node].replace_all_uses_with(made)
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


#: a compiled graph that is called with what is derived from its weights
WeightsGraph = CachedGraph | FrozenGraph


class _Call(threading.local):
    """What the call that is going on in this thread gives to the compiled graph."""

    constants: Sequence[Tensor] = ()

    def of_now(self) -> Sequence[Tensor]:
        return self.constants


def _read_wide(gm: fx.GraphModule) -> set[int | None]:
    """Storages of what matmuls in fp32 read."""
    return {
        storage_of(arg)
        for node in gm.graph.nodes
        if is_matmul(node) and node.meta["val"].dtype is torch.float32
        for arg in node.all_input_nodes
    }


def _is_weight(node: fx.Node) -> bool:
    """True for parameters and for buffers of the user's modules."""
    source = getattr(node, "_dynamo_source", None)
    return is_parameter(node) or (source is not None and "_buffers[" in str(source.name))
