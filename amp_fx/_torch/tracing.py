"""Values, calls and ops as they are met while a program is traced; autocast's state, and what it does with an op."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._C._autograd import (
    _saved_tensors_hooks_is_enabled,  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
    _top_saved_tensors_default_hooks,  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
)
from torch._C._functorch import (
    get_dynamic_layer_stack_depth,
    is_functorch_wrapped_tensor,
    pop_dynamic_layer_stack_and_undo_to_depth,
)

# composite ops decompose in Python, as when Dynamo traces: in torch 2.11, matmul's C++ takes no symbolic sizes
from torch._dispatch.python import enable_python_dispatcher as symbolic_kernels
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    make_fx,
    track_tensor_tree,
)
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensor", "FakeTensorMode", "HigherOrderOperator", "OpOverload", "TorchDispatchMode", "autocast_disabled",
    "autocast_shield", "defining_module", "disable_proxy_modes_tracing", "enable_autocast", "functorch_levels_closed",
    "get_proxy_mode", "has_autocast_rule", "ignore_fresh_symbols", "in_disabled_autocast",
    "is_functorch_wrapped", "is_hidden_call", "is_hooks_switch", "known_sizes", "make_fx", "nesting_change",
    "onednn_computes", "op_name", "own_op", "quantised_ops", "registered_ops", "saved_tensors_shield",
    "saves_through_hooks", "size_hint", "size_with",
    "symbolic_kernels", "track_tensor_tree",
]  # fmt: skip

#: a device type no graph of ours runs on: see autocast_shield
_UNUSED_DEVICE = "xla"
#: an op lives as long as its library
_LIBRARIES: list[torch.library.Library] = []
#: functorch levels are opened and closed by these calls in a Dynamo graph (torch/_functorch/predispatch.py)
_NESTING = {"_increment_nesting": 1, "_decrement_nesting": -1, "_enter_dual_level": 1, "_exit_dual_level": -1}


def defining_module(target: object) -> str:
    """Name of the module that makes an op with ``torch.library.custom_op``; empty for anything else."""
    # Dynamo calls an op, the other passes one of its overloads
    packet = getattr(target, "overloadpacket", target)
    definition = OPDEFS.get(getattr(packet, "_qualified_op_name", ""))
    return "" if definition is None else definition._init_fn.__module__


def is_functorch_wrapped(value: object) -> bool:
    """True for tensors inside vmap, grad or jvp."""
    return isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value)


def is_hooks_switch(target: object) -> bool:
    """True for the calls by which ``torch.func.grad`` forbids saved-tensor hooks inside it, and allows them again."""
    return getattr(target, "__name__", "") in ("_saved_tensors_hooks_disable", "_saved_tensors_hooks_enable")


def is_hidden_call(target: object) -> bool:
    """True for what ``x.data`` is in a Dynamo graph, and for the end of ``x.data = y``: no dispatcher sees them.

    They differ from ``detach`` and nothing in the versions of a tensor, which AOTAutograd compares.
    """
    return getattr(target, "__name__", "") in ("_get_data_attr", "_lower_version_count_by_1")


def ignore_fresh_symbols(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """A program that is traced again makes its unbacked sizes again, which nobody will ask for."""
    if mode.shape_env is None:
        return contextlib.nullcontext()
    return mode.shape_env.ignore_fresh_unbacked_symbols()


@contextlib.contextmanager
def functorch_levels_closed() -> Iterator[None]:
    """Closes the functorch levels that a run opened and, as it failed, did not close."""
    depth = get_dynamic_layer_stack_depth()
    try:
        yield
    finally:
        pop_dynamic_layer_stack_and_undo_to_depth(depth)


def nesting_change(target: object) -> int:
    """+1 for a call, or the name of one, that opens a functorch level, -1 for one that closes it, else 0."""
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return next((step for part, step in _NESTING.items() if name.endswith(part)), 0)


def size_hint(size: int | torch.SymInt) -> int:
    """The concrete size a symbolic size was traced with; 1 for an unbacked one."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 1 if hint is None else int(hint)


def known_sizes(fakes: Sequence[Any], given: Sequence[Any]) -> dict[Any, int]:
    """The sizes that symbols stand for in a call of a graph of Dynamo's, by the values at tracing and in the call."""
    pairs = zip(fakes, given, strict=True)
    return {fake.node.expr: int(value) for fake, value in pairs if isinstance(fake, torch.SymInt)}


