"""Compiling with Inductor: its options, passes on its graphs, and what inputs and outputs of AOTAutograd's are."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.fx as fx
from torch._functorch import config as _functorch_config

from amp_fx._torch.faults import faults_met, mended
from amp_fx._torch.tracing import autocast_disabled

__all__ = [
    "Halves", "JointRoles", "compile_package", "compile_with_inductor", "graph_pass", "inductor_decompositions",
    "inductor_mode_options", "inductor_option_names", "joint_roles", "kept_positions", "lays_out_convolutions",
    "partitioner", "program_outputs", "replace_inner_compile", "source_hash", "stock_inductor", "traced_anew",
    "tunes_kernels", "unchanged_inputs", "uniform_noise", "write_as_it_is",
]  # fmt: skip


def compile_with_inductor(
    gm: fx.GraphModule, example_inputs: Sequence[Any], config_patches: dict[str, Any]
) -> Callable[..., Any]:
    """Compiles with Inductor; the backward is traced without autocast.

    Stock torch.compile traces the backward under the forward's ambient autocast, which silently overflows in
    fp16 (pytorch#153044); ``backward_pass_autocast="off"`` is part of AOTAutograd's cache key.
    """
    # imported late: Inductor's import costs over a second, and a plain `import amp_fx` should not
    from torch._inductor import compile_fx as module

    # with a wrapper in C++, compile_fx takes these for the inputs, and they do not say what requires a gradient
    for node in gm.graph.find_nodes(op="placeholder"):
        node.meta.pop("val", None)
    # for each graph: the backward may be compiled when it is first called
    met = faults_met()
    inner_compile = mended(met)(module.compile_fx_inner)
    with _functorch_config.patch(backward_pass_autocast="off"), mended(met):
        # typed as what it returns to AOTInductor, too
        return module.compile_fx(  # type: ignore[return-value]
            gm, list(example_inputs), inner_compile=inner_compile, config_patches=config_patches
        )


@contextlib.contextmanager
def traced_anew() -> Iterator[dict[str, Any]]:
    """Inside, graphs are traced even where a cache has the result; a C++ compiler's results are taken from its.

    Yields the options with which Inductor lowers them anew. As options they hold for a backward, too, which is compiled
    when it is first called.
    """
    with _functorch_config.patch(enable_autograd_cache=False):
        yield {"fx_graph_cache": False}


def compile_package(ep: torch.export.ExportedProgram, path: str, configs: Mapping[str, Any]) -> None:
    """Compiles an exported program with AOTInductor into a package at ``path``, which ends in ``.pt2``."""
    import torch._inductor

    # it freezes only where there are no gradients
    with torch.no_grad(), autocast_disabled(), mended(faults_met()), _inputs_checked(ep), _weights_aligned():
        torch._inductor.aoti_compile_and_package(ep, package_path=path, inductor_configs={**configs})


@contextlib.contextmanager
def _inputs_checked(ep: torch.export.ExportedProgram) -> Iterator[None]:
    """Packages compare dtypes, sizes and strides of their inputs in each call, but for ``AOTI_RUNTIME_CHECK_INPUTS=0``.

    AOTInductor writes the comparisons, and by default skips them when the package runs: an input of another size was
    read as one of the size that the package was made for, or beyond its end. A least size of 2 is that of tracing,
    which takes 1 for a constant, and not one of the program: of each size the least that the program states counts.
    """
    from torch._inductor import config
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu
    from torch._inductor.virtualized import V
    from torch.utils._sympy.value_ranges import ValueRanges

    original = CppWrapperCpu.generate_input_output_runtime_checks

    def generate(self: CppWrapperCpu) -> None:
        traced, stated = V.graph.sizevars.shape_env.var_to_range, ep.range_constraints
        # the largest are compared as they are
        ranges = {
            size: ValueRanges(stated[size].lower if size in stated else 0, known.upper)
            for size, known in traced.items()
        }
        with mock.patch.dict(traced, ranges):
            original(self)
        lines = self.prefix._lines
        for at, line in enumerate(lines):
            if isinstance(line, str) and "env_var_value != nullptr && " in line:
                lines[at] = line.replace("!= nullptr && ", "== nullptr || ")

    with (
        mock.patch.object(CppWrapperCpu, "generate_input_output_runtime_checks", generate),
        config.patch({"aot_inductor.check_lowerbound": True}),
    ):
        yield


# a large block of std::malloc begins 16 bytes behind a page: each row of a packed weight would span two cache lines
_ALIGNED = """
#include <cstdlib>
#if defined(__linux__)
#include <malloc.h>
#define malloc(bytes) aligned_alloc(64, ((bytes) + 63) / 64 * 64)
#endif
{include}
#undef malloc
"""


@contextlib.contextmanager
def _weights_aligned() -> Iterator[None]:
    """Packages for CPUs place weights at cache lines.

    AOTInductor pads weights to 64 bytes, and copies them into one block of ``std::malloc`` when the package is loaded.
    """
    from torch._inductor import codecache
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    include, header = CppWrapperCpu.get_device_include_path_aot, codecache._get_cpp_wrapper_header

    def aligned_include(device: str) -> str:
        return _ALIGNED.format(include=include(device)) if device == "cpu" else include(device)

    def aligned_header(device: str, *args: Any, **kwargs: Any) -> str:
        found = header(device, *args, **kwargs)
        if device != "cpu":
            return found
        # it is precompiled, and read before the wrapper's own lines
        return codecache.write(_ALIGNED.format(include=f"#include <{found}>"), "h")[1]

    with (
        mock.patch.object(CppWrapperCpu, "get_device_include_path_aot", staticmethod(aligned_include)),
        mock.patch.object(codecache, "_get_cpp_wrapper_header", aligned_header),
    ):
        yield


def stock_inductor(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The compilation that ``torch.compile`` does by itself, to compare with."""
    from torch._inductor.compile_fx import compile_fx

    # typed as what it returns to AOTInductor, too
    return compile_fx(gm, list(example_inputs))  # type: ignore[return-value]


@contextlib.contextmanager
def replace_inner_compile(inner_compile: Callable[..., Callable[..., Any]]) -> Iterator[None]:
    """Whatever compiles with Inductor inside the block hands its graphs to ``inner_compile`` instead.

    It gets what ``compile_fx_inner`` gets, and returns a callable that takes its arguments in one list, as
    :attr:`Lowered.call`. The caches of compiled graphs, which would leave ``inner_compile`` out, are off.
    """
    from torch._inductor import compile_fx as module
    from torch._inductor import config as inductor_config

    original = module.compile_fx

    def compile_fx(*args: Any, **kwargs: Any) -> Any:
        # with config_patches, compile_fx calls itself through the module and passes its inner_compile on
        kwargs.setdefault("inner_compile", inner_compile)
        return original(*args, **kwargs)

    with (
        mock.patch.multiple(module, compile_fx=compile_fx, compile_fx_inner=inner_compile),
        inductor_config.patch(fx_graph_cache=False, fx_graph_remote_cache=False),
        _functorch_config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False),
    ):
        yield


