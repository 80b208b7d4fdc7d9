"""Autograd's engine: the call that is going on, and what it will run."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
)
from torch._C._functorch import peek_interpreter_stack

__all__ = [
    "RunningBackward",
    "accumulated",
    "at_end_of_backward",
    "graph_task",
    "has_node_hooks",
    "in_nested_transform",
    "on_default_stream",
    "running_backward",
    "will_run",
]


@dataclass(frozen=True)
class RunningBackward:
    """What autograd was asked for, in the call that is going on.

    Attributes:
        roots: what is differentiated: tensors, or edges of the graph.
        accumulates: False for ``torch.autograd.grad``.
        keeps_graph: with ``retain_graph`` or ``create_graph``.
        inputs: those whose gradients were asked for; empty: all leaves.
    """

    roots: Sequence[Any]
    accumulates: bool
    keeps_graph: bool
    inputs: Sequence[Any]


def running_backward() -> RunningBackward | None:
    """The call of autograd that this thread works for; None where that is not known for sure.

    On a GPU autograd works in threads of its own; then it is the one call that is going on, if there is but one.
    """
    calls = [found for frame in sys._current_frames().values() if (found := _engine_call(frame)) is not None]
    if len(calls) != 1:
        return None
    (call,) = calls
    arguments = call.f_locals
    given, named = arguments.get("args", ()), arguments.get("kwargs", {})
    if len(given) < 4 or "accumulate_grad" not in named:
        return None
    _, retain_graph, create_graph, inputs = given[:4]
    return RunningBackward(
        tuple(arguments["t_outputs"]),
        bool(named["accumulate_grad"]),
        bool(retain_graph or create_graph) or _get_current_graph_task_keep_graph(),
        tuple(inputs or ()),
    )


def _engine_call(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of a thread that waits for autograd."""
    from torch.autograd import graph

    code = graph._engine_run_backward.__code__
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def accumulated(node: Any) -> torch.Tensor | None:
    """The leaf that a node of autograd's adds gradients to; None for other nodes."""
    # not in the stubs
    return node.variable if isinstance(node, torch._C._functions.AccumulateGrad) else None  # type: ignore[attr-defined]


def will_run(node: Any) -> bool:
    """Whether autograd runs a node in the call that is going on. Do not ask inside ``torch.autograd.grad``."""
    return torch._C._will_engine_execute_node(node)


def has_node_hooks(node: Any) -> bool:
    """Whether Python code listens to what goes into a node of autograd's or comes out of it."""
    # the way to a node's hooks is to add one
    for register in (node.register_prehook, node.register_hook):
        handle = register(_ignore)
        hooks = handle.hooks_dict_ref()
        handle.remove()
        if hooks:
            return True
    return False


def _ignore(*_: Any) -> None:
    """A hook that is removed before it is called."""


def graph_task() -> int:
    """A number for the call of autograd that this thread works for; none is used twice."""
    return torch._C._current_graph_task_id()


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Calls back when the call of autograd that is going on has ended without an error."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def in_nested_transform() -> bool:
    """True inside a dispatch mode or a transform of torch.func, which see what runs op by op."""
    return bool(torch._C._len_torch_dispatch_stack()) or peek_interpreter_stack() is not None


def on_default_stream(device: torch.device) -> bool:
    """False on a CUDA stream of the program's own."""
    return torch.cuda.current_stream(device) == torch.cuda.default_stream(device)