def size_with(size: int | torch.SymInt, known: Mapping[Any, int]) -> int:
    """A size in a call in which symbols stand for known numbers."""
    return size if isinstance(size, int) else int(size.node.expr.xreplace(known))


def op_name(op: OpOverload) -> str:
    """The name of an op in op lists: ``"linear"``, ``"softmax.int"``; of other namespaces ``"mylib::op"``."""
    name = op._schema.name.removeprefix("aten::")
    overload = op._schema.overload_name
    return f"{name}.{overload}" if overload else name


def quantised_ops() -> Any:
    """The ops of quantised models as PyTorch exports them, ``dequantize_per_channel`` and others."""
    # registers them; Inductor's patterns need them too
    import torch.ao.quantization.fx._decomposed

    return torch.ops.quantized_decomposed


def own_op(
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    *,
    key: str = "CompositeExplicitAutograd",
    tags: tuple[torch.Tag, ...] = (),
) -> OpOverload:
    """The op ``amp_fx::...`` of a schema, which torch knows from the first call on."""
    name = schema.partition("(")[0]
    if not hasattr(torch.ops.amp_fx, name):
        library = torch.library.Library("amp_fx", "FRAGMENT")
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
        library.impl(name, run, key)
        # torch.library.register_fake looks its caller up among all modules, which takes 20 ms
        library.impl(name, fake, "Meta")
        _LIBRARIES.append(library)
    found: OpOverload = getattr(torch.ops.amp_fx, name).default
    return found


def registered_ops() -> frozenset[str]:
    """Every overload by name, ``"aten::softmax.int"``; a default overload is its op's name alone."""
    return frozenset(torch._C._dispatch_get_all_op_names())


def autocast_disabled() -> contextlib.AbstractContextManager[None]:
    """Switches autocast off for every device type."""
    return torch._C._DisableAutocast()


def in_disabled_autocast() -> bool:
    """Whether the program is inside ``torch.autocast``, and that is off on all devices."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting() > 0 and not torch._C._is_any_autocast_enabled()


@contextlib.contextmanager
def autocast_shield() -> Iterator[None]:
    """Compiles with autocast off, so that the result also *runs* with autocast off, forward and backward.

    A graph whose casts are explicit must never meet autocast again (pytorch#194329: fallback kernels then return
    garbage). AOTAutograd wraps its callables in ``_DisableAutocast`` only if some autocast was on when it compiled
    (``_is_any_autocast_enabled`` in ``graph_compile.py``), so it is on for a device type that no tensor here lives on.
    """
    with autocast_disabled():
        torch.set_autocast_enabled(_UNUSED_DEVICE, True)
        try:
            yield
        finally:
            torch.set_autocast_enabled(_UNUSED_DEVICE, False)


def saves_through_hooks() -> bool:
    """True where hooks take what autograd saves: the program's own (``saved_tensors_hooks``), or checkpointing's."""
    # also while Dynamo traces, where autograd runs none
    return _top_saved_tensors_default_hooks(True) is not None


@contextlib.contextmanager
def saved_tensors_shield() -> Iterator[None]:
    """Keeps what a trace saves for backward from the program's saved-tensor hooks.

    ``torch.utils.checkpoint`` counts what its hooks see: tensors saved by a trace would be missing when the region is
    computed again.
    """
    if not _saved_tensors_hooks_is_enabled():
        # the program forbids hooks
        yield
        return
    with torch.autograd.graph.saved_tensors_hooks(lambda value: value, lambda value: value):
        yield


@contextlib.contextmanager
def enable_autocast(device_type: str, enabled: bool, dtype: torch.dtype) -> Iterator[None]:
    """Sets autocast's state for a device type, also where that device is not, and ``torch.autocast`` does nothing."""
    before = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, enabled)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, before[0])
        torch.set_autocast_dtype(device_type, before[1])


def has_autocast_rule(op: OpOverload, device_type: str) -> bool:
    """Whether somebody registered what autocast does with an op: ``torch.library.register_autocast``."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op._schema.name, f"Autocast{device_type.upper()}")


def onednn_computes(dtype: torch.dtype) -> bool:
    """Whether oneDNN computes in a 16-bit dtype on this CPU; where it does not, its LSTM raises when it runs."""
    if dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
