"""Compiled graphs whose weights are constants, which Inductor folds and packs."""

from __future__ import annotations

import functools
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

from amp_fx._torch import FakeTensor, StorageRef
from amp_fx.errors import WeightsError
from amp_fx.graphs.calls import COPY_META, is_parameter
from amp_fx.graphs.flops import is_matmul
from amp_fx.graphs.storages import storage_of, written_storages
from amp_fx.weights.constants import Constant, Constants
from amp_fx.weights.folding import FoldingRecord
from amp_fx.weights.forms import Cast, form_of
from amp_fx.weights.inference import Compile, is_plain, low_copies
from amp_fx.weights.watch import Key, Watch, key_of, look_at

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
        WeightsError: the weights are fake: compiled for a GPU that is not there, they hold nothing to fold.
    """
    graph = FrozenGraph(gm, compile_graph, may_change=may_change, packs_wide=packs_wide)
    if not graph.has_weights:
        return None
    if any(isinstance(value, FakeTensor) and isinstance(value, nn.Parameter) for value in example_inputs):
        raise WeightsError(
            "weights='freeze' folds what weights hold, and fake ones hold nothing. For a GPU that is not there use "
            "weights='cache', whose graph is the same but for what Inductor folds."
        )
    graph.freeze(example_inputs)
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
        self._may_change = may_change
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
        # models of one class share their graphs
        self._found: dict[Key, _Frozen] = {}
        #: where weights must not change: the memory that is left of those of which some was freed
        self._left: dict[Key, list[StorageRef]] = {}
        #: what is common to all models, if the weights are inputs of the compiled graph
        self._shared: tuple[Callable[..., Any], Constants] | None = None
        self._call = _Call()
        self._lock = threading.RLock()

    @property
    def has_weights(self) -> bool:
        """False for a graph in which nothing can be frozen, between two graph breaks, say."""
        return bool(self._weights)

    def freeze(self, args: Sequence[Any]) -> tuple[_Frozen, Sequence[Tensor]]:
        """Freezes the graph with the weights among ``args``.

        Args:
            args: while Dynamo compiles, its example inputs; later, those of a call.

        Returns:
            What the graph with these weights is, and its constants.
        """
        weights = [args[at] for at in self._weights]
        key = key_of(weights)
        # looked at before: a write in between is seen at the next call
        looks = [*map(look_at, weights)]
        watch = Watch(weights, looks, functools.partial(self._freed, key))
        compiled, constants = self._shared or self._compile(args, weights)
        frozen, tensors = _Frozen(compiled, watch), []
        if constants is not None:
            self._shared = compiled, constants
            tensors = constants.give(frozen, weights, looks)
        watch.confirm(weights)
        # other threads find it only now
        self._found[key] = frozen
        return frozen, tensors

    def kept(self, args: Sequence[Any]) -> _Ready:
        """The compiled graph and its constants, for a call with all inputs of the program.

        Raises:
            WeightsError: a weight has changed, and may not.
        """
        weights = [args[at] for at in self._weights]
        frozen = self._found.get(key_of(weights))
        # the list of this call: another thread may make the constants again meanwhile
        tensors = None if frozen is None else frozen.tensors
        if frozen is None or tensors is None or not frozen.watch.is_current(weights):
            frozen, tensors = self._renew(weights, args)
        return frozen.compiled, tensors

    def anew(self, args: Sequence[Any]) -> _Ready:
        """As :meth:`kept`, with constants of this call; where they are part of the code, the graph runs op by op."""
        if self._shared is not None:
            compiled, constants = self._shared
            return compiled, constants.anew([args[at] for at in self._weights])
        copies = low_copies(self._gm).anew(args)
        return lambda *_: self._gm(*args, *copies), ()

    def run(self, args: Sequence[Any], made: _Ready) -> Any:
        """One call with what :meth:`kept` or :meth:`anew` has found."""
        compiled, self._call.tensors = made
        try:
            return compiled(*[args[at] for at in self._others])
        finally:
            self._call.tensors = ()

    def _freed(self, key: Key, _: object) -> None:
        """The memory of a weight was freed: what was made of it goes."""
        frozen = self._found.pop(key, None)
        if frozen is not None and not self._may_change:
            living = [storage for ref in frozen.watch.refs if (storage := ref()) is not None]
            left = {**self._left, key: [weakref.ref(storage) for storage in living]}
            self._left = {key: refs for key, refs in left.items() if _is_any_alive(refs)}

    def _have_changed(self, frozen: _Frozen | None, weights: Sequence[Tensor]) -> bool:
        if frozen is not None:
            return not frozen.still_holds(weights)
        # of a model that has died nothing is left; one in which a weight has got other memory has that of the others
        return _is_any_alive(self._left.get(key_of(weights), ()))

    def _renew(self, weights: Sequence[Tensor], args: Sequence[Any]) -> tuple[_Frozen, Sequence[Tensor]]:
        with self._lock:
            frozen = self._found.get(key_of(weights))
            if not self._may_change and self._have_changed(frozen, weights):
                raise WeightsError(
                    "weights have changed since the graph was frozen, and strict=True forbids to freeze it again. "
                    "Use weights='cache' for weights that change, or torch.compiler.reset() after changing them."
                )
            # another thread may have been first, or they may not have changed after all
            tensors = None if frozen is None else frozen.tensors
            if frozen is None or tensors is None or not frozen.still_holds(weights):
                return self.freeze(args)
            return frozen, tensors

    def _compile(
        self, args: Sequence[Any], weights: Sequence[Tensor]
    ) -> tuple[Callable[..., Any], Constants | None]:
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
            form, part = form_of(node)
            # what is more than a cast is folded by Inductor
            value = node.meta["val"] if isinstance(form, Cast) else values[node.meta[COPY_META]]
            name = f"amp_fx_frozen_{node.name}"
            holder.register_buffer(name, record.value(position, value.dtype))
            with graph.inserting_before(copies[node]):
                constant = graph.get_attr(name)
                constant.meta = {"val": value}
                made = constant
                if not isinstance(form, Cast):
                    made = form.steps(constant, lambda op, *args, **kw: graph.call_function(op, args, kw))[
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


class _Frozen:
    """The graph with the constants of one model.

    Args:
        compiled: takes the inputs that are no weights.
        watch: over the weights.

    Attributes:
        tensors: the constants; None: to be made again.
    """

    def __init__(self, compiled: Callable[..., Any], watch: Watch) -> None:
        self.compiled = compiled
        self.watch = watch
        self.tensors: Sequence[Tensor] | None = ()
        self._constants: Sequence[Constant] = ()

    def hold(self, constants: Sequence[Constant], tensors: Sequence[Tensor]) -> None:
        """Keeps these alive, until one of them is going to be computed again."""
        self._constants, self.tensors = constants, tensors

    def give_up(self) -> None:
        """A constant is going to be computed again."""
        self.tensors = None

    def still_holds(self, weights: Sequence[Tensor]) -> bool:
        """True if the weights have not changed; looks more closely than in every call."""
        return all(look_at(w) is look for w, look in zip(weights, self.watch.looks, strict=True))


def _is_any_alive(refs: Sequence[StorageRef]) -> bool:
    return any(ref() is not None for ref in refs)


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
