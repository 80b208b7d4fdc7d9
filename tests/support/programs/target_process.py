"""What tests ask of a process that compiles for a target: functions that run there, and the process itself."""

from __future__ import annotations

import atexit
import contextlib
import copy
import functools
import importlib.util
import io
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.fx as fx
from torch import Tensor

from amp_fx._torch import program_outputs, size_hint, stock_inductor
from amp_fx.compiler.backend import amp_fx
from amp_fx.errors import AmpFxError
from amp_fx.graphs.values import storage_of
from amp_fx.instruments.reports.lowered import autocast_backend, cast_kernels
from amp_fx.instruments.targets.process import TargetProcess
from amp_fx.instruments.targets.tracing import Backend, TracedGraph, Tracer, compile_graph
from benchmarks import counts
from benchmarks.arms import ARMS
from benchmarks.counts import Counter, Counts, Row
from benchmarks.workloads import make
from support.models.zoo import Case

aten = torch.ops.aten

#: casts as the op lists say, whatever they cost
OFF = {"profile": "off", "strict": True}

#: Triton is there wherever there is one for the platform; g++ compiles for Inductor on a CPU as well
needs_a_target = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="needs Triton and a C++ compiler",
)


def quick_ones(names: Iterable[str], *quick: str) -> list[Any]:
    """Parameters of a test: the others take minutes in all, and are slow."""
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


#: calls that make a tensor out of nothing but sizes and numbers
MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "an empty list": lambda x: torch.cat([torch.tensor([], dtype=x.dtype, device=x.device), x[0]]),
    "a list": lambda x: x * torch.tensor([1.0, 2.0] * 4, device=x.device),
    "a list on the way to a device": lambda x: x * torch.tensor([1.0, 2.0] * 4).to(x.device),
    "a nested list": lambda x: x[:2, :2] * torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    "indices": lambda x: x[:, torch.tensor([0, 3, 5])],
    "a number": lambda x: x * torch.tensor(2.0, device=x.device),
    "a list like another tensor": lambda x: x * x.new_tensor([1.0, 2.0] * 4),
    "a number like another tensor": lambda x: x * x.new_tensor(2.0),
    "as_tensor of a list": lambda x: x * torch.as_tensor([1.0, 2.0] * 4, device=x.device),
    "as_tensor of a number": lambda x: x * torch.as_tensor(3.0, device=x.device),
    "FloatTensor": lambda x: x * torch.FloatTensor([1.0, 2.0] * 4),
    "range": lambda x: x * torch.range(1, 8),
    "a window": lambda x: x * torch.hamming_window(8),
    "random numbers": lambda x: x * torch.normal(0.0, 1.0, (8,)),
    "strides": lambda x: x + torch.empty_strided((8,), (1,)).zero_(),
    "rotary frequencies": lambda x: x / 10000 ** (torch.arange(0, 16, 2).to(x.device, torch.float) / 16),
}


@functools.cache
def process(target: str = "cuda:h100") -> TargetProcess:
    """One process for each target; it lives as long as the tests."""
    found = TargetProcess(target)
    atexit.register(found.close)
    return found


def _shared(target: str) -> SimpleNamespace:
    """The process that there is; who is done with it does not end it."""
    return SimpleNamespace(call=process(target).call, close=lambda: None)


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """``explain`` and ``calibrate`` ask the process of the tests instead of starting theirs, which takes seconds."""
    with (
        mock.patch("amp_fx.instruments.calibration.calibrating.TargetProcess", _shared),
        mock.patch("amp_fx.instruments.reports.explaining.TargetProcess", _shared),
    ):
        yield


def facts(graphs: Sequence[TracedGraph], options: dict[str, Any] | None, target: str = "cuda:h100") -> Facts:
    return process(target).call("support.programs.target_process:compiled", graphs, options)


def traced(program: Callable[..., Any], *args: Tensor, **settings: Any) -> list[TracedGraph]:
    """The graphs of a call as Dynamo makes them on the CPU; ``settings`` are those of ``torch.compile``."""
    torch._dynamo.reset()
    tracer = Tracer()
    torch.compile(program, backend=tracer, **settings)(*args)
    return tracer.graphs


def trace_case(case: Case, mode: str, **settings: Any) -> list[TracedGraph]:
    """A case of the zoo as Dynamo makes it on the CPU; ``settings`` are those of ``torch.compile``."""
    torch._dynamo.reset()
    tracer = Tracer()
    model = copy.deepcopy(case.model).train(mode == "train")
    # a float that is an input of the graph has its value in Dynamo's fake tensor alone
    dynamo = torch._dynamo.config.patch(specialize_float=True, **case.dynamo)
    for part in case.parts:
        model.set_submodule(part, torch.compile(model.get_submodule(part), backend=tracer, **settings))  # pyright: ignore[reportArgumentType]
    run = model if case.parts else torch.compile(model, backend=tracer, **settings)
    with dynamo, torch.set_grad_enabled(mode == "train"):
        case.run(run, case.inputs(0))  # pyright: ignore[reportArgumentType]
    return tracer.graphs


