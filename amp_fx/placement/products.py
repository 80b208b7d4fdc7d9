"""Matmuls that add to what is there: the library's last step, in fp32, instead of a kernel of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from amp_fx._torch import OpOverload

__all__ = ["ADD_PRODUCT"]

_library = torch.library.Library("amp_fx", "FRAGMENT")
_library.define(
    "add_product_(Tensor(a!) total, Tensor x, Tensor y) -> ()", tags=(torch.Tag.pt2_compliant_tag,)
)


@torch.library.impl(_library, "add_product_", "CUDA")
def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """Adds the product of two 16-bit matrices to an fp32 one, in place."""
    torch.ops.aten.addmm.dtype_out(total, x, y, torch.float32, out=total)


@torch.library.register_fake("amp_fx::add_product_", lib=_library)
def _(total: Tensor, x: Tensor, y: Tensor) -> None:
    return None


#: (total, x, y) -> nothing; total += x @ y
ADD_PRODUCT: OpOverload = torch.ops.amp_fx.add_product_.default
