"""Graphs for tests: captured, rewritten on CPU or on fake CUDA tensors, and run op by op."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

import amp_fx.compiler.compiling
import amp_fx.compiler.rewriting
from amp_fx import Calibration, Point
from amp_fx._torch import OpByOp, autocast_disabled, enable_autocast, replace_inner_compile
from amp_fx.compiler.settings import Options
from amp_fx.graphs.capture import capture
from amp_fx.graphs.regions import ambient_regions
from amp_fx.graphs.values import graph_devices
from amp_fx.passes import Pass, PassContext, PassSelection, captured_passes, run_passes
from amp_fx.precision.plans.plan import NodePlan, Plan, dtype_name

Program = Callable[..., Any]

#: graphs here are far too small to gain anything from low precision, so no device profile may decide
DEFAULTS: Mapping[str, Any] = {"profile": "off", "strict": True}

#: the passes on a captured graph where nothing is given
PIPELINE = captured_passes(PassSelection())

_SHORT = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

PLACED = {torch.float32, torch.bfloat16, torch.float16}


class Block(nn.Module):
    """A norm, two linears and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@dataclass(frozen=True)
class Rewritten:
    """What became of a program."""

    gm: fx.GraphModule
    plan: Plan
    outputs: Any = None  # of the rewritten graph when it ran eagerly; None on fake CUDA

    def one(self, op: str) -> NodePlan:
        """The plan of the only call of an op."""
        found = plans(self.plan, op)
        assert len(found) == 1, f"{op}: {[row.name for row in found]}"
        return found[0]

    def dtypes(self, op: str) -> list[str]:
        """The dtypes in which an op runs, in graph order."""
        return [dtype_name(row.dtype) if row.dtype else "none" for row in plans(self.plan, op)]


def calls_text(gm: fx.GraphModule) -> str:
    """The calls of a graph in order: op, overload, and the dtype of the result."""
    found: list[str] = []
    for node in gm.graph.nodes:
        if node.op == "call_function":
            name = str(node.target).removesuffix(".default").split(".", 1)[-1]
            dtype = node.meta["val"].dtype
            found.append(f"{name.replace('convert_element_type', 'convert')}:{_SHORT.get(dtype, dtype)}")
    return ", ".join(found)


