"""Second derivatives of what AOTAutograd compiles: it has none, and says so only where it saves what it was given.

Its own check is a node between the first gradients and the tensors that the backward reads. Where these are inputs of
the graph, a second derivative comes to the node. Where they are low copies, no way from the gradients leads to the
inputs, and autograd leaves the second derivative out.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.autograd import Function

__all__ = ["refusing_second_derivatives"]


class _Joined(Function):
    """Values that depend on tensors; a derivative by them is an error."""

    @staticmethod
    def forward(ctx: Any, error: Exception, values: Sequence[Tensor], *_: Tensor) -> tuple[Tensor, ...]:
        ctx.error = error
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise ctx.error


@contextlib.contextmanager
def refusing_second_derivatives(error: Callable[[], Exception]) -> Iterator[None]:
    """A second derivative of a function that AOTAutograd compiles inside raises an error."""
    from torch._functorch._aot_autograd.runtime_wrappers import RuntimeWrapper

    def post_compile(self: Any, compiled: Any, *args: Any, **kwargs: Any) -> Any:
        # apply() of a graph with gradients, also of one that a cache hands out
        function = getattr(compiled, "__self__", None)
        if isinstance(function, type) and issubclass(function, Function):
            _refuse(function, error)
        return original(self, compiled, *args, **kwargs)

    original = RuntimeWrapper.post_compile
    with mock.patch.object(RuntimeWrapper, "post_compile", post_compile):
        yield


def _refuse(function: Any, error: Callable[[], Exception]) -> None:
    forward, backward = function.forward, function.backward

    def join_inputs(ctx: Any, *args: Any) -> Any:
        # a node knows parameters and other leaves by itself, and of the rest no tensor
        inner = [arg for arg in args if isinstance(arg, Tensor) and arg.grad_fn is not None]
        with torch.enable_grad():
            ctx.inner = _Joined.apply(error(), [torch.empty(0)], *inner) if inner else ()
        return forward(ctx, *args)

    def join_gradients(ctx: Any, *args: Any) -> Any:
        found = backward(ctx, *args)
        if not torch.is_grad_enabled():
            return found
        leaves = [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]
        gradients = [value for value in found if isinstance(value, Tensor)]
        joined = iter(_Joined.apply(error(), gradients, *gradients, *leaves, *ctx.inner))  # type: ignore[arg-type]
        return tuple(next(joined) if isinstance(value, Tensor) else value for value in found)

    function.forward, function.backward = staticmethod(join_inputs), staticmethod(join_gradients)