def graph_pass(
    stage: Literal["joint", "post_grad"],
    uuid: str,
    rewrite: Callable[[fx.GraphModule], None],
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """The Inductor option that runs ``rewrite`` on graphs on their way to code, before the program's own passes.

    Stage ``"joint"`` is forward and backward together before they are partitioned, ``"post_grad"`` each by itself,
    after the strides of its outputs were noted. ``uuid`` is everything the rewriting depends on, for cache keys;
    ``options`` are the program's, before those of Inductor's configuration.
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


#: forward and backward of a joint graph, by the share of what they might keep that torch's own budget has
Halves = Callable[[float], tuple[fx.GraphModule, fx.GraphModule]]


def partitioner(
    uuid: str, divide: Callable[[Halves], tuple[fx.GraphModule, fx.GraphModule]], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The Inductor option that has ``divide`` make a forward and its backward of a joint graph.

    ``divide`` is given the program's own partitioner, else Inductor's, as a function that may be called more than once:
    with a share below 1, values are computed again, those that are the quickest first
    (``torch._functorch.config.activation_memory_budget``). ``uuid`` and ``options`` are as in :func:`graph_pass`.
    """
    from torch._functorch import config as functorch_config
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor import config
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    name = "custom_partitioner_fn"
    given = options.get(name, getattr(config, name))
    partition = min_cut_rematerialization_partition if given is None else given

    class Partitioner(CustomPartitionerFn):
        def __call__(
            self, gm: fx.GraphModule, joint_inputs: Sequence[object], **kwargs: Any
        ) -> tuple[fx.GraphModule, fx.GraphModule]:
            def halves(share: float) -> tuple[fx.GraphModule, fx.GraphModule]:
                own = functorch_config.activation_memory_budget
                with functorch_config.patch(activation_memory_budget=share * own):
                    # a partitioner changes the graph that it is given
                    return partition(fx.GraphModule(gm, _copied(gm.graph)), joint_inputs, **kwargs)

            return divide(halves)

        def uuid(self) -> Any:
            # as for passes: None where the program's does not say what it depends on
            return uuid if given is None else (other := given.uuid()) and (uuid, other)

        def __reduce__(self) -> Any:
            # unlike passes, it is part of the keys as all other options are
            return tuple, ((uuid, given),)

    return {name: Partitioner()}


def _copied(graph: fx.Graph) -> fx.Graph:
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {})).meta = dict(graph.output_node().meta)
    return copy


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """How Inductor has AOTAutograd decompose ops, by its configuration."""
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def write_as_it_is(node: fx.Node) -> None:
    """Has Inductor write a value in its own shape and strides, as for small matmuls (``decompose_mem_bound_mm``)."""
    node.meta["inductor_realize_to_strides"] = True