def dynamo_graph(
    program: Program, *args: Any, ambient: torch.dtype | None = None, dynamic: bool | None = None
) -> fx.GraphModule:
    """The graph that Dynamo hands to a backend."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    with autocast_in(ambient):
        torch.compile(program, backend=keep, fullgraph=True, dynamic=dynamic)(*args)
    assert len(graphs) == 1
    return graphs[0]


def on_cuda(gm: fx.GraphModule) -> fx.GraphModule:
    """The same Dynamo graph on fake CUDA tensors, which exist on any machine. Static shapes only."""
    cpu, cuda = ("cpu", torch.device("cpu")), torch.device("cuda")
    moved = copy.copy(gm)
    moved.graph = fx.Graph()
    output = moved.graph.graph_copy(gm.graph, {})
    moved.graph.output(output)
    with FakeTensorMode():
        for node, original in zip(moved.graph.nodes, gm.graph.nodes, strict=True):
            node.meta = dict(original.meta)
            node._rename(original.name)
            value = original.meta.get("example_value")
            if node.op == "placeholder" and isinstance(value, Tensor):
                # no requires_grad: autograd's metadata asks for the device, fake or not
                fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
                is_parameter = isinstance(value, nn.Parameter)
                node.meta["example_value"] = nn.Parameter(fake, False) if is_parameter else fake
            node.args, node.kwargs = tree_map(lambda v: cuda if v in cpu else v, (node.args, node.kwargs))
    return fx.GraphModule(gm, moved.graph)


def captured(
    program: Program,
    *args: Any,
    device: str = "cpu",
    low: torch.dtype = torch.bfloat16,
    ambient: torch.dtype | None = None,
    dynamic: bool | None = None,
) -> fx.GraphModule:
    """The program as pre-dispatch ATen, before any pass."""
    gm = dynamo_graph(program, *args, ambient=ambient, dynamic=dynamic)
    gm = on_cuda(gm) if device == "cuda" else gm
    with autocast_in(ambient, device):
        return capture(gm, ambient_regions({device: low}))


def run_until(last: type[Pass], program: Program, *args: Any, **how: Any) -> Rewritten:
    """Runs the pipeline up to and including one pass, on a graph that is captured so, under ``options``."""
    opts = Options.parse(None, how.pop("options", None))
    gm = captured(program, *args, low=opts.low_dtype("cpu"), **how)
    stop = [type(step) for step in PIPELINE].index(last)
    plan = run_passes(gm, PIPELINE[: stop + 1], PassContext(opts.policy, opts.numerics))
    return Rewritten(gm, plan)


def rewrite(
    program: Program,
    *args: Any,
    device: str = "cpu",
    options: Mapping[str, Any] | None = None,
    ambient: torch.dtype | None = None,
    dynamic: bool | None = None,
) -> Rewritten:
    """Rewrites the program as the backend does, and runs the result eagerly where it is on CPU."""
    opts = Options.parse(None, {**DEFAULTS, **(options or {})})
    if device == "cuda":
        gm = on_cuda(dynamo_graph(program, *args))
        with autocast_in(ambient, device):
            return Rewritten(*amp_fx.compiler.rewriting.rewrite(gm, _regions(gm, opts), opts))
    results: list[tuple[fx.GraphModule, Plan]] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        rewritten, plan = amp_fx.compiler.rewriting.rewrite(gm, _regions(gm, opts), opts)
        results.append((rewritten, plan))

        def run(*given: Any) -> Any:
            with autocast_disabled():
                return rewritten(*given)

        return run

    try:
        with autocast_in(ambient):
            outputs = torch.compile(program, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    except BackendCompilerFailed as error:
        raise error.inner_exception from None
    assert len(results) == 1
    return Rewritten(*results[0], outputs)


@contextlib.contextmanager
def without_inductor() -> Iterator[None]:
    """The backend hands its graphs to AOTAutograd, which runs them op by op, instead of to Inductor."""

    def compile_with_aot(
        gm: fx.GraphModule, example_inputs: Sequence[Any], config_patches: Mapping[str, Any]
    ) -> Callable[..., Any]:
        return aot_eager(gm, list(example_inputs))

    with mock.patch.object(amp_fx.compiler.compiling, "compile_with_inductor", compile_with_aot):
        yield


@contextlib.contextmanager
def op_by_op(prepare: Callable[[fx.GraphModule], object] = id) -> Iterator[list[fx.GraphModule]]:
    """Inductor runs its passes on joint graphs, ours among them, and partitions; what comes out runs op by op.

    Yields these graphs, forward before backward; ``prepare`` changes the copy of a graph that runs.
    """
    graphs: list[fx.GraphModule] = []

    def inner_compile(gm: fx.GraphModule, _: Sequence[Any], **__: Any) -> Callable[..., Any]:
        # not what it holds: packed weights cannot be copied
        run = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        prepare(run)
        graphs.append(gm)

        def call(args: list[Any]) -> Any:
            return OpByOp(run).run(*args)

        call._boxed_call = True  # type: ignore[attr-defined]  # AOTAutograd asks for it
        return call

    with replace_inner_compile(inner_compile):
        yield graphs


def casts_of(gm: fx.GraphModule) -> dict[tuple[str, str], int]:
    """Conversions among fp32 and the low dtypes, by (from, to), counted in the graph itself."""
    found: Counter[tuple[str, str]] = Counter()
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.to.dtype):
            before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype
            if {before, after} <= PLACED and before is not after:
                found[dtype_name(before), dtype_name(after)] += 1
    return dict(found)


def plans(plan: Plan, op: str) -> list[NodePlan]:
    """The plans of an op's calls, ``"softmax"`` or ``"softmax.int"``."""
    return [row for row in plan.nodes if op in (row.op, row.op.partition(".")[0])]


def low_calls(plans: Sequence[Plan]) -> list[str]:
    """The calls in the low dtype."""
    return [row.name for plan in plans for row in plan.nodes if row.dtype is row.low is not None]


def known(cal: Calibration, name: str) -> Point:
    """A placement that has a name: ``"autocast"``."""
    return next(point for point in cal.frontier() if point.name == name)


def _regions(gm: fx.GraphModule, opts: Options) -> Mapping[str, Any]:
    return ambient_regions({device: opts.low_dtype(device) for device in graph_devices(gm)})


def autocast_in(dtype: torch.dtype | None, device: str = "cpu") -> contextlib.AbstractContextManager[Any]:
    """Autocast in a dtype, on a device that need not exist; of None, nothing."""
    if dtype is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype) if device == "cpu" else enable_autocast(device, True, dtype)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """The program's default dtype is another one inside."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
