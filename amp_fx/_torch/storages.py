"""The memory of tensors: known weakly, and borrowed.

``torch.utils.swap_tensors``, and so ``module.to()`` where parameters are swapped, refuses a tensor that has a weak
reference. Its storage may have any number of them.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from amp_fx._torch.tracing import is_wrapper, wrapped_tensors

__all__ = ["StorageRef", "borrowed", "storage_ref"]

StorageRef = weakref.ref[torch.UntypedStorage]


def storage_ref(value: Tensor, freed: Callable[[Any], object] | None = None) -> StorageRef:
    """A weak reference to the memory of a tensor, of the first part where it consists of several.

    Args:
        value: dense.
        freed: called with the reference when the memory is freed, or the tensor has got other memory that is its own.
    """
    while is_wrapper(value):
        value = wrapped_tensors(value)[0]
    return weakref.ref(value.untyped_storage(), freed)


def borrowed(value: Tensor) -> Tensor:
    """A tensor with the same elements in the same memory, which it does not keep alive: whoever reads it has to."""
    owner = value.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(owner.data_ptr(), value.device, owner.nbytes())
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    return empty.set_(storage, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]
