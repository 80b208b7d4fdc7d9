"""Values, calls and ops as they are met while a program is traced."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._library.custom_ops import OPDEFS
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
    "FakeTensor", "FakeTensorMode", "HigherOrderOperator", "OpOverload", "defining_module",
    "disable_proxy_modes_tracing", "get_proxy_mode", "ignore_fresh_symbols", "is_functorch_wrapped",
    "is_hooks_switch", "is_wrapper", "known_sizes", "make_fx", "nesting_change", "op_name", "quantised_ops",
    "registered_ops", "size_hint", "size_with", "symbolic_kernels", "track_tensor_tree", "wrapped_tensors",
]  # fmt: skip

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


def ignore_fresh_symbols(mode: FakeTensorMode) -> contextlib.AbstractContextManager[None]:
    """A program that is traced again makes its unbacked sizes again, which nobody will ask for."""
    if mode.shape_env is None:
        return contextlib.nullcontext()
    return mode.shape_env.ignore_fresh_unbacked_symbols()


def symbolic_kernels() -> contextlib.AbstractContextManager[None]:
    """Composite ops decompose in Python, as when Dynamo traces: in torch 2.11, matmul's C++ takes no symbolic sizes."""
    return enable_python_dispatcher()


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


def known_sizes(fakes: Sequence[Any], given: Sequence[Any]) -> dict[Any, int]:
    """What symbols stand for in a call of a graph of Dynamo's, by the values that it was traced with and is given."""
    pairs = zip(fakes, given, strict=True)
    return {fake.node.expr: int(value) for fake, value in pairs if isinstance(fake, torch.SymInt)}


def size_with(size: int | torch.SymInt, known: Mapping[Any, int]) -> int:
    """A size in a call in which symbols stand for known numbers."""
    return size if isinstance(size, int) else int(size.node.expr.xreplace(known))


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


def registered_ops() -> frozenset[str]:
    """Every overload by name, ``"aten::softmax.int"``; a default overload is its op's name alone."""
    return frozenset(torch._C._dispatch_get_all_op_names())
