"""Wrong numbers that torch computes without an error, one row each, and what is done instead while amp_fx compiles.

A row stands here if a model that people train meets it. A test shows each one in stock ``torch.compile``
(``tests/cpu/test_faults.py``), so that it fails as soon as torch is right; the row goes when no supported version is
wrong. Stock ``torch.compile`` in the same process stays as it is.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, fx
from torch._C import DispatchKey

__all__ = ["FAULTS", "Fault", "faults_met", "mended", "noting_faults"]

_aten = torch.ops.aten
#: called where a row is met
_Note = Callable[[], object]


@dataclass(frozen=True)
class Fault:
    """One wrong result of torch's, in words for a report, with its correction."""

    what: str
    instead: str
    thread: str
    #: on entry, changes what Inductor does; undone at exit
    mend: Callable[[_Note], contextlib.AbstractContextManager[object]]
    #: minor versions that are wrong; none: all that are supported
    versions: tuple[str, ...] = ()

    @property
    def is_here(self) -> bool:
        """Whether the installed torch is wrong."""
        return not self.versions or torch.__version__.startswith(tuple(f"{each}." for each in self.versions))

    def __str__(self) -> str:
        return f"torch {torch.__version__} computes {self.what} wrongly ({self.thread}): {self.instead}"


def _scheduled_in_order(note: _Note) -> contextlib.AbstractContextManager[object]:
    """A kernel that reads a buffer comes behind the kernel that adds to it.

    A backward that scatters (interpolation, max pooling, indexing) fills a buffer with zeros, and adds to it in place.
    The scheduler calls the result by another name, of which a kernel that reads it depends. To fuse two kernels of
    different ranges, the code generator of CPUs makes the loops of one anew, and its dependencies with them, by the
    name of the zeros: the kernel may then run before the scatter.
    """
    from torch._inductor.scheduler import SchedulerNode

    def compute(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        renamed = self.read_writes.rename(self.mutation_renames)
        if renamed.reads != self.read_writes.reads:
            note()
            self.set_read_writes(renamed)

    stock = SchedulerNode._compute_attrs
    return mock.patch.object(SchedulerNode, "_compute_attrs", compute)


def _read_back_in_order(note: _Note) -> contextlib.AbstractContextManager[object]:
    """A Triton kernel waits for all of its threads before it reads what it has written.

    Inductor's loops over long rows write a value and read it in the next loop. Where one of them also reads or writes
    another dtype, Triton lets other threads read an element than have written it, and the value may not be there yet:
    a norm whose fp32 result is saved and whose bf16 result is returned was wrong on an H200 (triton#10924).
    """
    from torch._inductor.codegen.common import DeferredLine
    from torch._inductor.codegen.triton import TritonKernel

    def access(self: Any, lines: Any, *names: Any, consider_reads: bool = False) -> None:
        # with consider_reads, the access is a write
        for name in () if consider_reads else names:
            if name in self.cse.invalidated_stores:
                note()
                lines.writeline(DeferredLine(name, "tl.debug_barrier()"))
        stock(self, lines, *names, consider_reads=consider_reads)

    stock = TritonKernel._handle_pdl_before_access
    return mock.patch.object(TritonKernel, "_handle_pdl_before_access", access)


def _pooled_by_what_is_there(note: _Note) -> contextlib.AbstractContextManager[object]:
    """The gradient of an average is divided by the elements of its window, not by those that hang over the edge."""
    from torch._inductor import lowering

    def instead(op: Any) -> Callable[..., Any]:
        stock, kernel = lowering.lowerings[op], lowering.fallback_handler(op, add_to_fallback_set=False)

        def lower(
            gradient: Any,
            x: Any,
            window: Any,
            stride: Any,
            padding: Any,
            ceil: Any,
            count_pad: Any,
            divisor: Any = None,
        ) -> Any:
            steps, edges, sizes = stride or window, padding or [0] * len(window), x.get_size()[-len(window) :]
            geometry = (window, steps, edges, ceil)
            hangs = ceil and any(lowering.pooling_size(n, at, *geometry)[1] for at, n in enumerate(sizes))
            if not hangs or not count_pad or divisor is not None:
                return stock(gradient, x, window, stride, padding, ceil, count_pad, divisor)
            note()
            if any(edges):
                return kernel(gradient, x, window, stride, padding, ceil, count_pad, divisor)
            # there is no padding that would count
            return stock(gradient, x, window, stride, padding, ceil, False, divisor)

        return lower

    ops = (_aten.avg_pool2d_backward.default, _aten.avg_pool3d_backward.default)
    return mock.patch.dict(lowering.lowerings, {op: instead(op) for op in ops})


def _sparse_values_kept(note: _Note) -> contextlib.AbstractContextManager[object]:
    """The memory of a sparse tensor is not given to a later kernel to write its results to."""
    from torch._inductor import graph, lowering
    from torch._inductor.virtualized import V

    def own(node: object, value: Any) -> Any:
        if not isinstance(node, fx.Node) or _is_sparse(node):
            return value
        # fused into what makes the value
        copy = lowering.clone(value)
        copy.realize()
        V.graph.never_reuse_buffers.add(copy.get_name())
        return copy

    def handler(op: Any, **options: Any) -> Callable[..., Any]:
        run = stock(op, **options)

        def lower(*args: Any, **kwargs: Any) -> Any:
            node = V.graph.current_node
            if _is_sparse(node):
                note()
                args = tuple(own(*pair) for pair in zip(node.args, args, strict=True))
            return run(*args, **kwargs)

        return lower

    stock = graph.fallback_handler
    return mock.patch.object(graph, "fallback_handler", handler)


def _is_sparse(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and value.layout is not torch.strided


@contextlib.contextmanager
def _kernels(kernels: dict[Any, Callable[..., Any]]) -> Iterator[None]:
    """Ops are traced, and decomposed by Inductor, as these functions."""
    from torch._inductor.decomposition import decompositions, select_decomp_table

    with contextlib.ExitStack() as patches:
        for table in (decompositions, select_decomp_table()):
            patches.enter_context(mock.patch.dict(table, kernels))
        for op, kernel in kernels.items():
            patches.enter_context(mock.patch.dict(op.py_kernels, dict.fromkeys(op.py_kernels, kernel)))
            # what the op has looked up, with the function that was there
            patches.enter_context(mock.patch.dict(op._dispatch_cache, clear=True))
        yield


def _labels_up_to_the_first_minus_one(note: _Note) -> contextlib.AbstractContextManager[object]:
    """A margin is asked for between each class that a row names, and each that it does not; no class stands for -1."""
    op = _aten.multilabel_margin_loss_forward.default

    def loss(x: Tensor, target: Tensor, reduction: int) -> tuple[Tensor, Tensor]:
        note()
        rows, named = torch.atleast_2d(x), torch.atleast_2d(target)
        is_named = (named == -1).cumsum(-1) == 0
        labels = torch.where(is_named, named, 0)
        is_target = torch.zeros_like(rows).scatter_add(-1, labels, is_named.to(x.dtype)).clamp_max(1)
        margins = (1 - rows.gather(-1, labels).unsqueeze(-1) + rows.unsqueeze(-2)).clamp_min(0) / rows.shape[
            -1
        ]
        counts = is_named.unsqueeze(-1) & (is_target == 0).unsqueeze(-2)
        losses = torch.where(counts, margins, 0).sum((-2, -1))
        # as the enum at::Reduction has them
        losses = (losses if target.dim() == 2 else losses[0], losses.mean(), losses.sum())[reduction]
        return losses, is_target.reshape(target.shape)

    return _kernels({op: loss})


def _kept_where_the_size_is(note: _Note) -> contextlib.AbstractContextManager[object]:
    """A dimension that keeps its size is kept, and one of double size has each element twice, as by ATen on a CPU."""

    def instead(op: Any, factors: tuple[float, ...]) -> Callable[..., Any]:
        stock = op.py_kernels[DispatchKey.Autograd]

        def interpolate(x: Tensor, output_size: Any, *args: Any) -> Tensor:
            *others, scales = args
            # with align_corners, sizes alone count
            if scales is not None and not any(others) and x.device.type == "cpu":
                pairs = list(zip(x.shape[2:], scales, strict=True))
                exact = [next((f for f in factors if int(n * s) == f * n), s) for n, s in pairs]
                if exact != list(scales):
                    note()
                    scales = exact
            return stock(x, output_size, *others, scales)

        return interpolate

    linear = (_aten.upsample_linear1d.vec, _aten.upsample_bilinear2d.vec, _aten.upsample_trilinear3d.vec)
    kernels = {op: instead(op, (1.0,)) for op in linear}
    nearest = _aten.upsample_nearest2d.vec
    return _kernels({**kernels, nearest: instead(nearest, (1.0, 2.0))})


def _next_in_its_dtype(note: _Note) -> contextlib.AbstractContextManager[object]:
    """ATen finds the next number of 16 bits. Generated code widens to fp32, whose next number rounds to the first."""
    from torch._inductor import lowering

    op = _aten.nextafter.default
    stock, kernel = lowering.lowerings[op], lowering.fallback_handler(op, add_to_fallback_set=False)

    def lower(x: Any, towards: Any) -> Any:
        if min(x.get_dtype().itemsize, towards.get_dtype().itemsize) > 2:
            return stock(x, towards)
        note()
        return kernel(x, towards)

    return mock.patch.dict(lowering.lowerings, {op: lower})


FAULTS = (
    Fault(
        "sums that are made in place (gradients of interpolation and max pooling) between convolutions on a CPU",
        "they are read when they are complete",
        "pytorch#185509",
        _scheduled_in_order,
        versions=("2.13",),
    ),
    Fault(
        "loops of a GPU kernel that read what other threads have written",
        "they wait for all threads",
        "pytorch#190519",
        _read_back_in_order,
        versions=("2.11", "2.12", "2.13"),
    ),
    Fault(
        "the gradient of average pooling with ceil_mode where windows hang over the edge",
        "each window is divided by the elements that it has",
        "pytorch#198119",
        _pooled_by_what_is_there,
    ),
    Fault(
        "sparse gradients, whose memory it gives to other kernels",
        "sparse tensors have memory of their own",
        "not reported",
        _sparse_values_kept,
    ),
    Fault(
        "multilabel_margin_loss for rows with a -1, behind which no labels count",
        "no class is taken for a label that is not there",
        "not reported",
        _labels_up_to_the_first_minus_one,
    ),
    Fault(
        "interpolate with a scale_factor that a dimension is too small for",
        "the dimension is kept, or doubled, as eagerly",
        "pytorch#198201",
        _kept_where_the_size_is,
    ),
    Fault(
        "nextafter of 16-bit values",
        "it runs by ATen's own kernel",
        "not reported",
        _next_in_its_dtype,
    ),
)

#: what is patched is of the process
_mending = threading.RLock()
_depth = 0
_met: ContextVar[list[str] | None] = ContextVar("_met", default=None)


@contextlib.contextmanager
def noting_faults(met: list[str]) -> Iterator[None]:
    """Whatever is compiled of a graph that is handed to Inductor inside, adds to ``met`` the rows that it meets.

    A backward that is compiled when it is first called adds to the list then.
    """
    token = _met.set(met)
    try:
        yield
    finally:
        _met.reset(token)


def faults_met() -> list[str]:
    """The list that rows which are met are added to now; a new one where nobody asks."""
    met = _met.get()
    return [] if met is None else met


@contextlib.contextmanager
def mended(met: list[str]) -> Iterator[None]:
    """Inside, what this process compiles with Inductor has the right numbers; ``met`` gets the rows that were met."""
    global _depth
    with _mending, contextlib.ExitStack() as patches:
        if not _depth:
            for fault in filter(lambda fault: fault.is_here, FAULTS):
                patches.enter_context(fault.mend(lambda text=str(fault): text in met or met.append(text)))
        _depth += 1
        try:
            yield
        finally:
            _depth -= 1
