"""Facts about captured graphs that several passes need: arguments by name, eligibility, storages, writes."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import warnings
from collections.abc import Iterator
from typing import Any, TypeGuard

import torch
import torch.fx as fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from amp_fx._torch import (
    FakeTensor,
    FakeTensorMode,
    OpOverload,
    autocast_disabled,
    enable_autocast,
    ignore_fresh_symbols,
    size_hint,
    symbolic_kernels,
)
from amp_fx.errors import VerifyError

__all__ = [
    "COPY_META",
    "FP8_DTYPES",
    "LOW_DTYPES",
    "RAN_META",
    "argument_value",
    "arguments",
    "cast_bytes",
    "differentiated",
    "dtype_under_autocast",
    "fake_arguments",
    "fake_values",
    "grad_modes",
    "in_place_target",
    "is_cast",
    "is_eligible",
    "is_fp8",
    "is_gradient_call",
    "is_leaf_call",
    "is_matmul",
    "is_parameter",
    "is_view",
    "matmul_flops",
    "module_path",
    "numel",
    "output_nodes",
    "run_fake",
    "source_line",
    "storage_of",
    "tensor_nodes",
    "tensors",
    "where",
    "written_arguments",
    "written_storages",
]

#: dtypes that amp_fx places; fp8 and fp64 are the program's own business
LOW_DTYPES = (torch.bfloat16, torch.float16)
_PLACED_DTYPES = (torch.float32, *LOW_DTYPES)

#: dtypes of operands of scaled matmuls
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)

#: node.meta key of an input that is a low copy of a weight: the name of the input that it is a copy of
COPY_META = "amp_fx_copy_of"

#: node.meta key of a call that a pass has run on fake values: those values
RAN_META = "amp_fx_ran"

#: Dynamo writes a module's path as Python source: L['self'].encoder._modules['layer']._modules['0']
_FRAME_LOCAL = re.compile(r"^[LG]\['\w+'\]")
_INDEXED = re.compile(r"(?:\._modules)?\['?([^'\]]+)'?\]")

#: matmuls that the FLOP counter knows only by what they decompose into
_COMPOSITE_MATMULS = frozenset(
    getattr(torch.ops.aten, name)
    for name in (
        "bilinear",
        "chain_matmul",
        "conv1d",
        "conv2d",
        "conv3d",
        "conv_transpose1d",
        "conv_transpose2d",
        "conv_transpose3d",
        "einsum",
        "linear",
        "matmul",
        "scaled_dot_product_attention",
        "tensordot",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention_for_cpu_backward",
    )
)

#: ops that write to arguments their schema does not mark as written
_HIDDEN_WRITES = {
    torch.ops.aten.batch_norm.default: ("running_mean", "running_var"),
    torch.ops.aten.instance_norm.default: ("running_mean", "running_var"),
}

#: and the argument of each that says whether they do
_WRITES_IF = {
    torch.ops.aten.batch_norm.default: "training",
    torch.ops.aten.instance_norm.default: "use_input_stats",
}


def tensors(value: Any) -> list[torch.Tensor]:
    """Tensors inside a nested value, in order."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def is_eligible(value: Any) -> TypeGuard[torch.Tensor]:
    """True for a tensor that mixed precision may re-type: plain, strided, fp32, bf16 or fp16.

    The rule of ``is_eligible`` in ``ATen/autocast_mode.h`` (floating, not fp64), without tensor subclasses,
    which choose their own storage.
    """
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in _PLACED_DTYPES
        and value.layout is torch.strided
        and type(value) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
    )


def is_fp8(value: Any) -> TypeGuard[torch.Tensor]:
    """True for a tensor of a dtype in which scaled matmuls take their operands."""
    return isinstance(value, torch.Tensor) and value.dtype in FP8_DTYPES


