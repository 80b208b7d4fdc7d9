"""Every private PyTorch API that amp_fx touches, in one place.

Tried on torch 2.11.0, 2.12.1, 2.13.0, 2.14.1 and 2.15.0. A torch upgrade is this file's work: nothing else in the
package imports from ``torch._*``. Where a name is private only by its underscore but documented or used by other
projects (``compile_fx``, ``CustomGraphPass``), the comment says so.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import operator
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, ModuleType
from typing import Any, Literal, Protocol
from unittest import mock

import torch
import torch.fx as fx
from torch._C._autograd import (
    _get_current_graph_task_keep_graph,
    _saved_tensors_hooks_is_enabled,  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
)
from torch._C._functorch import is_functorch_wrapped_tensor, peek_interpreter_stack
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo import callback_handler as _callback_handler
from torch._dynamo import compiled_autograd as _compiled_autograd
from torch._dynamo import config as _dynamo_config
from torch._dynamo.utils import counters as _dynamo_counters
from torch._functorch import config as _functorch_config
from torch._guards import CompileContext, TracingContext, detect_fake_mode
from torch._logging import trace_structured as _trace_structured
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

__all__ = [
    "CompiledBackward",
    "DynamoWatch",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "JointRoles",
    "LeftOut",
    "Lifting",
    "Lowered",
    "OpOverload",
    "RunningBackward",
    "accumulated",
    "at_end_of_backward",
    "autocast_disabled",
    "autocast_shield",
    "breaks_without_graph",
    "compile_id",
    "compile_package",
    "compile_with_inductor",
    "compiles_plain_code",
    "disable_proxy_modes_tracing",
    "enable_autocast",
    "find_nonfinite_",
    "get_proxy_mode",
    "graph_break",
    "graph_pass",
    "graph_task",
    "has_autocast_rule",
    "has_low_lstm",
    "has_node_hooks",
    "ignore_fresh_symbols",
    "in_compiled_autograd",
    "in_nested_transform",
    "inductor_mode_options",
    "inductor_option_names",
    "is_functorch_wrapped",
    "is_hooks_switch",
    "is_left_out_in_place",
    "is_looked_up",
    "is_wrapper",
    "joint_roles",
    "largest_magnitudes",
    "lays_out_convolutions",
    "log_artifact",
    "lower_with_inductor",
    "make_fx",
    "nesting_change",
    "observe_freezing",
    "on_dynamo_compile",
    "packed_memory",
    "program_outputs",
    "replace_inner_compile",
    "rest_left_out",
    "running_backward",
    "saved_tensors_shield",
    "size_hint",
    "source_hash",
    "stock_inductor",
    "symbolic_kernels",
    "track_tensor_tree",
    "tunes_kernels",
    "unwrapped_errors",
    "update_scale",
    "will_run",
    "wrapped_tensors",
]

_log = logging.getLogger(__name__)

_freezing = threading.RLock()

#: functorch levels are opened and closed by these calls in a Dynamo graph (torch/_functorch/predispatch.py)
_NESTING = {"_increment_nesting": 1, "_decrement_nesting": -1, "_enter_dual_level": 1, "_exit_dual_level": -1}

#: marks inputs that were packed constants
_LIFTED = "amp_fx_lifted"

#: of all elements of a frozen graph's constants, those that folding may add
_EXPANDED = 1 / 32

#: a device type no graph of ours runs on: see autocast_shield
_UNUSED_DEVICE = "xla"


def autocast_disabled() -> contextlib.AbstractContextManager[None]:
    """Switches autocast off for every device type."""
    return torch._C._DisableAutocast()


@contextlib.contextmanager
def autocast_shield() -> Iterator[None]:
    """Compiles with autocast off, so that the result also *runs* with autocast off, forward and backward.

    AOTAutograd wraps its compiled callables in ``_DisableAutocast`` only if some autocast was on when it
    compiled (``_is_any_autocast_enabled`` in ``graph_compile.py``). A graph whose casts are explicit must
    never meet autocast again at run time (pytorch#194329: fallback kernels then return garbage), so autocast
    is switched on for a device type that no tensor here lives on: nothing is cast while tracing, and the
    run-time guard is in place.
    """
    with autocast_disabled():
        torch.set_autocast_enabled(_UNUSED_DEVICE, True)
        try:
            yield
        finally:
            torch.set_autocast_enabled(_UNUSED_DEVICE, False)


@contextlib.contextmanager
def saved_tensors_shield() -> Iterator[None]:
    """Keeps what a trace saves for backward from the program's saved-tensor hooks.

    A graph may be compiled while they are active, within ``torch.utils.checkpoint`` for one, which counts what its
    hooks see: tensors saved by a trace would be missing when the region is computed again.
    """
    if not _saved_tensors_hooks_is_enabled():
        # the program forbids hooks, so there are none to keep away
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
        yield


@contextlib.contextmanager
def enable_autocast(device_type: str, enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """Sets autocast's thread-local state for one device type, without the device having to exist.

    ``torch.autocast("cuda")`` switches itself off on a machine without CUDA, which would make the CUDA lists
    untestable there; the state underneath has no such check.
    """
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


def compile_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config_patches: dict[str, Any]
) -> Callable[..., Any]:
    """Compiles with Inductor; the backward is traced without autocast.

    Stock torch.compile traces the backward under the forward's ambient autocast, which silently overflows in
    fp16 (pytorch#153044); ``backward_pass_autocast="off"`` is part of AOTAutograd's cache key.
    """
    # imported late: Inductor's import costs over a second, and a plain `import amp_fx` should not
    from torch._inductor.compile_fx import compile_fx

    with _functorch_config.patch(backward_pass_autocast="off"):
        # typed as what it returns to AOTInductor, too
        return compile_fx(gm, list(example_inputs), config_patches=config_patches)  # type: ignore[return-value]


class Lifting(Protocol):
    """Which constants of a frozen graph are inputs of the compiled one instead, and what they are in each call."""

    def choose(self, gm: fx.GraphModule) -> Sequence[Sequence[fx.Node]]:
        """The ``get_attr`` nodes of each of these constants."""
        ...

    @property
    def values(self) -> Callable[[], Sequence[torch.Tensor]]:
        """Returns the constants of the call that is going on in this thread. Kept as long as the compiled graph."""
        ...


@contextlib.contextmanager
def observe_freezing(
    folded: Callable[[fx.GraphModule, fx.Node, torch.Tensor], None], lifting: Lifting
) -> Iterator[None]:
    """Tells what Inductor's freezing computes inside the block, in whichever thread, and lifts constants.

    What has more elements than what it is computed from, as embeddings that are expanded to a batch, is folded up to
    :data:`_EXPANDED` of all elements: each batch size has constants of its own.

    Args:
        folded: called before a node of a graph is replaced by a constant, with the graph, the node and the constant.
        lifting: is asked once for each frozen graph.
    """
    from torch._inductor import compile_fx, constant_folding, freezing

    # what is replaced is put back at the end, so blocks of two threads must not overlap
    with _freezing:
        replace = constant_folding.replace_node_with_constant
        compile_frozen = compile_fx.fw_compiler_freezing

        def replace_node_with_constant(
            gm: fx.GraphModule, node: fx.Node, constant: torch.Tensor | None = None, name: str | None = None
        ) -> None:
            if constant is not None:
                folded(gm, node, constant)
            replace(gm, node, constant, name)

        def fw_compiler_freezing(*args: Any, inner_compile: Callable[..., Any], **kwargs: Any) -> Any:
            return compile_frozen(*args, inner_compile=_lifted(inner_compile, lifting), **kwargs)

        class Folder(constant_folding.ConstantFolder):
            def __init__(self, gm: fx.GraphModule, *args: Any, **kwargs: Any) -> None:
                super().__init__(gm, *args, **kwargs)
                self._at: fx.Node | None = None
                self._sources: dict[fx.Node, frozenset[fx.Node]] = {}
                self._left = sum(map(self._elements, gm.graph.find_nodes(op="get_attr"))) * _EXPANDED

            def run_node(self, node: fx.Node) -> Any:
                inputs = [self._sources.get(arg, frozenset()) for arg in node.all_input_nodes]
                self._sources[node] = frozenset({node} if node.op == "get_attr" else ()).union(*inputs)
                self._at = node
                return super().run_node(node)

            def insertable_tensor_check(self, tensor: torch.Tensor) -> bool:
                if self._at is None:
                    raise AssertionError("asked between two nodes")
                more = tensor.numel() - sum(map(self._elements, self._sources[self._at]))
                if more > self._left:
                    return False
                self._left -= max(more, 0)
                return True

            def _elements(self, node: fx.Node) -> int:
                value = self.fetch_attr(str(node.target))
                return value.numel() if isinstance(value, torch.Tensor) else 0

        with (
            mock.patch.object(constant_folding, "ConstantFolder", Folder),
            mock.patch.object(constant_folding, "replace_node_with_constant", replace_node_with_constant),
            mock.patch.object(freezing, "replace_node_with_constant", replace_node_with_constant),
            mock.patch.object(compile_fx, "fw_compiler_freezing", fw_compiler_freezing),
        ):
            yield


def _lifted(inner_compile: Callable[..., Any], lifting: Lifting) -> Callable[..., Any]:
    """An ``inner_compile`` whose result gets the chosen constants as inputs, after all others."""
    from torch._inductor import config

    def compile_lifted(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        chosen = lifting.choose(gm)
        if not chosen:
            return inner_compile(gm, example_inputs, **kwargs)
        with detect_fake_mode(example_inputs) or FakeTensorMode():
            examples = [*example_inputs, *(_lift(gm, nodes) for nodes in chosen)]
        static = [*kwargs.pop("static_input_idxs", ()), *range(len(example_inputs), len(examples))]
        # tensors that oneDNN has packed have no strides
        with config.patch(size_asserts=False), _constant_to_lowerings(gm):
            compiled = inner_compile(gm, examples, static_input_idxs=static, **kwargs)
        values = lifting.values

        def run(args: list[Any]) -> Any:
            args.extend(values())
            return compiled(args)

        return run

    return compile_lifted


@contextlib.contextmanager
def _constant_to_lowerings(gm: fx.GraphModule) -> Iterator[None]:
    """Inputs of this graph that were constants still count as such where Inductor lowers oneDNN's calls.

    It asserts that packed weights are constants, and reads them only to tune kernels.
    """
    from torch._inductor.graph import GraphLowering

    lifted = {
        node.name: torch.empty(node.meta["val"].shape, dtype=node.meta["val"].dtype, device="meta")
        for node in gm.graph.find_nodes(op="placeholder")
        if node.meta.get(_LIFTED)
    }
    lower = GraphLowering.placeholder

    def placeholder(self: Any, target: Any, *args: Any) -> Any:
        if target in lifted:
            self.constants[target] = lifted[target]
        return lower(self, target, *args)

    with mock.patch.object(GraphLowering, "placeholder", placeholder):
        yield


def _lift(gm: fx.GraphModule, nodes: Sequence[fx.Node]) -> torch.Tensor:
    """Makes one input of some nodes with the same constant; returns its value, under a fake mode a fake one."""
    first = nodes[0]
    constant: torch.Tensor = operator.attrgetter(str(first.target))(gm)
    value = torch.empty(constant.shape, dtype=constant.dtype, device=constant.device)
    # what is packed has no strides, and whoever reads it does not ask for them
    if not constant.is_mkldnn:
        value = torch.empty_strided(
            constant.shape, constant.stride(), dtype=constant.dtype, device=constant.device
        )
    inputs = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(inputs[-1]) if inputs else gm.graph.inserting_before():
        lifted = gm.graph.placeholder(f"{first.name}_lifted")
    lifted.meta = {**first.meta, "val": value, _LIFTED: constant.is_mkldnn}
    for node in nodes:
        node.replace_all_uses_with(lifted)
        gm.graph.erase_node(node)
    gm.recompile()
    return value


def packed_memory(constant: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor that oneDNN has packed."""
    return int(torch.ops.mkldnn.data_ptr(constant)), int(torch.ops.mkldnn._nbytes(constant))


class _Kept(list[Any]):
    """Callbacks of which ``torch.compiler.reset()`` keeps the first."""

    def clear(self) -> None:
        del self[1:]


def on_dynamo_compile(started: Callable[[str], None]) -> None:
    """Calls back, from now on, when Dynamo begins to compile: with the compile id, in the mode of the program's call.

    Call it once.
    """
    from torch._dynamo.callback import callback_handler

    callback_handler.start_callbacks = _Kept(
        [lambda args: started(args.compile_id), *callback_handler.start_callbacks]
    )


def compile_package(ep: torch.export.ExportedProgram, path: str) -> None:
    """Compiles an exported program with AOTInductor into a package at ``path``, which ends in ``.pt2``."""
    import torch._inductor

    with autocast_disabled():
        torch._inductor.aoti_compile_and_package(ep, package_path=path)


def stock_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """What ``torch.compile`` does by itself, to compare with."""
    from torch._inductor.compile_fx import compile_fx

    # typed as what it returns to AOTInductor, too
    return compile_fx(gm, list(example_inputs))  # type: ignore[return-value]


@contextlib.contextmanager
def replace_inner_compile(inner_compile: Callable[..., Callable[..., Any]]) -> Iterator[None]:
    """Whatever compiles with Inductor inside the block hands its graphs to ``inner_compile`` instead.

    It gets what ``compile_fx_inner`` gets: a forward, backward or inference graph after partitioning, its
    inputs, and keywords. It returns a callable that takes its arguments in one list; :attr:`Lowered.call` is
    one. The caches of compiled graphs, which would leave ``inner_compile`` out, are off.
    """
    from torch._inductor import compile_fx as module
    from torch._inductor import config as inductor_config

    original = module.compile_fx

    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        # with config_patches, compile_fx calls itself through the module and passes its inner_compile on
        kwargs.setdefault("inner_compile", inner_compile)
        return original(*args, **kwargs)

    with (
        mock.patch.object(module, "compile_fx", compile_fx),
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        _functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


@dataclass(frozen=True)
class Lowered:
    """A graph as Inductor would compile it, without any generated code.

    Attributes:
        before: the graph as Inductor got it, with fake values; nodes have the names AOTAutograd gave them.
        after: the same after Inductor's post-grad passes.
        bytes_moved: Inductor's estimate of the bytes that its kernels read and write.
        extern_kernels: calls of library kernels.
        generated: the kernels that Inductor would generate, after fusion: the ATen calls that each computes
        and
            the bytes that it reads and writes.
        call: runs ``before`` op by op; takes its arguments in one list.
    """

    before: fx.GraphModule
    after: fx.GraphModule
    bytes_moved: int
    extern_kernels: int
    generated: list[tuple[frozenset[fx.Node], int]]
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
    """Inductor's work on one graph up to and including fusion: the first half of ``compile_fx_inner``.

    The other keywords that ``compile_fx`` passes are about running the code, and are ignored.
    """
    from torch._functorch.aot_autograd import make_boxed_func
    from torch._inductor import compile_fx, scheduler
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.ir import MultiOutput
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
    with V.set_fake_mode(fake_mode), DebugContext():
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
            moved = int(graph.count_bytes()[0])
            generated = [
                (
                    frozenset[fx.Node]().union(
                        *(part.node.origins for part in kernel.get_nodes() if part.node)
                    ),
                    size,
                )
                for kernel in graph.scheduler.nodes
                if not isinstance(
                    kernel, (scheduler.NopKernelSchedulerNode, scheduler.ExternKernelSchedulerNode)
                )
                for size in [int(kernel.get_read_write_buffers_sizes())]
            ]
    kernels = [
        node for node in graph.scheduler.nodes if not isinstance(node, scheduler.NopKernelSchedulerNode)
    ]
    extern = [node for node in kernels if isinstance(node, scheduler.ExternKernelSchedulerNode)]
    return Lowered(
        before=before,
        after=gm,
        bytes_moved=moved,
        # a MultiOutput picks one result of a kernel that returns several
        extern_kernels=sum(not isinstance(node.node, MultiOutput) for node in extern),
        generated=generated,
        call=make_boxed_func(before.forward),
    )


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


def graph_pass(
    stage: Literal["joint", "post_grad"],
    uuid: str,
    rewrite: Callable[[fx.GraphModule], None],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """The Inductor option that runs ``rewrite`` on graphs on their way to code, before the program's own passes.

    Args:
        stage: ``"joint"``, forward and backward together before they are partitioned, or ``"post_grad"``, each by
            itself, after the strides of its outputs were noted.
        uuid: everything the rewriting depends on; part of Inductor's and AOTAutograd's cache keys.
        rewrite: changes the graph in place.
        options: of Inductor, as the program gives them; what they leave out is as Inductor's configuration has it.
    """
    from torch._inductor import config, custom_graph_pass

    name = f"{stage}_custom_pre_pass"
    given = options.get(name, getattr(config, name)) or ()
    others: Sequence[Any] = given if isinstance(given, (list, tuple)) else (given,)
    # from torch 2.12 on, passes after partitioning may ask whether there is a backward
    aware = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", ())
    base: Any = aware if aware and stage == "post_grad" else custom_graph_pass.CustomGraphPass

    class GraphPass(base):
        def __call__(self, graph: fx.Graph, **mode: Any) -> None:
            if graph.owning_module is None:
                raise AssertionError("Inductor runs custom passes on a GraphModule's graph")
            rewrite(graph.owning_module)
            for other in others:
                other(graph, **(mode if isinstance(other, aware) else {}))

        def uuid(self) -> Any:
            # None, for a pass that does not say what it depends on: nothing is cached
            ids = [other.uuid() if hasattr(other, "uuid") else None for other in others]
            return None if None in ids else (uuid, *ids)

    return {name: GraphPass()}


def lays_out_convolutions() -> bool:
    """Whether Inductor, with the options it has now, runs convolutions on a CPU channels last in every call.

    As ``GraphLowering.decide_layout_opt`` has it. Freezing packs the weights once instead.
    """
    from torch._inductor import config

    return (
        config.layout_optimization
        and not config.freezing
        and torch.backends.mkldnn.enabled
        and torch.backends.mkldnn.is_available()
    )


def tunes_kernels() -> bool:
    """Whether Inductor, with the options it has now, chooses among kernels of its own for matmuls."""
    from torch._inductor import config

    return config.max_autotune or config.max_autotune_gemm


@dataclass(frozen=True)
class JointRoles:
    """What the inputs and outputs of a joint graph are.

    Attributes:
        inputs: position among the inputs of the graph that was compiled -> placeholder.
        tangents: the gradients that enter the backward.
        gradients: position of an input that requires a gradient -> positions of the gradient among the outputs,
            several for a tensor subclass. An output is None where the graph computes no gradient.
    """

    inputs: dict[int, fx.Node]
    tangents: list[fx.Node]
    gradients: dict[int, list[int]]


def joint_roles(gm: fx.GraphModule) -> JointRoles | None:
    """Reads AOTAutograd's descriptors; None for a graph that has no backward, or no descriptors."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, TangentAOTInput

    def whole(descriptor: Any) -> Any:
        # the parts of a tensor subclass
        while hasattr(descriptor, "base") and hasattr(descriptor, "attr"):
            descriptor = descriptor.base
        return descriptor

    inputs: dict[int, fx.Node] = {}
    tangents: list[fx.Node] = []
    for node in gm.graph.find_nodes(op="placeholder"):
        descriptor = whole(node.meta.get("desc"))
        if isinstance(descriptor, PlainAOTInput):
            inputs[descriptor.idx] = node
        elif isinstance(descriptor, TangentAOTInput):
            tangents.append(node)
    gradients: dict[int, list[int]] = {}
    for position, output in enumerate(gm.graph.output_node().meta.get("desc") or ()):
        descriptor = whole(output)
        if isinstance(descriptor, GradAOTOutput) and isinstance(descriptor.grad_of, PlainAOTInput):
            gradients.setdefault(descriptor.grad_of.idx, []).append(position)
    return JointRoles(inputs, tangents, gradients) if gradients else None


def program_outputs(forward: fx.GraphModule) -> list[fx.Node]:
    """What a forward graph returns to the program, and not, or not only, to its backward."""
    from torch._functorch._aot_autograd import descriptors

    saved = tuple(kind for name, kind in vars(descriptors).items() if name.startswith("SavedForBackwards"))
    output = forward.graph.output_node()
    described = zip(output.args[0], output.meta.get("desc") or (), strict=False)  # type: ignore[arg-type]  # a list
    return [node for node, what in described if isinstance(node, fx.Node) and not isinstance(what, saved)]


def source_hash(*modules: ModuleType) -> str:
    """A hash of the modules' source files: two versions of a pass never share a cache entry."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    return get_hash_for_files(tuple(str(module.__file__) for module in modules)).hex()


def inductor_option_names() -> frozenset[str]:
    """Names of every option of the installed Inductor."""
    import torch._inductor

    return frozenset(torch._inductor.list_options())


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """The Inductor options that a ``torch.compile`` mode stands for.

    Raises:
        RuntimeError: unknown mode.
    """
    import torch._inductor

    return torch._inductor.list_mode_options(mode)


def in_compiled_autograd() -> bool:
    """True while compiled autograd hands a backward graph to the backend."""
    return _compiled_autograd.in_compiled_autograd_region


def compile_id() -> str:
    """Dynamo's name of the graph that is being compiled, forward or backward, as ``"0/0"``."""
    current = CompileContext.current_compile_id()
    return "graph" if current is None else str(current)


def graph_break(gm: fx.GraphModule) -> str:
    """Why Dynamo ended a graph before the program did, with the source line, or an empty string."""
    rest = rest_left_out(gm)
    if rest is not None:
        return f"{rest.cause}; the rest of {rest.function} runs eagerly{_bracketed(rest.place)}"
    cause = getattr(gm, "compile_subgraph_reason", None)
    return _break_text(cause) if cause is not None and cause.graph_break else ""


def _break_text(cause: Any) -> str:
    reason = str(cause.reason).strip().splitlines()[0]
    return f"{reason}{_bracketed(_place(cause.user_stack[-1]))}" if cause.user_stack else reason


def breaks_without_graph() -> list[str]:
    """Every graph break since the last ``torch.compiler.reset()``, also those before which there was no graph."""
    from torch._dynamo.output_graph import graph_break_reasons

    return list(dict.fromkeys(map(_break_text, graph_break_reasons)))


def _place(frame: Any) -> str:
    return "" if _is_entry(frame.filename) else f"{frame.filename}:{frame.lineno}"


def _is_entry(filename: str) -> bool:
    """True for the function that torch.compile puts around what has no Python frame of the user's."""
    from torch._dynamo import external_utils

    return filename == external_utils.__file__


def _bracketed(place: str) -> str:
    return f" [{place}]" if place else ""


@dataclass(frozen=True)
class LeftOut:
    """Code that Dynamo was to compile and runs eagerly instead.

    Attributes:
        function: name of the function.
        whole: False where a graph was made of what comes before ``place``.
        place: ``"file:line"`` of what Dynamo cannot take; empty where that is the module which was compiled.
        cause: what that is, in Dynamo's words.
        hint: what Dynamo suggests, or an empty string.
    """

    function: str
    whole: bool
    place: str
    cause: str
    hint: str

    @property
    def reason(self) -> str:
        """The cause and its place, as graph breaks are named."""
        return f"{self.cause}{_bracketed(self.place)}"


def _left_out(function: str, whole: bool, place: str, message: str) -> LeftOut:
    """Reads a message of Dynamo's: the cause is its first line, hints have lines of their own."""
    lines = [line.strip() for line in message.strip().splitlines()] or ["Dynamo gives no reason"]
    hints = [line.removeprefix("Hint: ") for line in lines if line.startswith("Hint: ")]
    return LeftOut(function, whole, place, lines[0].rstrip("."), hints[0].rstrip(".") if hints else "")


class DynamoWatch:
    """Hears of functions that Dynamo gives up as a whole.

    Dynamo says nothing of functions that it never looks at: those of torch's own modules, or inside
    ``torch.compiler.disable``.

    Args:
        tell: called with each.
        backend: only of functions that were to be compiled for it; None: of all.
    """

    #: messages of Dynamo's, with how often it gave them before the compile that is going on
    _before: Counter[str] | None = None

    def __init__(self, tell: Callable[[LeftOut], object], backend: Callable[..., Any] | None = None) -> None:
        self._tell = tell
        self._backend = backend

    def start(self) -> None:
        """Listens from now on, until :meth:`stop` or ``torch.compiler.reset()``; may be called again."""
        if self._ended not in _callback_handler.end_callbacks:
            _callback_handler.register_start_callback(self._started)
            _callback_handler.register_end_callback(self._ended)

    def stop(self) -> None:
        """Listens no more."""
        if self._ended in _callback_handler.end_callbacks:
            _callback_handler.remove_start_callback(self._started)
            _callback_handler.remove_end_callback(self._ended)

    def _started(self, _: object) -> None:
        DynamoWatch._before = Counter(_dynamo_counters["unimplemented"])

    def _ended(self, _: object) -> None:
        from torch._dynamo.exc import Unsupported, UserError

        # called while the error, if there is one, is on its way to Dynamo, which lets the function run eagerly then
        error = sys.exc_info()[1]
        stack = getattr(error, "real_stack", None)
        if isinstance(error, (Unsupported, UserError)) and stack:
            code, compiler = _compiling()
            if code is not None and (self._backend is None or compiler is self._backend):
                named = getattr(code, "co_qualname", code.co_name)
                name = "the model" if _is_entry(code.co_filename) else named
                self._tell(_left_out(name, True, _place(stack[-1]), getattr(error, "msg", str(error))))


def _compiling() -> tuple[Any, Any]:
    """The code object that Dynamo is compiling, and the function that was given as backend.

    None where that is not known, and where failing is an error (``fullgraph=True``).
    """
    frame = sys._getframe()
    while frame is not None:
        known = frame.f_locals if frame.f_code.co_name == "_compile" else {}
        if known.get("one_graph"):
            break
        if "compiler_fn" in known and "code" in known:
            compiler = known["compiler_fn"]
            while hasattr(compiler, "_torchdynamo_orig_backend"):
                compiler = compiler._torchdynamo_orig_backend
            # what torch.compile makes of a name and options
            return known["code"], getattr(compiler, "compiler_fn", compiler)
        frame = frame.f_back
    return None, None


def rest_left_out(gm: fx.GraphModule) -> LeftOut | None:
    """The rest of the function, where Dynamo cannot go on compiling after a graph; None where it can."""
    cause = getattr(gm, "compile_subgraph_reason", None)
    if cause is None or cause.reason != "step_unsupported" or not cause.user_stack:
        return None
    frame = cause.user_stack[-1]
    messages = _dynamo_counters["unimplemented"]
    before = DynamoWatch._before if DynamoWatch._before is not None else messages
    new = [message for message, count in messages.items() if count > before[message]]
    return _left_out(frame.name, False, _place(frame), new[-1] if new else "")


def is_left_out_in_place(module: torch.nn.Module) -> bool:
    """True where ``module.compile()`` compiles nothing of the module itself: Dynamo skips functions of torch.

    ``torch.compile(module)`` puts a function of its own around such modules.
    """
    from torch._dynamo import trace_rules

    return not _dynamo_config.wrap_top_frame and bool(trace_rules.check(module.forward))


def is_looked_up(name: str) -> bool:
    """True if ``torch.compile`` was given this name as backend."""
    from torch._dynamo.backends import registry

    return name in registry._COMPILER_FNS


@contextlib.contextmanager
def unwrapped_errors(kind: type[Exception]) -> Iterator[None]:
    """Errors of one kind leave the block as a backend raised them: Dynamo wraps what backends raise."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        yield
    except BackendCompilerFailed as error:
        if isinstance(error.inner_exception, kind):
            raise error.inner_exception from error
        raise


def is_functorch_wrapped(value: object) -> bool:
    """True for tensors inside vmap, grad or jvp."""
    return isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value)


def is_hooks_switch(target: object) -> bool:
    """True for the calls by which ``torch.func.grad`` forbids saved-tensor hooks inside it, and allows them again."""
    return getattr(target, "__name__", "") in ("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable")


def has_autocast_rule(op: OpOverload, device_type: str) -> bool:
    """Whether somebody registered what autocast does with an op: ``torch.library.register_autocast``."""
    key = f"Autocast{device_type.upper()}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(op._schema.name, key)


def ignore_fresh_symbols(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """A program that is traced again makes its unbacked sizes again, which nobody will ask for."""
    if mode.shape_env is None:
        return contextlib.nullcontext()
    return mode.shape_env.ignore_fresh_unbacked_symbols()


def symbolic_kernels() -> contextlib.AbstractContextManager[None]:
    """Composite ops decompose in Python, as when Dynamo traces: in torch 2.11, matmul's C++ takes no symbolic sizes."""
    return enable_python_dispatcher()


def has_low_lstm(dtype: torch.dtype) -> bool:
    """Whether oneDNN has an LSTM in a 16-bit dtype for this CPU; where it has none it raises when it runs."""
    if dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()


def nesting_change(target: object) -> int:
    """+1 for a call, or the name of one, that opens a functorch level, -1 for one that closes it, else 0."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return next((step for part, step in _NESTING.items() if name.endswith(part)), 0)


def size_hint(size: int | torch.SymInt, fallback: int = 1) -> int:
    """The concrete size a symbolic size was traced with, or ``fallback`` for an unbacked one."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return fallback if hint is None else int(hint)


def log_artifact(name: str, text: Callable[[], str]) -> None:
    """Adds a text to the TORCH_TRACE log of this compile, where tlparse shows it."""
    _trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=text)


def update_scale(
    scale: torch.Tensor,
    growth_tracker: torch.Tensor,
    found_inf: torch.Tensor,
    growth_factor: float,
    backoff_factor: float,
    growth_interval: int,
) -> None:
    """One update of a loss scale, in place and on its device: what torch.amp.GradScaler does.

    Args:
        scale: fp32, 0-d.
        growth_tracker: int32, 0-d; updates since the last change.
        found_inf: fp32, 0-d; not zero: something was inf or nan.
        growth_factor: the scale's factor after ``growth_interval`` updates without a finding.
        backoff_factor: the scale's factor after a finding.
        growth_interval: see ``growth_factor``.
    """
    torch._amp_update_scale_(scale, growth_tracker, found_inf, growth_factor, backoff_factor, growth_interval)


def find_nonfinite_(values: Sequence[torch.Tensor], found: torch.Tensor) -> None:
    """Sets ``found`` (fp32, 0-d) to 1.0 if a value is inf or nan, by one kernel and without waiting.

    Args:
        values: of one floating dtype, on the device of ``found``.
        found: keeps its value if nothing is found.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(list(values), found, torch.ones_like(found))


def largest_magnitudes(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The largest magnitude in each tensor, 0-d; inf or nan where an element is. On a GPU by one pass of kernels."""
    return list(torch._foreach_norm(list(values), torch.inf))


def is_wrapper(value: torch.Tensor) -> bool:
    """True for tensors that consist of others, such as DTensors."""
    return is_traceable_wrapper_subclass(value)


def wrapped_tensors(value: Any) -> list[torch.Tensor]:
    """What a tensor that :func:`is_wrapper` consists of on this process."""
    if hasattr(value, "trigger_wait"):
        # a collective may still be writing it
        return [value.trigger_wait()]
    parts = (getattr(value, name) for name in value.__tensor_flatten__()[0])
    # a DTensor has its mesh among them
    return [part for part in parts if isinstance(part, torch.Tensor)]


class CompiledBackward:
    """The backward of one graph of AOTAutograd's, which may be run in another way.

    Args:
        function: the ``torch.autograd.Function`` that AOTAutograd made of the graph.
    """

    def __init__(self, function: Any) -> None:
        self._function = function

    @classmethod
    def of(cls, outputs: Sequence[Any]) -> CompiledBackward | None:
        """That of the graph which returned some values; None where they have no gradient, or this torch hides it."""
        for value in outputs:
            function = getattr(getattr(value, "grad_fn", None), "_forward_cls", None)
            if hasattr(function, "_backward_impl") and hasattr(function, "_lazy_backward_info"):
                return cls(function)
        return None

    def replace(self, run: Callable[[Any, list[Any]], Sequence[Any] | None]) -> None:
        """From now on ``run`` is asked first, with the node of autograd and the arguments of the compiled backward.

        Args:
            run: returns what the compiled backward would return, or None to have it run.
        """
        original = self._function._backward_impl

        def backward(ctx: Any, args: list[Any]) -> Any:
            result = run(ctx, args)
            return original(ctx, args) if result is None else result

        self._function._backward_impl = staticmethod(backward)

    def graph(self, args: Sequence[Any]) -> fx.GraphModule | None:
        """A copy of the graph, with fake values for these arguments; None where it needs more than its nodes say.

        AOTAutograd takes the facts off the nodes when it stores the graph in its cache, and stores source code: the
        graph is traced again. What depends on more than on values cannot be had back so, such as the strides that a
        custom op asks for, or bodies of their own.
        """
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        forward = self._forward()
        if forward is None or not all(map(_is_dense, args)):
            return None
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode, torch.no_grad():
            values = [torch.empty_strided(a.shape, a.stride(), dtype=a.dtype, device=a.device) for a in args]
            # without a mode of its own, as the values have one
            gm = make_fx(lambda *inputs: forward(*inputs))(*values)
        return gm if all(map(_is_plain_call, gm.graph.nodes)) else None

    def _forward(self) -> Callable[..., Any] | None:
        """What the backward computes, as a function of plain calls; None where it needs a module."""
        info = self._function._lazy_backward_info
        if hasattr(info, "bw_module"):
            gm: fx.GraphModule = info.bw_module
            return gm.forward if all(map(_is_plain_call, gm.graph.nodes)) else None
        stored = getattr(getattr(info, "bw_module_fn", None), "__self__", None)
        if stored is None:
            return None
        # to read the graph would run what makes constants, and random numbers too, once and for all
        body, imports = stored.args
        names: dict[str, Any] = {}
        exec(imports + body["_code"], names)
        return None if "self." in body["_code"] else functools.partial(names["forward"], None)

    def compile(self, gm: fx.GraphModule, options: Mapping[str, Any]) -> Callable[[list[Any]], Sequence[Any]]:
        """Compiles a backward graph with fake values; the result takes its arguments in one list, and clears it."""
        from torch._guards import tracing
        from torch._inductor import compile_fx, config

        values = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]
        output = gm.graph.output_node()
        returned: Sequence[Any] = output.args[0]  # type: ignore[assignment]  # a tuple
        visible = [place for place, node in enumerate(returned) if isinstance(node, fx.Node)]
        output.meta["user_visible_output_idxs"] = visible if config.bw_outputs_user_visible else []
        context = TracingContext(detect_fake_mode(values))
        # says which saved values may be overwritten
        context.fw_metadata = self._function.metadata
        with (
            config.patch(dict(options)),
            tracing(context),
            torch.no_grad(),
            autocast_disabled(),
        ):
            # no input counts as static: alignment is then checked in each call
            return compile_fx.compile_fx_inner(gm, values, is_backward=True)  # type: ignore[return-value]


def compiles_plain_code(options: Mapping[str, Any]) -> bool:
    """Whether Inductor, with these options, makes code that does not depend on addresses or on what it has timed."""
    from torch._inductor import config

    with config.patch(dict(options)):
        return not (config.triton.cudagraphs or config.cpp_wrapper or tunes_kernels())


def _is_dense(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not is_traceable_wrapper_subclass(value)
    )


def _is_plain_call(node: fx.Node) -> bool:
    if node.op != "call_function":
        return node.op in ("placeholder", "output")
    if isinstance(node.target, OpOverload):
        return node.target.namespace in ("aten", "prims", "amp_fx")
    return node.target is operator.getitem


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
