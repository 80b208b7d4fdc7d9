"""What Inductor generates for a target: Triton code, its machine code, copies with scales; runs in its process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.fx as fx

from amp_fx._torch import FakeTensorMode, lower_with_inductor
from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.keys import CUSTOM, LEVEL, MARK
from amp_fx.instruments.targets._torch import compile_contexts, pretended
from amp_fx.instruments.targets.tracing import TracedGraph, compile_graph
from amp_fx.passes import PassContext
from amp_fx.passes.levels.quantise_matmuls import QuantiseMatmuls
from amp_fx.precision.policy.levels import LEVELS
from support.programs.target_process import arm

aten, prims = torch.ops.aten, torch.ops.prims

#: in generated code: name = async_compile.triton('name', '''...''', ...)
_KERNEL = re.compile(r"(triton_\w+) = async_compile\.triton\('\w+', '''\n(.*?)'''", re.DOTALL)


@dataclass(frozen=True)
class Code:
    """One graph, forward or backward, as Inductor would load it."""

    text: str  # a module with a function ``call`` that takes its arguments in one list
    inputs: tuple[str, ...]  # names, as AOTAutograd gave them
    kinds: tuple[tuple[tuple[int, ...], torch.dtype], ...]  # shape and dtype of each input
    outputs: tuple[str | None, ...]  # the backward reads what has the same name in the forward


def sources(graphs: Sequence[TracedGraph], options: Any, dtype: torch.dtype = torch.bfloat16) -> list[Code]:
    """Code of every forward and backward graph, in order; as `target_process.compiled`, with stock autocast as None."""
    found: list[Code] = []

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        code, call = _generated(gm, example_inputs, **kwargs)
        found.append(code)
        return call

    for graph in graphs:
        compile_graph(graph, arm(options, dtype), inner_compile)
    return found


def _generated(gm: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> tuple[Code, Callable[..., Any]]:
    """The code of a graph after partitioning, and what runs it op by op."""
    from torch._inductor.graph import GraphLowering

    fuse, texts = GraphLowering._update_scheduler, list[str]()

    def fuse_and_generate(self: GraphLowering) -> None:
        fuse(self)
        self.wrapper_code.push_codegened_graph(self)
        self.scheduler.codegen()
        code, _ = self.wrapper_code.generate(self.is_inference)
        texts.append(str(getattr(code, "value", code)))

    with mock.patch.object(GraphLowering, "_update_scheduler", fuse_and_generate):
        lowered = lower_with_inductor(gm, inputs, **kwargs)
    graph = lowered.before.graph
    placeholders = graph.find_nodes(op="placeholder")
    kinds = tuple((tuple(node.meta["val"].shape), node.meta["val"].dtype) for node in placeholders)
    outputs = tuple(value and value.name for value in graph.output_node().args[0])  # type: ignore[union-attr]
    return Code(texts[0], tuple(node.name for node in placeholders), kinds, outputs), lowered.call


def cubins(codes: Sequence[Code], architectures: Sequence[int]) -> dict[str, dict[int, int]]:
    """Bytes of machine code for each kernel and architecture, 90 for sm_90; kernels that differ by name are one."""
    found = [kernel for code in codes for kernel in _KERNEL.findall(code.text)]
    kernels = {body.replace(name, "kernel"): name for name, body in found}
    with pretended():
        return {name: _compiled(name, body, architectures) for body, name in kernels.items()}


def _compiled(name: str, body: str, architectures: Sequence[int]) -> dict[int, int]:
    import triton
    from torch._inductor.codecache import PyCodeCache
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tuner = PyCodeCache.load(body).kernel
    config, meta = tuner.configs[0], tuner.triton_meta
    constants = {**meta["constants"], **config.kwargs}
    for setting in ("num_warps", "num_stages"):
        if setting in tuner.fn.arg_names:
            constants[setting] = getattr(config, setting)
    signature = {**meta["signature"], **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(tuner.fn, signature, constants, attrs=meta["configs"][0])
    settings = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return {
        architecture: len(triton.compile(source, GPUTarget("cuda", architecture, 32), settings).asm["cubin"])
        for architecture in architectures
    }


# ---- copies with scales ----


def _product(rows: int, columns: int, dtype: torch.dtype, read: str) -> tuple[fx.GraphModule, list[Any]]:
    """(graph, fake input) of a matrix times itself: operands are its ``"rows"``, its ``"columns"``, or one each."""
    graph = fx.Graph()

    def add(target: object, *args: object) -> fx.Node:
        node = graph.call_function(target, args)  # type: ignore[arg-type]  # an operator
        node.meta["val"] = run_fake(node)
        return node

    matrix = source = graph.placeholder("x")
    source.meta["val"] = torch.empty(rows, columns, dtype=dtype, device="cuda")
    if dtype is torch.float32:
        matrix = add(prims.convert_element_type.default, source, torch.bfloat16)
    turned = add(aten.permute.default, matrix, [1, 0])
    operands = {"rows": (matrix, turned), "columns": (turned, matrix), "both": (matrix, matrix)}[read]
    graph.output((add(aten.mm.default, *operands),))
    return fx.GraphModule({}, graph), [source.meta["val"]]


def copy_costs(level: str, rows: int, columns: int, dtype: torch.dtype, read: str) -> tuple[int, int]:
    """(kernels, bytes that they read and write) of the copy that a matrix times itself reads."""
    with pretended(), FakeTensorMode() as mode, compile_contexts(mode, "0/0"):
        gm, inputs = _product(rows, columns, dtype, read)
        (matmul,) = gm.graph.find_nodes(op="call_function", target=aten.mm.default)
        matmul.meta[CUSTOM] = {MARK: "mm"}
        matmul.meta[LEVEL] = (LEVELS[level], LEVELS[level].kernels[0], None, ())
        QuantiseMatmuls().call(gm, PassContext())
        gm.recompile()
        lowered = lower_with_inductor(gm, inputs, is_inference=True)
    return len(lowered.generated), sum(size for _, size in lowered.generated)