def arguments(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The node's arguments with their schema names, positional ones first."""
    if isinstance(node.target, OpOverload):
        names = [argument.name for argument in node.target._schema.arguments]
    else:
        names = [str(index) for index in range(len(node.args))]
    yield from zip(names, node.args, strict=False)
    yield from node.kwargs.items()


def argument_value(node: fx.Node, name: str) -> Any:
    """The argument called ``name``, or None where the program leaves it out."""
    return next((value for given, value in arguments(node) if given == name), None)


def tensor_nodes(value: Any) -> list[fx.Node]:
    """The nodes inside one argument (a node, or a list of nodes as ``cat`` takes)."""
    found: list[fx.Node] = []
    fx.map_arg(value, lambda node: found.append(node) or node)
    return found


def is_cast(node: fx.Node) -> bool:
    """True for ``aten.to.dtype``, the one form of cast in a graph after ``pin_dtypes``."""
    return node.target is torch.ops.aten.to.dtype


def source_line(node: fx.Node) -> str:
    """The user's innermost source line, as ``file:line: code``, or an empty string."""
    trace = node.meta.get("stack_trace")
    # passes on Inductor's graphs see none
    return _innermost_line(trace) if isinstance(trace, str) else ""


def where(node: fx.Node) -> str:
    """Where an error is, in words: the user's source line; in a module of torch that is called directly, its path."""
    path = module_path(node)
    return source_line(node) or (f"module {path}" if path else "no source line")


@functools.lru_cache(maxsize=4096)  # repeated layers have the same lines
def _innermost_line(trace: str) -> str:
    lines = [line.strip() for line in trace.strip().splitlines()]
    for index in range(len(lines) - 1, -1, -1):
        if lines[index].startswith("File "):
            path, number = lines[index].split('"')[1], lines[index].split("line ")[1].split(",")[0]
            code = lines[index + 1] if index + 1 < len(lines) else ""
            return f"{path}:{number}: {code}"
    return ""


def storage_of(node: fx.Node) -> int | None:
    """An identity for the one storage behind the node's value; equal for views of each other.

    ``chunk`` and its kin return several views of one storage, and have it too. None for values without a
    storage, or with several.
    """
    values = tensors(node.meta.get("val"))
    if not all(isinstance(value, FakeTensor) and value.layout is torch.strided for value in values):
        return None
    keys = {value.untyped_storage()._cdata for value in values}
    return keys.pop() if len(keys) == 1 else None


def output_nodes(gm: fx.GraphModule) -> list[fx.Node]:
    """The nodes that the graph returns, in order, repeats included."""
    return tensor_nodes(gm.graph.output_node().args[0])


def written_arguments(node: fx.Node) -> list[tuple[str, fx.Node]]:
    """Arguments that the node writes to or, as ``batch_norm`` for evaluation, would write to; by name."""
    if not isinstance(node.target, OpOverload):
        return []
    names = {a.name for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write}
    names.update(_HIDDEN_WRITES.get(node.target, ()))
    if not names:
        return []
    return [
        (name, source) for name, value in arguments(node) if name in names for source in tensor_nodes(value)
    ]


def grad_modes(graph: fx.Graph) -> dict[fx.Node, bool]:
    """Whether gradients are on at each node, as far as the graph itself says; True at its start.

    A cast made where they are off has no gradient, so it must not be shared with readers where they are on.
    """
    modes: dict[fx.Node, bool] = {}
    enabled = True
    for node in graph.nodes:
        if node.target is torch._C._set_grad_enabled:
            enabled = bool(node.args[0])
        modes[node] = enabled
    return modes


def is_gradient_call(node: fx.Node) -> bool:
    """True for ``torch.autograd.grad``, as a train step has it that Dynamo captured whole."""
    return node.target is torch.autograd.grad


def is_leaf_call(node: fx.Node) -> bool:
    """True for ``y.requires_grad_()``, which ATen does not have."""
    return node.op == "call_method" and node.target == "requires_grad_"


def differentiated(graph: fx.Graph) -> set[fx.Node]:
    """What the graph itself takes gradients by, or makes a leaf for that. Readers must read this very node."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_gradient_call(node):
            found.update(tensor_nodes(node.kwargs.get("inputs", node.args[1:2])))
        elif is_leaf_call(node):
            found.update((node, *node.all_input_nodes))
    return found


def in_place_target(node: fx.Node) -> fx.Node | None:
    """What an in-place op (``add_``) writes to and returns; None for other ops.

    ``batch_norm`` is none, though its schema is mutable for the running statistics' sake.
    """
    op = node.target
    if not isinstance(op, OpOverload) or not op._schema.is_mutable or not op._schema.name.endswith("_"):
        return None
    return written_arguments(node)[0][1]


def written_storages(node: fx.Node) -> set[int]:
    """Storages the node writes to. A call whose effects are unknown counts as writing to all it is given."""
    if node.op not in ("call_function", "call_method"):
        return set()
    if isinstance(node.target, OpOverload):
        switch = _WRITES_IF.get(node.target)
        only_reads = switch is not None and not argument_value(node, switch)
        sources = [] if only_reads else [source for _, source in written_arguments(node)]
    elif getattr(node.target, "__module__", "") in ("_operator", "operator", "math") or is_gradient_call(
        node
    ):
        sources = []
    else:
        sources = node.all_input_nodes
    return {key for source in sources if (key := storage_of(source)) is not None}


def module_path(node: fx.Node) -> str:
    """Dotted path of the module the node belongs to, ``"encoder.layer.0"``; empty outside any module."""
    # in a backward graph, that of the forward
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    path = _FRAME_LOCAL.sub("", str(list(stack.values())[-1][0]))
    return _INDEXED.sub(r".\1", path).lstrip(".")


def numel(value: torch.Tensor) -> int:
    """Number of elements; symbolic sizes count with the hint they were traced with."""
    return math.prod(size_hint(size) for size in value.shape)


def is_view(node: fx.Node) -> bool:
    """True where the value looks into the storage of the node's first argument, or is one of its results."""
    if node.op != "call_function" or not node.all_input_nodes:
        return False
    if getattr(node.target, "__name__", "") == "getitem":
        return True
    key = storage_of(node)
    return key is not None and key == storage_of(node.all_input_nodes[0])


def is_parameter(node: fx.Node) -> bool:
    """True for a graph input that is a parameter of the user's module."""
    return node.op == "placeholder" and isinstance(
        node.meta.get("example_value", node.meta.get("val")), torch.nn.Parameter
    )


def is_matmul(node: fx.Node) -> bool:
    """True for calls that multiply matrices, convolve or attend, composite ops included."""
    if not isinstance(node.target, OpOverload):
        return False
    packet = node.target.overloadpacket
    return packet in flop_registry or packet in _COMPOSITE_MATMULS


def matmul_flops(node: fx.Node, low: torch.dtype | None = None) -> int:
    """Floating-point operations of a matmul-like call, found on its fake values; 0 where there is no formula.

    Args:
        node: a call with eligible arguments.
        low: run under autocast to this dtype, for arguments whose traced dtypes need not agree.
    """
    args, kwargs, fake_mode = fake_arguments(node)
    name = getattr(node.target, "__name__", "")
    if "scaled_dot_product" in name:
        # fused attention, whose kernels for CPU have no formula of their own
        backward = "backward" in name
        shapes = [[size_hint(size) for size in value.shape] for value in args[: 4 if backward else 3]]
        if all(len(shape) == 4 for shape in shapes):
            return sdpa_backward_flop_count(*shapes) if backward else sdpa_flop_count(*shapes)
    known = _known_flops(node, args)
    if known is not None:
        return known
    device = next((value.device.type for value in tensors((args, kwargs)) if is_eligible(value)), None)
    if device is None:
        return 0
    with (
        fake_mode,
        ignore_fresh_symbols(fake_mode),
        symbolic_kernels(),
        autocast_disabled() if low is None else enable_autocast(device, True, low),
        FlopCounterMode(display=False) as counter,
    ):
        node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function node
    return size_hint(counter.get_total_flops())


def _known_flops(node: fx.Node, args: tuple[Any, ...]) -> int | None:
    """Operations of the commonest calls, from their shapes; None for others. Asking torch takes ten times as long."""
    name, value = getattr(node.target, "_opname", ""), node.meta.get("val")
    if not isinstance(value, torch.Tensor) or len(args) < 2:
        return None
    if name in ("linear", "matmul", "mm", "bmm", "_scaled_mm") and min(args[0].ndim, args[1].ndim) > 1:
        return 2 * numel(value) * size_hint(args[0].shape[-1])
    if name in ("addmm", "baddbmm") and len(args) > 2:
        return 2 * numel(value) * size_hint(args[1].shape[-1])
    if name in ("conv1d", "conv2d", "conv3d"):
        weight = args[1]
        return 2 * numel(value) * numel(weight) // max(1, size_hint(weight.shape[0]))
    return None


def cast_bytes(value: torch.Tensor, to: torch.dtype) -> int:
    """Bytes a cast of ``value`` reads and writes when it is a kernel of its own."""
    return numel(value) * (value.dtype.itemsize + to.itemsize)


def fake_arguments(node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any], FakeTensorMode]:
    """The fake values of the node's arguments, and the mode they belong to.

    A call may run on them without harm to the graph: what changes a shape in place (``y.t_()``) changes that of an
    alias.
    """
    reshapes = (
        isinstance(node.target, OpOverload)
        and torch.Tag.inplace_view in node.target.tags
        # changes no shape, and refuses views
        and node.target is not torch.ops.aten.detach_.default
    )
    args, kwargs = fx.map_arg(
        (node.args, node.kwargs),  # type: ignore[arg-type]  # a tuple of arguments is one
        lambda n: _aliased(n.meta["val"]) if reshapes else n.meta["val"],
    )
    modes = [t.fake_mode for t in tensors((args, kwargs)) if isinstance(t, FakeTensor)]
    return args, kwargs, modes[0] if modes else FakeTensorMode()  # type: ignore[return-value]  # of map_arg


