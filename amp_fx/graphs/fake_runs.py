"""Calls on fake values: what they would return, in which dtype, and the operations of a matmul."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    autocast_disabled,
    enable_autocast,
    ignore_fresh_symbols,
    inductor_decompositions,
    make_fx,
    size_hint,
    symbolic_kernels,
)
from amp_fx.errors import VerifyError
from amp_fx.graphs.calls import is_layout, where
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import is_eligible, numel, tensors


def fake_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any], FakeTensorMode]:
    """The fake values of the node's arguments, and the mode they belong to.

    A call may run on them without harm to the graph: what changes a shape in place (``y.t_()``) changes that
    of an alias.
    """
    reshapes = (
        isinstance(node.target, OpOverload)
        and torch.Tag.inplace_view in node.target.tags
        # changes no shape, and refuses views
        and node.target is not torch.ops.aten.detach_.default
    )

    def value_of(source: fx.Node) -> Any:
        value = source.meta["val"]
        return torch.ops.aten.alias.default(value) if reshapes and isinstance(value, torch.Tensor) else value

    with torch.no_grad():
        args, kwargs = fx.map_arg((node.args, node.kwargs), value_of)  # type: ignore[arg-type]  # of a tuple
    modes = [t.fake_mode for t in tensors((args, kwargs)) if isinstance(t, FakeTensor)]
    return args, kwargs, modes[0] if modes else FakeTensorMode()  # type: ignore[return-value]  # of map_arg


def run_fake(node: fx.Node, mode: FakeTensorMode | None = None) -> Any:
    """Runs a call on the fake values of its arguments, autocast and gradients off; VerifyError if it does not run.

    ``mode`` is that of the result of a call that takes no tensors.
    """
    args, kwargs, own = fake_arguments(node)
    try:
        with _on_fakes(mode or own, autocast_disabled()), _without_warning(node):
            if is_layout(node):
                # DTensors are plain tensors here
                return node.meta["val"].to(args[0].dtype)
            return node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function node
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        dtypes = ", ".join(
            f"{n.name}: {n.meta['val'].dtype}" for n in node.all_input_nodes if tensors(n.meta["val"])
        )
        call = f"{node.name} = {node.target}({dtypes})"
        raise VerifyError(f"{call} does not run: {error} [{where(node)}]") from error


def trace_fake(function: Callable[..., Any], args: Sequence[fx.Node | None]) -> fx.GraphModule:
    """The graph of a function of the fake values of nodes, autocast and gradients off, by Inductor's decompositions.

    The first argument is a node; None stands for an argument that is None.
    """
    values: list[Any] = [None if node is None else node.meta["val"] for node in args]
    with _on_fakes(values[0].fake_mode, autocast_disabled()):
        return make_fx(function, inductor_decompositions())(*values)


def fake_values(node: fx.Node) -> list[Any]:
    """Arguments and result of :func:`run_fake`: the same objects as long as nobody changes either."""
    return [node.target, *(source.meta.get("val") for source in node.all_input_nodes), node.meta.get("val")]


def dtype_under_autocast(node: fx.Node, device_type: str, low: torch.dtype | None) -> torch.dtype:
    """The dtype in which torch.autocast returns the one result of a call; low None: as without autocast."""
    args, kwargs, mode = fake_arguments(node)
    with _on_fakes(mode, enable_autocast(device_type, low is not None, low or torch.bfloat16)):
        return node.target(*args, **kwargs).dtype  # type: ignore[operator]  # a call_function node


@contextlib.contextmanager
def _on_fakes(mode: FakeTensorMode, autocast: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """Calls on fake values. With gradients, a write to a leaf that requires one would be refused."""
    with mode, torch.no_grad(), ignore_fresh_symbols(mode), symbolic_kernels(), autocast:
        yield


@contextlib.contextmanager
def _without_warning(node: fx.Node) -> Iterator[None]:
    """Torch warns that its fused RMSNorm does not take a low input with an fp32 weight; Inductor's does."""
    if node.target is not torch.ops.aten.rms_norm.default:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        yield


def is_matmul(node: fx.Node) -> bool:
    """True for calls that multiply matrices, convolve or attend, composite ops included."""
    if not isinstance(node.target, OpOverload):
        return False
    # imports Triton where that is installed
    from torch.utils.flop_counter import flop_registry

    # the FLOP counter knows composite ops only by what they decompose into
    return node.target.overloadpacket in flop_registry or has_trait(node, Trait.MATMUL)


def matmul_flops(node: fx.Node, low: torch.dtype | None = None) -> int:
    """Floating-point operations of a matmul-like call, found on its fake values; 0 where there is no formula.

    It runs under autocast to ``low``, where that is given, since traced dtypes of arguments need not agree.
    """
    from torch.utils.flop_counter import FlopCounterMode

    args, kwargs, mode = fake_arguments(node)
    if (known := known_flops(getattr(node.target, "__name__", ""), args, node.meta.get("val"))) is not None:
        return known
    device = next((value.device.type for value in tensors((args, kwargs)) if is_eligible(value)), None)
    if device is None:
        return 0
    # not _on_fakes: which kernels run, and so which formulas count, may depend on gradients
    with (
        mode,
        ignore_fresh_symbols(mode),
        symbolic_kernels(),
        autocast_disabled() if low is None else enable_autocast(device, True, low),
        FlopCounterMode(display=False) as counter,
    ):
        node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function node
    return size_hint(counter.get_total_flops())


def known_flops(overload: str, args: Sequence[Any], value: Any) -> int | None:
    """Operations of the commonest calls, from their shapes; None for others. Asking torch takes ten times as long."""
    name = overload.partition(".")[0]
    if "scaled_dot_product" in name:
        # fused attention, whose kernels for CPU have no formula of their own
        backward = "backward" in name
        shapes = [[size_hint(size) for size in value.shape] for value in args[: 4 if backward else 3]]
        if all(len(shape) == 4 for shape in shapes):
            # batches and heads that several others read: the formulas refuse those of a batch, before torch 2.13 all
            outer = [*map(max, *(shape[:2] for shape in shapes))]
            shapes = [outer + shape[2:] for shape in shapes]
            from torch.utils.flop_counter import sdpa_backward_flop_count, sdpa_flop_count

            return sdpa_backward_flop_count(*shapes) if backward else sdpa_flop_count(*shapes)
    if "grouped_mm" in name:
        # each row or column meets one matrix of many; the gradient of transformers' op is two products
        left, right = args[:2]
        sizes = (*left.shape[-2:], right.shape[-1], left.shape[0] if left.ndim == right.ndim == 3 else 1)
        return math.prod(map(size_hint, sizes)) * (4 if "backward" in name else 2)
    if not isinstance(value, torch.Tensor) or len(args) < 2:
        return None
    products = ("linear", "matmul", "mm", "bmm", "_scaled_mm", "_int_mm")
    if name in products and min(args[0].ndim, args[1].ndim) > 1:
        return 2 * numel(value) * size_hint(args[0].shape[-1])
    if name in ("addmm", "baddbmm") and len(args) > 2:
        return 2 * numel(value) * size_hint(args[1].shape[-1])
    if name in ("conv1d", "conv2d", "conv3d"):
        weight = args[1]
        return 2 * numel(value) * numel(weight) // max(1, size_hint(weight.shape[0]))
    return None
