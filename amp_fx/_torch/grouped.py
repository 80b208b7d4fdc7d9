"""The shapes of ``torch._grouped_mm`` in fp32 and fp16, which its kernels take and its shape function refuses.

Every backend meets the refusal ("Expected inputs of BF16 type", pytorch#174763) while Dynamo traces, before it is given
a graph. Under a frame of another backend torch still refuses.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._meta_registrations import _create_grouped_mm_output_tensor as _empty_result
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = ["forget_grouped_shapes", "is_foreign", "kernel_rows", "shape_groups"]

_GROUPED = torch.ops.aten._grouped_mm.default
#: whether torch may hold a result of ours
_is_kept = [False]


def kernel_rows(*matrices: torch.Tensor, itemsize: int) -> bool:
    """Whether the kernel of ``_grouped_mm`` takes matrices in a dtype of this size: their rows are whole 16 bytes.

    As in the fake or real values given; a copy in another dtype may have no gaps between its rows.
    """
    step = 16 // itemsize
    for matrix in matrices:
        inner, outer = (-1, -2) if matrix.stride(-1) == 1 else (-2, -1)
        if matrix.shape[inner] % step or matrix.stride(outer) % step:
            return False
    return True


def shape_groups(_: object) -> None:
    """From now on fake tensors of these dtypes have a result, but under a frame of another backend."""
    register_op_impl(_GROUPED)(_result)


def forget_grouped_shapes(_: object) -> None:
    """Before another frame is traced: torch keeps the shapes of results by those of arguments, for all backends."""
    if not _is_kept[0]:
        return
    _is_kept[0] = False
    for key in [key for key in FakeTensorMode.cache if key.key[0] is _GROUPED]:
        del FakeTensorMode.cache[key]


def _result(
    mode: FakeTensorMode,
    _op: object,
    left: FakeTensor,
    right: FakeTensor,
    offs: FakeTensor | None = None,
    bias: FakeTensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Any:
    """Torch's own result, or NotImplemented where torch's own function is to say what it is, or why there is none."""
    is_taken = left.dtype in (torch.float32, torch.float16) and right.dtype is left.dtype
    if not is_taken or bias is not None or out_dtype not in (None, left.dtype) or is_foreign():
        return NotImplemented
    _is_kept[0] = True
    with mode:
        result = _empty_result(left, right, offs, None)
    # Inductor takes rows of results for aligned, too
    return result if kernel_rows(left, right, result, itemsize=left.itemsize) else NotImplemented


def is_foreign() -> bool:
    """True while Dynamo traces a frame for another backend than ours."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    try:
        backend: Any = InstructionTranslator.current_tx().output.compiler_fn
    except AttributeError:
        # nobody traces
        return False
    # by name and with options; for a report
    for wrapper in ("_torchdynamo_orig_backend", "compiler_fn"):
        backend = getattr(backend, wrapper, backend)
    if isinstance(backend, functools.partial):
        backend = backend.func
    return getattr(backend, "__module__", "").partition(".")[0] != __name__.partition(".")[0]
