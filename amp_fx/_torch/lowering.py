"""Inductor's work on one graph up to fusion, where kernels and bytes are known."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor
from torch._guards import TracingContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from amp_fx._torch.tracing import onednn_computes

__all__ = ["Lowered", "OpByOp", "lower_with_inductor"]

_aten = torch.ops.aten
_PRODUCTS = {
    *(_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default),
    *(_aten.convolution.default, _aten.convolution_backward.default, _aten.mkldnn_rnn_layer.default),
}


@dataclass(frozen=True)
class Lowered:
    """A graph as Inductor would compile it, without any generated code."""

    #: the graph as Inductor got it, with fake values, and after Inductor's post-grad passes
    before: fx.GraphModule
    after: fx.GraphModule
    #: Inductor's estimate of the bytes that its kernels read and write
    bytes_moved: int
    #: calls of library kernels
    extern_kernels: int
    #: the kernels that Inductor would generate: the ATen calls that each computes, the bytes that it reads and writes
    generated: list[tuple[frozenset[fx.Node], int]]
    #: runs ``before`` op by op; takes its arguments in one list
    call: Callable[..., Any]


def lower_with_inductor(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    is_inference: bool = False,
    is_backward: bool = False,
    get_decomp_fn: Callable[..., Any] | None = None,
    **_: Any,
) -> Lowered:
    """The first half of ``compile_fx_inner``; other keywords, which are about running the code, are ignored."""
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import MultiOutput
    from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode
    from torch._inductor.virtualized import V

    decompositions: dict[str, Any] = {} if get_decomp_fn is None else {"get_decomp_fn": get_decomp_fn}
    shape_env = compile_fx.shape_env_from_inputs(list(example_inputs))
    compile_fx.view_to_reshape(gm)
    with torch.no_grad():
        fake_mode = compile_fx.fake_tensor_prop(gm, example_inputs)
    compile_fx._recursive_record_original_output_strides(gm)
    # the passes change gm in place, and put lowerings in it that only Inductor can run. Constants are shared:
    # under the fake mode that compile_fx sets, a real tensor cannot be copied
    constants = [v for m in gm.modules() for v in (*vars(m).values(), *m.buffers(False))]
    before = copy.deepcopy(gm, {id(v): v for v in constants if isinstance(v, torch.Tensor)})
    # as compile_fx_inner does: lowerings make constants, which are real
    with _disable_current_modes(), V.set_fake_mode(fake_mode), DebugContext():
        compile_fx._recursive_post_grad_passes(gm, is_inference=is_inference)
        graph = GraphLowering(
            gm,
            example_inputs=example_inputs,
            shape_env=shape_env,
            is_inference=is_inference,
            is_backward=is_backward,
            **decompositions,
        )
        graph.freeze_runtime_asserts()
        with V.set_graph_handler(graph), V.set_extern_kernel_nodes([]):
            graph.run(*example_inputs)
            _report_output_strides(graph)
            # fusion asks for it; generating the code would set it up, too
            graph.init_wrapper_code()
            graph._update_scheduler()
            # not count_bytes(): where a GPU is, it estimates times, too, and fails at a bmm that returns fp32
            moved = sum(int(node.get_read_write_buffers_sizes()) for node in graph.scheduler.nodes)
            kernels = [node for node in graph.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)]
            extern = [node for node in kernels if isinstance(node, ExternKernelSchedulerNode)]
            fused = [node for node in kernels if not isinstance(node, ExternKernelSchedulerNode)]
            generated = [(_origins(kernel), int(kernel.get_read_write_buffers_sizes())) for kernel in fused]
    return Lowered(
        before=before,
        after=gm,
        bytes_moved=moved,
        # a MultiOutput picks one result of a kernel that returns several
        extern_kernels=sum(not isinstance(node.node, MultiOutput) for node in extern),
        generated=generated,
        call=make_boxed_func(lambda *args: OpByOp(before).run(*args)),
    )


class OpByOp(fx.Interpreter):
    """Runs a graph; products of 16 bits in fp32, rounded once, where the CPU has no instructions for them.

    PyTorch has loops for these that take a hundred times as long, and add up in fp32 as well.
    """

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Overrides :meth:`torch.fx.Interpreter.call_function`."""
        if target not in _PRODUCTS or not _is_emulated(args[0]):
            return super().call_function(target, args, kwargs)
        low, wide = args[0].dtype, tree_map_only(Tensor, Tensor.float, args)
        results = super().call_function(target, wide, kwargs)
        return tree_map_only(
            Tensor, lambda value: value.to(low) if value.is_floating_point() else value, results
        )


def _is_emulated(value: Tensor) -> bool:
    is_low = value.device.type == "cpu" and value.dtype in (torch.bfloat16, torch.float16)
    return is_low and not onednn_computes(value.dtype)


def _origins(kernel: Any) -> frozenset[fx.Node]:
    return frozenset[fx.Node]().union(*(part.node.origins for part in kernel.get_nodes() if part.node))


def _report_output_strides(graph: Any) -> None:
    """Tells AOTAutograd the layouts that Inductor chose, which the backward graph is then compiled for."""
    context = TracingContext.try_get()
    if context is None or context.output_strides is None:
        return
    for output in graph.graph_outputs or ():
        has_layout = hasattr(output, "has_tensor_output") and output.has_tensor_output()
        context.output_strides.append(
            tuple(graph.sizevars.optimization_hint(s) for s in output.get_stride()) if has_layout else None
        )
