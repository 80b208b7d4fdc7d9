"""Compiles traced graphs, forward and backward, for a target that need not be in this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import FakeTensor, FakeTensorMode, enable_autocast, note_mode, replace_inner_compile
from amp_fx.graphs.values import tensors
from amp_fx.targets._torch import compile_contexts, pretended
from amp_fx.targets.tracing import TracedGraph, move

__all__ = ["Backend", "InnerCompile", "compile_graph", "on_target"]

#: as in ``torch.compile``
Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
#: gets the graphs after partitioning, see :func:`amp_fx._torch.replace_inner_compile`
InnerCompile = Callable[..., Callable[[list[Any]], Any]]

_CUDA = torch.device("cuda", 0)


@contextlib.contextmanager
def on_target(traced: TracedGraph) -> Iterator[tuple[fx.GraphModule, list[Any], FakeTensorMode]]:
    """A graph and its inputs as Dynamo would have made them on this process's target; inside, that is there."""
    gm = move(traced.gm, _CUDA)
    inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    ambient = (
        contextlib.nullcontext()
        if traced.autocast is None
        else enable_autocast("cuda", True, traced.autocast)
    )
    with pretended(), compile_contexts(mode, traced.name), torch.set_grad_enabled(traced.grad), ambient:
        note_mode(traced.inference)
        yield gm, inputs, mode


def compile_graph(traced: TracedGraph, backend: Backend, inner_compile: InnerCompile) -> None:
    """Compiles a graph for this process's target as far as ``inner_compile`` goes: forward, and backward if it has one.

    ``inner_compile`` stands in for Inductor's ``compile_fx_inner``; what it returns is called with fake values.
    """
    with on_target(traced) as (gm, inputs, mode), replace_inner_compile(_run_under(mode, inner_compile)):
        compiled = backend(gm, inputs)
        # the backward is compiled when it is first run
        if traced.grad and any(value.requires_grad for value in tensors(inputs)):
            _differentiate(compiled, inputs, mode)


def _differentiate(compiled: Callable[..., Any], inputs: Sequence[Any], mode: FakeTensorMode) -> None:
    outputs = [value for value in tensors(compiled(*inputs)) if value.requires_grad]
    if not outputs:
        return
    with mode:
        seeds = [torch.empty_like(value) for value in outputs]
    leaves = [value for value in tensors(inputs) if value.requires_grad]
    # In this thread. Autograd's thread for the device frees Python objects after the call has returned; where the
    # process ends meanwhile, Python ends that thread within C++ code that must not throw, and the process aborts.
    with torch.autograd.set_multithreading_enabled(False):
        torch.autograd.grad(outputs, leaves, seeds, allow_unused=True)


def _run_under(mode: FakeTensorMode, inner_compile: InnerCompile) -> InnerCompile:
    """Lowered graphs run op by op; only there, not in AOTAutograd around it, tensors are made that must be fake."""

    def compile_inner(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        call = inner_compile(gm, example_inputs, **options)

        def run(args: list[Any]) -> Any:
            with mode:
                return call(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it
        return run

    return compile_inner
