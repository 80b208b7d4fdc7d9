"""Dynamo's graphs of a program on the CPU: as data that another process can read, moved to a device, compiled there."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import nn
from torch.utils._pytree import tree_map_only

from amp_fx._torch import (
    FakeTensor,
    FakeTensorMode,
    compile_id,
    defining_module,
    enable_autocast,
    graph_break,
    in_inference_mode,
    is_functorch_wrapped,
    note_inference_mode,
    note_mode,
    replace_inner_compile,
)
from amp_fx.errors import TargetError
from amp_fx.graphs.calls import class_name, tensor_nodes
from amp_fx.graphs.keys import SOURCE_META
from amp_fx.graphs.values import tensors

#: as in ``torch.compile``
Backend = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
#: gets the graphs after partitioning, see :func:`amp_fx._torch.replace_inner_compile`
InnerCompile = Callable[..., Callable[[list[Any]], Any]]

_CUDA = torch.device("cuda", 0)
#: what of a node's metadata the passes and the reports read
_META = ("example_value", "nn_module_stack", "source_fn_stack", "stack_trace")
#: calls that make a tensor of sizes and numbers, on the current device unless told
_FACTORIES = frozenset(
    {
        torch.arange, torch.bartlett_window, torch.blackman_window, torch.empty, torch.empty_permuted,
        torch.empty_strided, torch.eye, torch.full, torch.hamming_window, torch.hann_window, torch.kaiser_window,
        torch.linspace, torch.logspace, torch.normal, torch.ones, torch.rand, torch.randint, torch.randn,
        torch.randperm, torch.range, torch.scalar_tensor, torch.tril_indices, torch.triu_indices, torch.zeros,
    }
)  # fmt: skip

#: calls that make a tensor of Python values, which torch does on the host and copies
_LITERALS = frozenset({torch.as_tensor, torch.asarray, torch.tensor})


class _Source(NamedTuple):
    """Dynamo's name of an input, without the guards that belong to it."""

    name: str


@dataclass(frozen=True)
class TracedGraph:
    """One of Dynamo's graphs, with what a backend would find around it."""

    name: str  # Dynamo's id, "0/0"
    #: a copy that holds nothing of the user's; its inputs say whether they require a gradient
    gm: fx.GraphModule
    grad: bool  # gradients were enabled
    inference: bool  # it is called under torch.inference_mode
    autocast: torch.dtype | None  # the dtype of an ambient torch.autocast("cpu")
    graph_break: str  # why the graph ends before the program does, or empty

    def __reduce__(self) -> tuple[Callable[..., TracedGraph], tuple[Any, ...]]:
        """Graphs and fake tensors need a pickler of their own."""
        # late, here and below: it imports Inductor, which takes over a second
        from amp_fx.instruments.targets._torch import graph_to_bytes

        graphs = [module.graph for module in self.gm.modules() if isinstance(module, fx.GraphModule)]
        calls = [node for graph in graphs for node in graph.nodes]
        definers = {defining_module(node.target) for node in calls} - {"", "__main__"}
        rest = self.grad, self.inference, self.autocast, self.graph_break
        return _unpickled, (sorted(definers), self.name, graph_to_bytes(self.gm), *rest)


def _unpickled(definers: Sequence[str], name: str, gm: bytes, *rest: Any) -> TracedGraph:
    from amp_fx.instruments.targets._torch import graph_from_bytes

    for module in definers:
        importlib.import_module(module)
    return TracedGraph(name, graph_from_bytes(gm), *rest)


class Tracer:
    """A backend of ``torch.compile`` that keeps the graphs, and runs them op by op where the program is."""

    def __init__(self) -> None:
        #: in the order in which Dynamo made them
        self.graphs: list[TracedGraph] = []
        note_inference_mode()

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Keeps a copy of the graph."""
        traced = _rebuild(gm, _as_data)
        traced.meta.clear()
        inputs = gm.graph.find_nodes(op="placeholder")
        for node, original, value in zip(
            traced.graph.find_nodes(op="placeholder"), inputs, example_inputs, strict=True
        ):
            if (source := getattr(original, "_dynamo_source", None)) is not None:
                node.meta[SOURCE_META] = str(source.name)
            # fake values do not say it of what is no parameter
            if isinstance(value, torch.Tensor):
                node.meta["example_value"].requires_grad_(value.requires_grad)
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        modes = torch.is_grad_enabled(), in_inference_mode()
        self.graphs.append(TracedGraph(compile_id(), traced, *modes, dtype, graph_break(gm)))

        def run(*args: Any) -> Any:
            # what the graph makes is to be of the kind of what it gets
            modes = [value.fake_mode for value in args if isinstance(value, FakeTensor)]
            with modes[0] if modes else contextlib.nullcontext():
                return gm.forward(*args)

        return run


def without_data(
    program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]] | None:
    """Copies of a program and of its arguments, whose tensors are fake ones on the CPU; None where all have data.

    TargetError for a model that cannot be copied.
    """
    own = [*program.parameters(), *program.buffers()] if isinstance(program, nn.Module) else []
    held = own + tensors((args, kwargs))
    if not any(value.is_meta for value in held):
        return None
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copies: dict[int, Any] = {id(value): _like(value, mode, torch.device("cpu")) for value in held}
    try:
        return copy.deepcopy((program, args, kwargs), copies)
    except Exception as error:  # of the user's classes
        raise TargetError(f"a model on the meta device is copied, and this one cannot be: {error}") from error


def _as_data(node: fx.Node) -> None:
    """Leaves what can be sent to another process: names instead of the user's classes and functions."""
    meta = {key: node.meta[key] for key in _META if key in node.meta}
    if any(is_functorch_wrapped(value) for value in tensors(meta.get("example_value"))):
        # inside vmap; nobody asks for it outside
        del meta["example_value"]
    if "example_value" in meta:
        meta["example_value"] = tree_map_only(FakeTensor, _fresh, meta["example_value"])
    if "nn_module_stack" in meta:
        meta["nn_module_stack"] = {
            key: (path, class_name(kind)) for key, (path, kind) in meta["nn_module_stack"].items()
        }
    if "source_fn_stack" in meta:
        meta["source_fn_stack"] = [
            (name, getattr(function, "__name__", str(function))) for name, function in meta["source_fn_stack"]
        ]
    node.meta = meta


