"""Triton code that Inductor generates for a target, and its machine code: what tests run in a target's process."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch.fx as fx

from amp_fx._torch import lower_with_inductor
from amp_fx.backend import amp_fx
from amp_fx.targets._torch import pretended
from amp_fx.targets.compiling import compile_graph
from amp_fx.targets.tracing import TracedGraph

__all__ = ["cubins", "sources"]

#: in generated code: name = async_compile.triton('name', '''...''', ...)
_KERNEL = re.compile(r"(triton_\w+) = async_compile\.triton\('\w+', '''\n(.*?)'''", re.DOTALL)


def sources(graphs: Sequence[TracedGraph], options: dict[str, Any]) -> list[str]:
    """Python code of every forward and backward graph, as Inductor would load it."""
    found: list[str] = []

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        from torch._inductor.graph import GraphLowering

        count_bytes = GraphLowering.count_bytes

        def count_and_generate(self: GraphLowering) -> Any:
            counted = count_bytes(self)
            self.wrapper_code.push_codegened_graph(self)
            self.scheduler.codegen()
            code, _ = self.wrapper_code.generate(self.is_inference)
            found.append(str(getattr(code, "value", code)))
            return counted

        # counting comes after fusion, which is where code generation begins
        with mock.patch.object(GraphLowering, "count_bytes", count_and_generate):
            return lower_with_inductor(gm, example_inputs, **kwargs).call

    for graph in graphs:
        compile_graph(graph, lambda gm, inputs: amp_fx(gm, inputs, options=options), inner_compile)
    return found


def cubins(codes: Sequence[str], architectures: Sequence[int]) -> dict[str, dict[int, int]]:
    """Bytes of machine code for each kernel and architecture, 90 for sm_90; kernels that differ by name are one."""
    kernels = {body.replace(name, "kernel"): name for code in codes for name, body in _KERNEL.findall(code)}
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
