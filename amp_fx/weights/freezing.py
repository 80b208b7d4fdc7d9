"""Compiled graphs whose weights are constants, which Inductor folds and packs."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx.errors import WeightsError
from amp_fx.graphs.facts import COPY_META, is_parameter, storage_of, written_storages
from amp_fx.weights.constants import LiveConstants
from amp_fx.weights.folding import FoldingRecord
from amp_fx.weights.inference import Compile, is_plain
from amp_fx.weights.watch import OnDeath, Watch

__all__ = ["FrozenGraph", "freeze"]

logger = logging.getLogger(__name__)

#: seconds between two looks at whether the calls of other threads have ended
_PAUSE = 1e-4


def freeze(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compile_graph: Compile, *, may_change: bool
) -> FrozenGraph | None:
    """Compiles a graph with its weights as constants.

    Args:
        gm: rewritten, perhaps with inputs for low copies.
        example_inputs: one for each of the program's inputs.
        compile_graph: compiles a graph with Inductor's freezing switched on.
        may_change: see :class:`FrozenGraph`.

    Returns:
        The compiled graph; None if it has no weights, as between two graph breaks.
    """
    graph = FrozenGraph(gm, compile_graph, may_change=may_change)
    if not graph.has_weights:
        return None
    graph.freeze(example_inputs)
    return graph


class FrozenGraph:
    """A graph whose weights are constants.

    When weights change, the constants are computed again, or, where it is not known how, the graph is frozen again.

    Args:
        gm: rewritten, perhaps with inputs for low copies. Kept, to freeze again.
        compile_graph: compiles a graph with Inductor's freezing switched on.
        may_change: False: a changed weight is an error.
    """

    def __init__(self, gm: fx.GraphModule, compile_graph: Compile, *, may_change: bool) -> None:
        self._gm = gm
        self._compile_graph = compile_graph
        self._may_change = may_change
        placeholders = self._placeholders = gm.graph.find_nodes(op="placeholder")
        written = {key for node in gm.graph.nodes for key in written_storages(node)}
        self._weights = [
            at
            for at, node in enumerate(placeholders)
            if _is_weight(node) and is_plain(node) and storage_of(node) not in written
        ]
        self._others = [
            at
            for at, node in enumerate(placeholders)
            if at not in self._weights and COPY_META not in node.meta
        ]
        # by id of the first weight: models of one class share their graphs
        self._found: dict[int, _Frozen] = {}
        self._lock = threading.RLock()

    @property
    def has_weights(self) -> bool:
        """False for a graph in which nothing can be frozen, between two graph breaks, say."""
        return bool(self._weights)

    def freeze(self, args: Sequence[Any]) -> _Frozen:
        """Freezes the graph with the weights among ``args``.

        Args:
            args: while Dynamo compiles, its example inputs; later, those of a call.
        """
        weights = [args[at] for at in self._weights]
        watch = self._watch(weights)
        # inference tensors could not be given other values outside inference mode
        with torch.inference_mode(False), torch.no_grad():
            record = FoldingRecord(weights)
            gm = self._with_constants(record)
            with record.observe():
                compiled = self._compile_graph(gm, [self._example(at, args[at]) for at in self._others])
        found = _Frozen(compiled, record.finish(), watch)
        if found.constants is None or not self._may_change:
            # the weights are looked at closely before anybody has to wait, or to handle an error
            watch.sum_up(weights)
        self._found[id(weights[0])] = found
        return found

    def __call__(self, *args: Any) -> Any:
        """One call, with all inputs of the program.

        Raises:
            WeightsError: a weight has changed, and may not.
        """
        weights = [args[at] for at in self._weights]
        found = self._found.get(id(weights[0]))
        is_new = False
        while found is None or not found.enter(weights, is_new=is_new):
            with self._lock:
                # another thread may have been first
                found = self._found.get(id(weights[0]))
                if found is None or not found.is_current(weights):
                    found = self._renew(found, weights, args)
            # what was made a moment ago is used even if yet another thread writes to the weights all the time
            is_new = True
        try:
            return found.compiled(*(args[at] for at in self._others))
        finally:
            found.leave()

    def _renew(self, found: _Frozen | None, weights: Sequence[Tensor], args: Sequence[Any]) -> _Frozen:
        if found is not None and not self._may_change:
            raise WeightsError(
                "weights have changed since the graph was frozen, and strict=True forbids to freeze it again. Use "
                "weights='cache' for weights that change, or torch.compiler.reset() after changing them."
            )
        if found is None or found.constants is None:
            logger.info("weights changed or belong to another model: freezing %d again", len(weights))
            return self.freeze(args)
        found.renew(weights, self._watch(weights))
        return found

    def _watch(self, weights: Sequence[Tensor]) -> Watch:
        return Watch(weights, OnDeath(self._found, id(weights[0])))

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
        for node in self._placeholders:
            position = positions.get(node.meta.get(COPY_META, node.name))
            if position is None:
                continue
            name = f"amp_fx_frozen_{node.name}"
            holder.register_buffer(name, record.value(position, node.meta["val"].dtype))
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


class _Frozen:
    """The graph with the constants of one model.

    Args:
        compiled: takes the inputs that are no weights.
        constants: None if they are not known well enough to be computed again.
        watch: over the weights.
    """

    def __init__(self, compiled: Callable[..., Any], constants: LiveConstants | None, watch: Watch) -> None:
        self.compiled = compiled
        self.constants = constants
        self._watch = watch
        #: the thread of each call that is going on; a list may be changed in any thread
        self._calls: list[int] = []
        self._is_changing = False
        if constants is not None:
            # Inductor keeps the modules that it generates, and what they refer to, as long as the process runs
            weakref.finalize(self, constants.drop).atexit = False

    def is_current(self, weights: Sequence[Tensor]) -> bool:
        """True if the weights are those whose constants these are, and have not changed."""
        return self._watch.is_current(weights)

    def enter(self, weights: Sequence[Tensor], *, is_new: bool) -> bool:
        """Begins a call; False if it cannot begin before the constants are computed again."""
        self._calls.append(threading.get_ident())
        if not self._is_changing and (is_new or self.is_current(weights)):
            return True
        self.leave()
        return False

    def leave(self) -> None:
        """Ends a call."""
        self._calls.remove(threading.get_ident())

    def renew(self, weights: Sequence[Tensor], watch: Watch) -> None:
        """Computes the constants from ``weights``.

        Args:
            weights: all of them.
            watch: that looked at them before.
        """
        if self.constants is None:
            raise AssertionError("constants that are not known cannot be computed again")
        # in this order: a call that has begun without seeing it is among those that are waited for
        self._is_changing = True
        try:
            while any(thread != threading.get_ident() for thread in list(self._calls)):
                time.sleep(_PAUSE)
            self.constants.renew(weights, watch.changed_since(self._watch))
            watch.confirm(weights)
            self._watch = watch
        finally:
            self._is_changing = False


def _is_weight(node: fx.Node) -> bool:
    """True for parameters and for buffers of the user's modules."""
    source = getattr(node, "_dynamo_source", None)
    return is_parameter(node) or (source is not None and "_buffers[" in str(source.name))
