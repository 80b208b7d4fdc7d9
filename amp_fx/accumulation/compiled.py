"""A compiled graph whose backward adds to the gradients that are there.

The first micro-batch runs the backward as Inductor compiled it. The first one that finds gradients has a second one
compiled, which adds to them; who never accumulates never pays for it.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from amp_fx._torch import CompiledBackward, at_end_of_backward
from amp_fx.accumulation.gate import gradients_to_add_to, leaves_of
from amp_fx.accumulation.second import Second
from amp_fx.accumulation.sharing import Sharing
from amp_fx.passes import AccumulateGradients, PassContext, run_in_order

__all__ = ["adding"]

logger = logging.getLogger(__name__)

_sharing = Sharing()


def adding(
    compiled: Callable[..., Any], example_inputs: Sequence[Any], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """A graph with a backward that adds to ``.grad`` where that gives the same bits as autograd's addition.

    Args:
        compiled: what Inductor made of the graph.
        example_inputs: one per placeholder.
        options: of Inductor, as the graph was compiled with them.
    """
    # sizes that change from call to call: a backward for some of them would not do for others
    if not all(isinstance(value, Tensor) for value in example_inputs):
        return compiled
    backward = _Backward(len(example_inputs), options)

    def run(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return compiled(*args)
        backward.enter_thread()
        outputs = compiled(*args)
        if not backward.is_attached:
            backward.attach(outputs if isinstance(outputs, (list, tuple)) else (outputs,), args)
        return outputs

    return run


def _wait_for(device: torch.device) -> None:
    """The stream that called autograd waits for the gradients, as it does for those that autograd adds."""
    torch.cuda.current_stream(device).wait_stream(torch.cuda.default_stream(device))


class _Backward:
    """The backward of one compiled graph.

    Args:
        inputs: number of the graph's inputs.
        options: of Inductor.
    """

    def __init__(self, inputs: int, options: Mapping[str, Any]) -> None:
        self.is_attached = False
        self._inputs, self._options = inputs, options
        self._of: CompiledBackward | None = None
        #: None before a backward has found gradients
        self._second: Second | None = None
        self._is_hopeless = False
        self._thread: int | None = None
        self._is_shared = False
        # held while gradients are added: another thread that would add to the same waits
        self._lock = threading.Lock()

    def attach(self, outputs: Sequence[Any], args: Sequence[Any]) -> None:
        """Finds the backward of a call that returned something with a gradient."""
        # an input that is returned may come from another graph
        given = {id(arg.grad_fn) for arg in args if isinstance(arg, Tensor)}
        self._of = CompiledBackward.of([o for o in outputs if id(getattr(o, "grad_fn", None)) not in given])
        if self._of is not None:
            self.is_attached = True
            self._of.replace(self._add)

    def enter_thread(self) -> None:
        """Two threads that train one model may add to one gradient at once: then autograd does it, which has locks."""
        thread = threading.get_ident()
        if self._thread == thread or self._is_shared:
            return
        with self._lock:
            if self._thread is None:
                self._thread = thread
            self._is_shared = self._thread != thread

    def _add(self, node: Any, args: list[Any]) -> Sequence[Any] | None:
        """Runs the backward and adds; None where autograd is to add."""
        with self._lock:
            if self._is_shared or self._is_hopeless:
                return None
            if self._second is None:
                leaves = leaves_of(node)
                if all(leaf is None or leaf.grad is None for leaf in leaves):
                    return None
                self._second = self._write(leaves, args)
            second = self._second
            if second is None:
                self._is_hopeless = True
                return None
            grads = gradients_to_add_to(node, second.positions, args, _sharing)
            if grads is None:
                return None
            node.maybe_clear_saved_tensors()
            returned = second.run(args, grads)
            # as autograd's own addition does
            increment_version(grads)
            for device in {grad.device for grad in grads if grad.is_cuda}:
                at_end_of_backward(functools.partial(_wait_for, device))
            return returned

    def _write(self, leaves: Sequence[Tensor | None], args: Sequence[Any]) -> Second | None:
        """The backward that adds; None where there is nothing to add, or it cannot be had as a graph."""
        of, options = self._of, self._options
        graph = None if of is None or len(leaves) != self._inputs else of.graph(args)
        # fx has no type for a tuple of outputs
        if of is None or graph is None or len(graph.graph.output_node().args[0]) != len(leaves):  # type: ignore[arg-type]
            logger.debug("autograd adds gradients: the backward cannot be had as a graph")
            return None
        places = tuple(place for place, leaf in enumerate(leaves) if leaf is not None)
        run_in_order(graph, [AccumulateGradients(places)], PassContext())
        positions = AccumulateGradients.positions(graph)
        return Second(positions, lambda: of.compile(graph, options)) if positions else None