def lays_out_convolutions() -> bool:
    """Whether Inductor runs convolutions on a CPU channels last in every call: ``GraphLowering.decide_layout_opt``."""
    from torch._inductor import config

    # freezing packs the weights once instead
    is_on = config.layout_optimization and not config.freezing
    return is_on and torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available()


def tunes_kernels(options: Mapping[str, Any]) -> bool:
    """Whether Inductor, with these options, chooses among kernels of its own for matmuls."""
    from torch._inductor import config

    return any(options.get(name, getattr(config, name)) for name in ("max_autotune", "max_autotune_gemm"))


def source_hash(*folders: str) -> str:
    """A hash of the source files in the folders: two versions of a pass never share a cache entry."""
    from torch._inductor.custom_graph_pass import get_hash_for_files

    files = sorted(str(path) for folder in folders for path in Path(folder).rglob("*.py"))
    return get_hash_for_files(tuple(files)).hex()


def inductor_option_names() -> frozenset[str]:
    """Names of every option of the installed Inductor."""
    import torch._inductor

    return frozenset(torch._inductor.list_options())


def inductor_mode_options(mode: str) -> dict[str, Any]:
    """The Inductor options that a ``torch.compile`` mode stands for; RuntimeError for an unknown mode."""
    import torch._inductor

    return torch._inductor.list_mode_options(mode)


@dataclass(frozen=True)
class JointRoles:
    """The kinds of the inputs and outputs of a joint graph."""

    #: position among the inputs of the graph that was compiled -> placeholder; without those that it has changed
    inputs: dict[int, fx.Node]
    #: the gradients that enter the backward
    tangents: list[fx.Node]
    #: positions of the gradients among the outputs, several for a tensor subclass. Also of a base that AOTAutograd puts
    #: in the place of inputs that overlap. An output is None where the graph computes no gradient
    gradients: list[int]


def joint_roles(gm: fx.GraphModule) -> JointRoles | None:
    """Reads AOTAutograd's descriptors; None for a graph that has no backward, or no descriptors."""
    from torch._functorch._aot_autograd.descriptors import GradAOTOutput, PlainAOTInput, TangentAOTInput

    described = [(_whole(node.meta.get("desc")), node) for node in gm.graph.find_nodes(op="placeholder")]
    inputs = {what.idx: node for what, node in described if isinstance(what, PlainAOTInput)}
    tangents = [node for what, node in described if isinstance(what, TangentAOTInput)]
    outputs = enumerate(gm.graph.output_node().meta.get("desc") or ())
    gradients = [position for position, output in outputs if isinstance(_whole(output), GradAOTOutput)]
    return JointRoles(inputs, tangents, gradients) if gradients else None


def _whole(descriptor: Any) -> Any:
    """The descriptor of a whole tensor subclass, for the descriptor of one of its parts."""
    while hasattr(descriptor, "base") and hasattr(descriptor, "attr"):
        descriptor = descriptor.base
    return descriptor


def program_outputs(forward: fx.GraphModule) -> list[fx.Node]:
    """The results that a forward graph returns to the program, and not, or not only, to its backward."""
    returned, kept = forward.graph.output_node().args[0], kept_positions(forward)
    nodes = enumerate(returned)  # type: ignore[arg-type]  # a list
    return [node for at, node in nodes if isinstance(node, fx.Node) and at not in kept]


def uniform_noise(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    """Numbers in [0, 1) as Inductor's kernels draw them, in a graph whose calls of ``torch.rand`` it has replaced."""
    from torch._inductor import config, inductor_prims

    if config.fallback_random:
        return torch.rand(sizes, device=device)
    seed = inductor_prims.lookup_seed(inductor_prims.seeds(1, device), 0)
    return inductor_prims.random([*sizes], seed, "rand")


def kept_positions(forward: fx.GraphModule) -> list[int]:
    """Positions among the results of a forward graph of those that it returns to its backward alone."""
    from torch._functorch._aot_autograd import descriptors

    saved = tuple(kind for name, kind in vars(descriptors).items() if name.startswith("SavedForBackwards"))
    described = forward.graph.output_node().meta.get("desc") or ()
    return [at for at, what in enumerate(described) if isinstance(what, saved)]


def unchanged_inputs(forward: fx.GraphModule) -> dict[int, fx.Node]:
    """Position among a program's inputs -> input of a forward graph, where neither it nor AOTAutograd writes to it."""
    from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput, PlainAOTInput

    described = forward.graph.output_node().meta.get("desc") or ()
    changed = [what.mutated_input for what in described if isinstance(what, InputMutationAOTOutput)]
    found = [(node.meta.get("desc"), node) for node in forward.graph.find_nodes(op="placeholder")]
    return {
        what.idx: node
        for what, node in found
        if isinstance(what, PlainAOTInput)
        and what not in changed
        and not any(
            getattr(reader.target, "_schema", None) and reader.target._schema.is_mutable
            for reader in node.users
        )
    }