def move(gm: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A copy of a Dynamo graph whose CPU values are on another device.

    Fake values, ``device=`` arguments and calls that make tensors move; numbers and sizes stay. Bodies of
    higher-order ops move, too. Each value has a storage of its own: inputs that are views of each other are not.
    """

    def there(value: Any) -> Any:
        if isinstance(value, torch.device) and value.type == "cpu":
            return device
        return device.type if isinstance(value, str) and value == "cpu" else value

    def change(node: fx.Node) -> None:
        if SOURCE_META in node.meta:
            node._dynamo_source = _Source(node.meta[SOURCE_META])  # type: ignore[attr-defined]  # Dynamo's own
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), there)  # type: ignore[assignment]
        if node.op in ("call_function", "call_method"):
            _make_there(node, device)
        if "example_value" in node.meta:
            node.meta["example_value"] = tree_map_only(
                FakeTensor, lambda value: _fresh(value, device), node.meta["example_value"]
            )

    return _rebuild(gm, change)


def _rebuild(gm: fx.GraphModule, change: Callable[[fx.Node], None]) -> fx.GraphModule:
    """A copy of a Dynamo graph, and of the bodies of its higher-order ops, whose nodes ``change`` has seen."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in gm.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        change(copy)
    built = fx.GraphModule(gm, graph)
    built.meta.update(gm.meta)
    for name, child in list(built.named_children()):
        if isinstance(child, fx.GraphModule):
            setattr(built, name, _rebuild(child, change))
    return built


def _fresh(value: FakeTensor, device: torch.device | None = None) -> torch.Tensor:
    """A fake tensor like another, with a storage of its own; one on the CPU moves to ``device``."""
    there = device if device is not None and value.device.type == "cpu" else value.device
    return _like(value, value.fake_mode, there)


def _like(value: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    with mode:
        new = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    is_parameter = isinstance(value, nn.Parameter)
    return nn.Parameter(new, value.requires_grad) if is_parameter else new.requires_grad_(value.requires_grad)


def _make_there(node: fx.Node, device: torch.device) -> None:
    """A call that makes a tensor on the CPU makes it on the device; one of a list of numbers, without the numbers."""
    made = node.meta.get("example_value")
    if not isinstance(made, torch.Tensor) or made.device.type != "cpu":
        return
    if node.target in _FACTORIES:
        node.kwargs = {**node.kwargs, "device": device}
    elif _makes_literal(node):
        scalar = not made.ndim and not isinstance(node.args[-1], (list, tuple))
        node.op, node.target = "call_function", torch.full if scalar else torch.empty
        node.args = ((), node.args[-1]) if scalar else (tuple(made.shape),)
        node.kwargs = {"dtype": made.dtype, "device": device}


def _makes_literal(node: fx.Node) -> bool:
    given = node.args[1:] if node.target == "new_tensor" else node.args
    values = [each.meta.get("example_value") for each in tensor_nodes(given)]
    return (
        # torch.FloatTensor is not of a class that Python has a name for
        (node.target in (*_LITERALS, "new_tensor") or type(node.target) is type(torch.FloatTensor))
        and bool(given)
        and not any(isinstance(value, torch.Tensor) for value in values)
    )


# --- compiling for the target of this process ---


@contextlib.contextmanager
def on_target(traced: TracedGraph) -> Iterator[tuple[fx.GraphModule, list[Any], FakeTensorMode]]:
    """A graph and its inputs as Dynamo would have made them on this process's target; inside, that is there."""
    from amp_fx.instruments.targets._torch import compile_contexts, pretended

    gm = move(traced.gm, _CUDA)
    inputs = [node.meta["example_value"] for node in gm.graph.find_nodes(op="placeholder")]
    mode = next(value.fake_mode for value in inputs if isinstance(value, FakeTensor))
    is_on, low = traced.autocast is not None, traced.autocast or torch.get_autocast_dtype("cuda")
    with (
        pretended(),
        compile_contexts(mode, traced.name),
        torch.set_grad_enabled(traced.grad),
        enable_autocast("cuda", is_on, low),
    ):
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
            differentiate(compiled(*inputs), inputs, mode)


def differentiate(result: Any, inputs: Any, mode: contextlib.AbstractContextManager[Any]) -> None:
    """Runs the backward of a call, if it has one, so that it is compiled; ``mode`` is that of the values."""
    outputs, leaves = ([v for v in tensors(given) if v.requires_grad] for given in (result, inputs))
    if not (outputs and leaves):
        return
    with mode:
        seeds = list(map(torch.ones_like, outputs))
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
