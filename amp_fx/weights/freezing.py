"""Compiled graphs whose weights are constants, which Inductor folds and packs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx._torch import FakeTensor
from amp_fx.errors import WeightsError
from amp_fx.graphs.calls import is_parameter
from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.keys import COPY_META
from amp_fx.graphs.values import storage_of, written_storages
from amp_fx.weights.changes import state_of
from amp_fx.weights.folding import FoldingRecord
from amp_fx.weights.inference import Compile, copies_of, is_plain
from amp_fx.weights.kept import Kept, Made
from amp_fx.weights.recipes import Cast, recipe_of
from amp_fx.weights.values import Values

__all__ = ["FrozenGraph", "freeze"]

logger = logging.getLogger(__name__)

#: a compiled graph, and the constants that it is called with
_Ready = tuple[Callable[..., Any], Sequence[Tensor]]


def freeze(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    compile_graph: Compile,
    *,
    may_change: bool,
    packs_wide: bool,
) -> FrozenGraph | None:
    """Compiles a graph with its weights folded and packed.

    Args:
        gm: rewritten, perhaps with inputs for low copies.
        example_inputs: one for each of the program's inputs.
        compile_graph: compiles a graph with Inductor's freezing switched on.
        may_change: see :class:`FrozenGraph`.
        packs_wide: likewise.

    Returns:
        The compiled graph; None if it has no weights, as between two graph breaks.

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
    graph.kept(example_inputs)
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
        self._gm = gm
        self._compile_graph = compile_graph
        placeholders = self._placeholders = gm.graph.find_nodes(op="placeholder")
        written = {key for node in gm.graph.nodes for key in written_storages(node)}
        wide = set() if packs_wide else _read_wide(gm)
        copied = {node.meta.get(COPY_META) for node in placeholders}
        #: become constants; a weight that is read in fp32 as well may be one only in low
        self._constant = [
            COPY_META in node.meta
            or (_is_weight(node) and is_plain(node) and storage_of(node) not in written | wide)
            for node in placeholders
        ]
        self._weights = [
            at
            for at, node in enumerate(placeholders)
            if COPY_META not in node.meta and (self._constant[at] or node.name in copied)
        ]
        self._others = [at for at in range(len(placeholders)) if not self._constant[at]]
        #: what is common to all models, if the weights are inputs of the compiled graph
        self._shared: tuple[Callable[..., Any], Values] | None = None
        self._call = _Call()
        self._kept = Kept(self._freeze, may_change=may_change)

    @property
    def has_weights(self) -> bool:
        """False for a graph in which nothing can be frozen, between two graph breaks, say."""
        return bool(self._weights)

    def kept(self, args: Sequence[Any]) -> _Ready:
        """The compiled graph and its constants, for a call with all inputs of the program.

        Raises:
            WeightsError: a weight has changed, and may not.
        """
        return self._kept.of(self._weights_of(args), args)

    def anew(self, args: Sequence[Any]) -> _Ready:
        """As :meth:`kept`, with constants of this call; where they are part of the code, the graph runs op by op."""
        if self._shared is not None:
            compiled, constants = self._shared
            return compiled, constants.anew(self._weights_of(args))
        positions, copies = copies_of(self._gm)
        made = copies.anew([args[at] for at in positions])
        return lambda *_: self._gm(*args, *made), ()

    def run(self, args: Sequence[Any], made: _Ready) -> Any:
        """One call with what :meth:`kept` or :meth:`anew` has found."""
        compiled, self._call.tensors = made
        try:
            return compiled(*[args[at] for at in self._others])
        finally:
            self._call.tensors = ()

    def _weights_of(self, args: Sequence[Any]) -> list[Tensor]:
        return [args[at] for at in self._weights]

    def _freeze(
        self, weights: Sequence[Tensor], before: Made[_Ready] | None, args: Sequence[Any]
    ) -> Made[_Ready]:
        """What the graph is with some weights.

        Args:
            weights: those among ``args``.
            before: what it was with them before.
            args: while Dynamo compiles, its example inputs; later, those of a call.
        """
        if self._shared is None:
            # looked at before: a write in between is seen at the next call
            states = [*map(state_of, weights)]
            compiled, constants = self._compile(args, weights)
            if constants is None:
                return Made((compiled, ()), states)
            # two threads may compile at a time; nobody waits, as Dynamo, which may compile, too, has a lock
            self._shared = self._shared or (compiled, constants)
        compiled, constants = self._shared
        made = constants.make(weights)
        return Made((compiled, made.value), made.states, made.sources)

    def _compile(
        self, args: Sequence[Any], weights: Sequence[Tensor]
    ) -> tuple[Callable[..., Any], Values | None]:
        logger.debug("freezing %d weights", len(weights))
        # inference tensors could not be given other values outside inference mode
        with torch.inference_mode(False), torch.no_grad():
            record = FoldingRecord(weights, self._call.of_now)
            gm = self._with_constants(record)
            with record.observe():
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
        for node, is_constant in zip(self._placeholders, self._constant, strict=True):
            if not is_constant:
                continue
            position = positions[node.meta.get(COPY_META, node.name)]
            recipe, part = recipe_of(node)
            # what is more than a cast is folded by Inductor
            value = node.meta["val"] if isinstance(recipe, Cast) else values[node.meta[COPY_META]]
            name = f"amp_fx_frozen_{node.name}"
            holder.register_buffer(name, record.value(position, value.dtype))
            with graph.inserting_before(copies[node]):
                constant = graph.get_attr(name)
                constant.meta = {"val": value}
                made = constant
                if not isinstance(recipe, Cast):
                    made = recipe.steps(constant, lambda op, *args, **kw: graph.call_function(op, args, kw))[
                        part
                    ]
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


class _Call(threading.local):
    """What the call that is going on in this thread gives to the compiled graph."""

    tensors: Sequence[Tensor] = ()

    def of_now(self) -> Sequence[Tensor]:
        """The constants."""
        return self.tensors


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