@dataclass(frozen=True)
class Facts:
    """What a program became on a target."""

    counts: Counts  # of all kernels, forward and backward
    forward: Counts
    #: for each kernel that only casts, what it casts: "input", "result" (or the gradient of one), "gradient" (of a
    #: parameter or an input) or "activation" (anything else)
    casts: tuple[str, ...]
    #: saved 16-bit values whose widened copy is a result of the program. Where the copy is saved instead, nothing is
    #: counted, as the program holds it anyway
    result_saved_bytes: int
    wide: tuple[str, ...]  # matmuls that return fp32: "gradient", "result" or something else
    rounded: int  # gradients that leave a matmul in 16 bits and are widened


def arm(options: dict[str, Any] | None, dtype: torch.dtype = torch.bfloat16) -> Backend:
    """The backend amp_fx, or stock Inductor under autocast to ``dtype`` without options."""

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        if options is not None:
            return amp_fx(gm, inputs, options=options)
        with torch.autocast("cuda", dtype):
            return stock_inductor(gm, inputs)

    return backend


def counted(workload: str, arm: str) -> Row:
    """Runs in the process. What a training step of a workload of the benchmarks costs in one of their arms."""
    return counts.count(make(workload), ARMS[arm], "training", "cuda:h100")[0]


def count(arguments: Sequence[str]) -> tuple[str, str]:
    """Runs in the process. The command of the counts: what it prints, and its messages."""
    out, messages = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(messages):
        assert counts.main(arguments) == 0
    return out.getvalue(), messages.getvalue()


def compiled(graphs: Sequence[TracedGraph], options: dict[str, Any] | None) -> Facts:
    """Runs in the process. Compiles for an :func:`arm`."""
    return _facts(graphs, arm(options))


def compiled_at_equal_results(graphs: Sequence[TracedGraph]) -> Facts:
    """Runs in the process. Compiles with the casts of autocast to bf16, and results in the dtypes of the program."""
    return _facts(graphs, autocast_backend(None))


def _facts(graphs: Sequence[TracedGraph], backend: Backend) -> Facts:
    counter = Counter()
    rates_of_a_gpu = {"get_gpu_dram_gbps": lambda: 3e3, "get_device_tflops": lambda _: 1e3}
    with mock.patch.multiple("torch._inductor.scheduler", **rates_of_a_gpu):
        for graph in graphs:
            compile_graph(graph, backend, counter.inner_compile)
    casts, wide, saved, rounded = list[str](), list[str](), 0, 0
    for kind, graph in counter.graphs:
        casts += [_what(kind, cast) for calls, _ in cast_kernels(graph) for cast in list(calls)[:1]]
        wide += [_what(kind, node) for node in _calls(graph.after, _WIDE)]
        if kind == "forward":
            results = program_outputs(graph.before)
            low = {storage_of(node.all_input_nodes[0]) for node in results if node.target is _CAST}
            kept = [node for node in graph.before.graph.output_node().all_input_nodes if node not in results]
            values = {storage: node.meta["val"] for node in kept if (storage := storage_of(node)) in low}
            saved += sum(size_hint(value.untyped_storage().nbytes()) for value in values.values())
        elif kind == "backward":
            rounded += sum(map(_is_rounded, _calls(graph.after, _MATMULS)))
    return Facts(counter.total, counter.forward, tuple(casts), saved, tuple(wide), rounded)


def threads(graphs: Sequence[TracedGraph]) -> list[str]:
    """Runs in the process. The threads that the compiled forward and backward of the graphs run in."""
    counter, names = Counter(), list[str]()

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **options: Any) -> Any:
        call = counter.inner_compile(gm, example_inputs, **options)

        def run(args: list[Any]) -> Any:
            names.append(threading.current_thread().name)
            return call(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it
        return run

    for graph in graphs:
        compile_graph(graph, stock_inductor, inner_compile)
    return names


_WIDE = (aten.mm.dtype, aten.bmm.dtype, aten.addmm.dtype)
_MATMULS = (aten.mm.default, aten.bmm.default, aten.addmm.default)
_CAST = torch.ops.prims.convert_element_type.default
_VIEWS = (aten.permute.default, aten.view.default, aten.reshape.default, aten.expand.default)


def _calls(gm: fx.GraphModule, targets: Sequence[Any]) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target in targets]


def _what(kind: str, node: fx.Node) -> str:
    source = node
    while source.op == "call_function" and len(source.all_input_nodes) == 1:
        source = source.all_input_nodes[0]
    if source.op == "placeholder":
        return "result" if source.name.startswith("tangents") else "input"
    if _only_leaves(node):
        return "gradient" if kind == "backward" else "result"
    return "activation"


def _only_leaves(node: fx.Node) -> bool:
    """True where a value, or a view of it, is returned and not read otherwise."""
    return all(user.op == "output" or (user.target in _VIEWS and _only_leaves(user)) for user in node.users)


def _is_rounded(node: fx.Node) -> bool:
    readers = list(node.users)
    for reader in readers:
        readers += list(reader.users) if reader.target in _VIEWS else []
    casts = [r for r in readers if r.target is _CAST]
    return any(cast.meta["val"].dtype is torch.float32 and _only_leaves(cast) for cast in casts)


def fail(message: str) -> None:
    raise AmpFxError(message)


def die() -> None:
    """Ends the process in the way that a C++ assertion does, but with a code of its own."""
    os.write(2, b"what C++ wrote\n")
    os._exit(3)
