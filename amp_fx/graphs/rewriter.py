"""How a graph is changed: new calls get their fake values, and their metadata by one rule.

Not here: what a call is and who reads it (``calls.py``), and what it returns on fake values (``fake_runs.py``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import FakeTensor, FakeTensorMode
from amp_fx.graphs.calls import CAST, PROGRAM_CAST
from amp_fx.graphs.fake_runs import run_fake, trace_fake
from amp_fx.graphs.keys import REGION_META

#: keys that a new call inherits from the call that needs it: its place in the program, its side of the partition, its
#: autocast region. Marks and labels are of one call alone, so ``"custom"`` is not among them
INHERITED = (
    "ac_graph_id", "fwd_nn_module_stack", "nn_module_stack", "partitioner_tag", "recompute", "stack_trace", REGION_META,
)  # fmt: skip


class Rewriter:
    """Adds calls to one graph, where the graph inserts nodes or where :meth:`before` and :meth:`after` say.

    Calling the rewriter is :meth:`call`, so that it is an ``Emit`` of :mod:`amp_fx.precision.policy.scaled`.

    Args:
        graph: captured, or one of Inductor's.
        captured: False for Inductor's graphs, whose casts are another op.
        meta: metadata that each new call gets besides what it inherits.

    Attributes:
        graph: see above.
        added: the new calls, in the order in which they were made.
    """

    def __init__(
        self, graph: fx.Graph, *, captured: bool = True, meta: Mapping[str, Any] | None = None
    ) -> None:
        self.graph = graph
        self.added: list[fx.Node] = []
        self._cast = PROGRAM_CAST if captured else CAST
        self._meta = meta or {}
        self._like: tuple[fx.Node, ...] = ()

    @contextlib.contextmanager
    def before(self, node: fx.Node) -> Iterator[None]:
        """Inside, new calls stand in front of a node, and inherit from it."""
        with self.graph.inserting_before(node), self._as(node):
            yield

    @contextlib.contextmanager
    def after(self, node: fx.Node) -> Iterator[None]:
        """Inside, new calls stand behind a node, the last one first, and inherit from it."""
        with self.graph.inserting_after(node), self._as(node):
            yield

    @contextlib.contextmanager
    def _as(self, node: fx.Node) -> Iterator[None]:
        outer, self._like = self._like, (node,)
        try:
            yield
        finally:
            self._like = outer

    def call(self, target: Any, *args: Any, like: tuple[fx.Node, ...] = (), **kwargs: Any) -> fx.Node:
        """A new call.

        Args:
            target: of the call.
            *args: of the call.
            like: the nodes that the new one inherits from, of each key the first that has it; none: the node of
                :meth:`before` or :meth:`after`.
            **kwargs: of the call.

        Raises:
            VerifyError: the call does not run on the fake values of its arguments.
        """
        node = self.graph.call_function(target, args, kwargs)
        value = run_fake(node, None if node.all_input_nodes else self._mode())
        return self._describe(node, like or self._like, value)

    __call__ = call

    def trace(self, function: Callable[..., Any], *args: fx.Node | None, **constants: Any) -> Any:
        """Adds the calls by which a function of tensors computes its results, decomposed as Inductor's graphs are.

        Args:
            function: of the values of ``args``, in plain PyTorch.
            *args: its positional arguments, None but for the first where it takes None; sizes may be symbolic.
            **constants: its keyword arguments.

        Returns:
            The nodes of its results, in the structure in which it returns them.
        """
        traced = trace_fake(partial(function, **constants), args)
        copies: dict[fx.Node, Any] = dict(zip(traced.graph.find_nodes(op="placeholder"), args, strict=True))
        results = self.graph.graph_copy(traced.graph, copies)
        for source, node in copies.items():
            if source.op == "call_function":
                self._describe(node, self._like, source.meta["val"])
        return results

    def _describe(self, node: fx.Node, like: tuple[fx.Node, ...], value: Any) -> fx.Node:
        node.meta = {}
        for source in reversed(like):
            node.meta |= {key: source.meta[key] for key in INHERITED if key in source.meta}
        node.meta |= {**self._meta, "val": value}
        self.added.append(node)
        return node

    def cast(self, node: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The value in a dtype: the node itself where it has that."""
        return node if node.meta["val"].dtype is dtype else self.call(self._cast, node, dtype)

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Has all readers of a node read another one, and erases the node."""
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)

    def _mode(self) -> FakeTensorMode | None:
        """The mode of the graph's values: a value that is made of nothing belongs to it, too."""
        values = (node.meta.get("val") for node in self.graph.nodes)
        return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
