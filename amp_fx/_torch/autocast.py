"""Autocast's state, and what autocast does with an op."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch._C._autograd import (
    _saved_tensors_hooks_is_enabled,  # pyright: ignore[reportAttributeAccessIssue]  # not in the stubs
)
from torch._ops import OpOverload

__all__ = [
    "autocast_disabled", "autocast_shield", "enable_autocast", "has_autocast_rule", "has_low_lstm",
    "saved_tensors_shield",
]  # fmt: skip

#: a device type no graph of ours runs on: see autocast_shield
_UNUSED_DEVICE = "xla"


def autocast_disabled() -> contextlib.AbstractContextManager[None]:
    """Switches autocast off for every device type."""
    return torch._C._DisableAutocast()


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
    key = f"Autocast{device_type.upper()}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(op._schema.name, key)


def has_low_lstm(dtype: torch.dtype) -> bool:
    """Whether oneDNN has an LSTM in a 16-bit dtype for this CPU; where it has none it raises when it runs."""
    if dtype is torch.float16:
        return torch.ops.mkldnn._is_mkldnn_fp16_supported()
    return torch.ops.mkldnn._is_mkldnn_bf16_supported()
