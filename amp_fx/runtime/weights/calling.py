"""Compiled graphs that are called with what is made of their weights, or frozen by Inductor."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx._torch import FakeTensor, borrowed
from amp_fx.errors import WeightsError
from amp_fx.graphs.calls import convolves, is_parameter, start
from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.values import storage_of, storages_written_in
from amp_fx.runtime.weights.cache import CacheEntry, WeightCache, keep
from amp_fx.runtime.weights.changes import Fingerprint
from amp_fx.runtime.weights.lift import Lift, Lifted, is_plain, kept_copies, steps_to, weights_of
from amp_fx.runtime.weights.mode import Mode
from amp_fx.runtime.weights.patterns import apply_patterns

logger = logging.getLogger(__name__)

Compile = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def _stored_weights(gm: fx.GraphModule, *, wide: bool) -> list[fx.Node]:
    """Inputs that hold parameters and buffers of known sizes which nobody writes to.

    ``wide``: False leaves out the weights of linears in fp32, which take twice the bytes of a low copy when packed.
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
    return is_stored and is_plain(node)


# ---- what is prepared are inputs


def with_weights(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile, mode: Mode
) -> WeightsGraph | None:
    """Compiles a graph to be called with values made of its weights; None where no value is made of weights.

    Raises:
        WeightsError: the weights become part of the code, and are fake: compiled for an absent GPU.
    """
    if mode.name == "code":
        return _frozen(gm, example_inputs, compile_graph, mode)
    lift = Lift(gm, steps_to(kept_copies(gm.graph)))
    if mode.name == "packed":
        lift.derived.update(_stored_weights(gm, wide=mode.wide))
        lift.extend()
        apply_patterns(lift, wide=mode.wide)
    lift.take_the_rest()
    programs = gm.graph.find_nodes(op="placeholder")[: len(example_inputs)]
    split = lift.split()
    if not split.inputs:
        return None
    return LiftedGraph(gm, example_inputs, compile_graph, programs, split, may_change=mode.may_change)


class LiftedGraph:
    """A graph that takes what it reads of its weights after the program's own inputs."""

    def __init__(
        self,
        gm: fx.GraphModule,
        example_inputs: Sequence[Any],
        compile_graph: Compile,
        programs: Sequence[fx.Node],
        split: Lifted,
        *,
        may_change: bool = True,
    ) -> None:
        self._positions, self._prepare = [*map(programs.index, split.weights)], split.prepare
        # each tensor that a graph is given takes time, read or not
        unread = {at for at in self._positions if not programs[at].users}
        for at in unread:
            gm.graph.erase_node(programs[at])
        self._read = [at for at in range(len(programs)) if at not in unread]
        gm.recompile()
        given = [*(example_inputs[at] for at in self._read), *(node.meta["val"] for node in split.inputs)]
        self._compiled = compile_graph(gm, given)
        self._cache = WeightCache(functools.partial(keep, split.prepare), may_change=may_change)

    def prepared(self, args: Sequence[Any]) -> list[Tensor]:
        """The tensors that are made of the weights among the program's inputs, and kept across calls."""
        return self._cache.of([args[at] for at in self._positions])

    def once(self, args: Sequence[Any]) -> list[Tensor]:
        """The values made of weights, for one call only."""
        return self._prepare([args[at] for at in self._positions])

    def run(self, args: Sequence[Any], prepared: Any) -> Any:
        """One call of the graph."""
        return self._compiled(*map(args.__getitem__, self._read), *prepared)


# ---- weights are part of the code


def _frozen(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile, mode: Mode
) -> FrozenGraph | None:
    """Compiles a graph with Inductor's freezing; None if it has no weights."""
    graph = FrozenGraph(gm, compile_graph, may_change=mode.may_change, wide=mode.wide)
    if not graph.weights:
        # between two graph breaks, say
        return None
    if any(isinstance(value, FakeTensor) and isinstance(value, nn.Parameter) for value in example_inputs):
        raise WeightsError(
            "weights='freeze' folds what weights hold, and fake ones hold nothing. For an absent GPU use "
            "weights='cache', whose graph is the same but for what Inductor folds."
        )
    # the first, while Dynamo compiles
    graph.prepared(example_inputs)
    return graph


class FrozenGraph:
    """A graph whose weights are constants of the code, which is compiled again when they change.

    Args:
        gm: rewritten. Kept, to freeze again.
        compile_graph: compiles a graph with Inductor's freezing switched on.
        may_change: False: a changed weight is an error.
        wide: False: weights of matmuls in fp32 stay inputs.
    """

    def __init__(self, gm: fx.GraphModule, compile_graph: Compile, *, may_change: bool, wide: bool) -> None:
        self._gm, self._compile_graph = gm, compile_graph
        self._inputs = gm.graph.find_nodes(op="placeholder")
        whole, copied = {*_stored_weights(gm, wide=wide)}, {*weights_of(kept_copies(gm.graph))}
        #: positions of what is frozen
        self.weights = [at for at, node in enumerate(self._inputs) if node in whole | copied]
        self._others = [at for at, node in enumerate(self._inputs) if node not in whole]
        self._cache = WeightCache(self._freeze, may_change=may_change)

    def prepared(self, args: Sequence[Any]) -> Callable[..., Any]:
        """The function that was compiled for the weights of a call with all inputs of the program."""
        return self._cache.of([args[at] for at in self.weights], args)

    def once(self, args: Sequence[Any]) -> Callable[..., Any]:
        """For one call the graph runs op by op."""
        return lambda *_: self._gm(*args)

    def run(self, args: Sequence[Any], prepared: Any) -> Any:
        """One call with what :meth:`prepared` or :meth:`once` has found."""
        return prepared(*[args[at] for at in self._others])

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
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        graph.output(graph.graph_copy(self._gm.graph, copies))
        gm = fx.GraphModule(self._gm, graph)
        steps = {copies[node] for node in steps_to(kept_copies(self._gm.graph))}
        inputs = gm.graph.find_nodes(op="placeholder")
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


#: a compiled graph that is called with what is made of its weights
WeightsGraph = LiftedGraph | FrozenGraph
