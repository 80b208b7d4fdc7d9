"""What Dynamo makes of a program on the CPU: its graphs, as data that another process can read."""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx
from torch import nn
from torch.utils._pytree import tree_map_only

from amp_fx._torch import (
    FakeTensor,
    FakeTensorMode,
    compile_id,
    defining_module,
    graph_break,
    in_inference_mode,
    is_functorch_wrapped,
    note_inference_mode,
)
from amp_fx.errors import TargetError
from amp_fx.graphs.calls import class_name
from amp_fx.graphs.keys import SOURCE_META
from amp_fx.graphs.values import tensors
from amp_fx.targets.moving import fresh, rebuild

__all__ = ["TracedGraph", "Tracer", "on_meta", "without_data"]

#: what of a node's metadata the passes and the reports read
_META = ("example_value", "nn_module_stack", "source_fn_stack", "stack_trace")


@dataclass(frozen=True)
class TracedGraph:
    """One of Dynamo's graphs, with what a backend would find around it.

    Attributes:
        name: Dynamo's id, ``"0/0"``.
        gm: a copy of the graph that holds nothing of the user's; its inputs say whether they require a gradient.
        grad: whether gradients were enabled.
        inference: whether it is called under ``torch.inference_mode``.
        autocast: the dtype of an ambient ``torch.autocast("cpu")``, or None.
        graph_break: why the graph ends before the program does, or an empty string.
    """

    name: str
    gm: fx.GraphModule
    grad: bool
    inference: bool
    autocast: torch.dtype | None
    graph_break: str

    def __reduce__(self) -> tuple[Callable[..., TracedGraph], tuple[Any, ...]]:
        """Graphs and fake tensors need a pickler of their own."""
        # late, here and below: it imports Inductor, which takes over a second
        from amp_fx.targets._torch import graph_to_bytes

        calls = [
            node
            for module in self.gm.modules()
            if isinstance(module, fx.GraphModule)
            for node in module.graph.nodes
        ]
        definers = {defining_module(node.target) for node in calls} - {"", "__main__"}
        gm = graph_to_bytes(self.gm)
        rest = self.grad, self.inference, self.autocast, self.graph_break
        return _unpickled, (sorted(definers), self.name, gm, *rest)


def _unpickled(definers: Sequence[str], name: str, gm: bytes, *rest: Any) -> TracedGraph:
    from amp_fx.targets._torch import graph_from_bytes

    for module in definers:
        importlib.import_module(module)
    return TracedGraph(name, graph_from_bytes(gm), *rest)


@dataclass
class Tracer:
    """A backend of ``torch.compile`` that keeps the graphs, and runs them op by op where the program is.

    Attributes:
        graphs: in the order in which Dynamo made them.
    """

    graphs: list[TracedGraph] = field(default_factory=list)

    def __post_init__(self) -> None:
        note_inference_mode()

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        """Keeps a copy of the graph."""
        traced = rebuild(gm, _as_data)
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


def on_meta(program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if a tensor of the program or of the call has no data."""
    return any(value.is_meta for value in _held(program, args, kwargs))


def without_data(
    program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Copies of a program and of its arguments, whose tensors are fake ones on the CPU.

    Raises:
        TargetError: the program cannot be copied.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    copies: dict[int, Any] = {}
    for value in _held(program, args, kwargs):
        with mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        is_parameter = isinstance(value, nn.Parameter)
        requires_grad = value.requires_grad
        copies[id(value)] = (
            nn.Parameter(fake, requires_grad) if is_parameter else fake.requires_grad_(requires_grad)
        )
    try:
        return copy.deepcopy((program, args, kwargs), copies)
    except Exception as error:  # of the user's classes
        raise TargetError(f"a model on the meta device is copied, and this one cannot be: {error}") from error


def _held(program: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    own = [*program.parameters(), *program.buffers()] if isinstance(program, nn.Module) else []
    return own + tensors((args, kwargs))


def _as_data(node: fx.Node) -> None:
    """Leaves what can be sent to another process: names instead of the user's classes and functions."""
    meta = {key: node.meta[key] for key in _META if key in node.meta}
    if any(is_functorch_wrapped(value) for value in tensors(meta.get("example_value"))):
        # inside vmap; nobody asks for it outside
        del meta["example_value"]
    if "example_value" in meta:
        meta["example_value"] = tree_map_only(FakeTensor, fresh, meta["example_value"])
    if "nn_module_stack" in meta:
        meta["nn_module_stack"] = {
            key: (path, class_name(kind)) for key, (path, kind) in meta["nn_module_stack"].items()
        }
    if "source_fn_stack" in meta:
        meta["source_fn_stack"] = [(name, _name(function)) for name, function in meta["source_fn_stack"]]
    node.meta = meta


def _name(value: Any) -> str:
    return value if isinstance(value, str) else getattr(value, "__name__", str(value))