def _aliased(value: Any) -> Any:
    with torch.no_grad():
        return torch.ops.aten.alias.default(value) if isinstance(value, torch.Tensor) else value


def run_fake(node: fx.Node) -> Any:
    """Runs a call on the fake values of its arguments, autocast and gradients off.

    With gradients, a write to a leaf that requires one would be refused, though the program makes it without.

    Raises:
        VerifyError: the op does not take these dtypes; names node and source line.
    """
    args, kwargs, mode = fake_arguments(node)
    try:
        with (
            mode,
            torch.no_grad(),
            ignore_fresh_symbols(mode),
            symbolic_kernels(),
            autocast_disabled(),
            _without_warning(node),
        ):
            return node.target(*args, **kwargs)  # type: ignore[operator]  # a call_function node
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        dtypes = ", ".join(
            f"{n.name}: {n.meta['val'].dtype}" for n in node.all_input_nodes if tensors(n.meta["val"])
        )
        call = f"{node.name} = {node.target}({dtypes})"
        raise VerifyError(f"{call} does not run: {error} [{where(node)}]") from error


def fake_values(node: fx.Node) -> list[Any]:
    """What :func:`run_fake` would run on, and what it gave: the same objects as long as nobody changes either."""
    return [node.target, *(source.meta.get("val") for source in node.all_input_nodes), node.meta.get("val")]


def dtype_under_autocast(node: fx.Node, device_type: str, low: torch.dtype | None) -> torch.dtype:
    """The dtype in which torch.autocast itself returns the result of a call on its fake values.

    Args:
        node: a call that returns one tensor.
        device_type: of that tensor.
        low: autocast's dtype; None: autocast is off.
    """
    args, kwargs, mode = fake_arguments(node)
    # with gradients, a write to a leaf that requires one would be refused, as a buffer does after a first write
    with (
        mode,
        torch.no_grad(),
        ignore_fresh_symbols(mode),
        symbolic_kernels(),
        enable_autocast(device_type, low is not None, low or torch.bfloat16),
    ):
        return node.target(*args, **kwargs).dtype  # type: ignore[operator]  # a call_function node


@contextlib.contextmanager
def _without_warning(node: fx.Node) -> Iterator[None]:
    """Torch warns that its fused RMSNorm does not take a low input with an fp32 weight; Inductor's does."""
    if node.target is not torch.ops.aten.rms_norm.default:
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Mismatch dtype between input and weight")
        yield
