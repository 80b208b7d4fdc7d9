"""Tensors: their memory, known weakly or borrowed, and kernels for many at once, as gradient scaling uses them.

``torch.utils.swap_tensors``, and so ``module.to()`` where parameters are swapped, refuses a tensor that has a weak
reference. Its storage may have any number of them.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

# inside the block, ops are not seen by dispatch modes: not by the program's, and not by those of a compiler
from torch.utils._python_dispatch import _disable_current_modes as modes_disabled

# tensors that consist of others, such as DTensors
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_wrapper

__all__ = [
    "StorageRef", "borrowed", "find_nonfinite_", "is_wrapper", "largest_magnitudes", "modes_disabled",
    "storage_ref", "update_scale", "words_of_memory", "wrapped_tensors",
]  # fmt: skip

StorageRef = weakref.ref[torch.UntypedStorage]


def wrapped_tensors(value: Any) -> list[torch.Tensor]:
    """The plain tensors of which a tensor that :func:`is_wrapper` consists on this process."""
    if hasattr(value, "trigger_wait"):
        # a collective may still be writing it
        return [value.trigger_wait()]
    parts = (getattr(value, name) for name in value.__tensor_flatten__()[0])
    # a DTensor has its mesh among them
    return [part for part in parts if isinstance(part, torch.Tensor)]


def storage_ref(value: Tensor, freed: Callable[[Any], object] | None = None) -> StorageRef:
    """A weak reference to the memory of a dense tensor, of the first part where it consists of several.

    ``freed`` is called with it when the memory is freed, or the tensor has got other memory that is its own.
    """
    while is_wrapper(value):
        value = wrapped_tensors(value)[0]
    return weakref.ref(value.untyped_storage(), freed)


def borrowed(value: Tensor) -> Tensor:
    """A tensor with the same elements in the same memory, which it does not keep alive: whoever reads it has to."""
    owner = value.untyped_storage()
    empty = torch.empty(0, dtype=value.dtype, device=value.device)
    storage = torch._C._construct_storage_from_data_pointer(owner.data_ptr(), value.device, owner.nbytes())
    return empty.set_(storage, value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]


def words_of_memory(start: int, count: int, device: torch.device) -> Tensor:
    """Memory as int64, not kept alive: whoever reads a word of it knows that something lies there."""
    empty = torch.empty(0, dtype=torch.int64, device=device)
    storage = torch._C._construct_storage_from_data_pointer(start, device, 8 * count)
    return empty.set_(storage, 0, (count,), (1,))  # type: ignore[call-overload]


#: one update of a loss scale, in place and on its device, as of torch.amp.GradScaler. Takes the scale, the growth
#: tracker (int32), what is not zero where something was inf or nan, all 0-d; growth factor, backoff factor, interval
update_scale = torch._amp_update_scale_


def find_nonfinite_(values: Sequence[Tensor], found: Tensor) -> None:
    """Sets ``found`` (fp32, 0-d) to 1.0 if a value is inf or nan, by one kernel and without waiting.

    The values have one floating dtype and the device of ``found``, which keeps its value if nothing is found.
    """
    torch._amp_foreach_non_finite_check_and_unscale_(list(values), found, torch.ones_like(found))


def largest_magnitudes(values: Sequence[Tensor]) -> list[Tensor]:
    """The largest magnitude in each tensor, 0-d; inf or nan where an element is. On a GPU by one pass of kernels."""
    return list(torch._foreach_norm(list(values), torch.inf))
