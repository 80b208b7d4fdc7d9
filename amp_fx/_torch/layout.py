"""A cast that changes the layout as well: the weights of convolutions, which run channels last on a CPU.

Inductor compiles such a cast into a kernel that moves tiles of 16 by 9 elements through memory, scalar by scalar, and
autograd copies a gradient that does not lie as its parameter. The library's copies, in pieces that stay in a core's
cache, take 0.6 to 1 of the time for a weight and 0.3 to 0.7 for a gradient, the less the larger they are (measured on
a Zen 5). What a step gains by it: ``python -m benchmarks --only resnet_cifar``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.fx as fx
from torch import Tensor

from amp_fx._torch.tracing import OpOverload, own_op

__all__ = ["convert_op", "is_convert"]

#: elements of a 16-bit piece: half of a megabyte, the second-level cache of today's cores
_PIECE = 2**18


def _convert(x: Tensor, dtype: torch.dtype, stride: Sequence[int]) -> Tensor:
    """``x`` in another dtype, laid out as ``stride`` says. ``x`` has at least one dimension."""
    result = torch.empty_strided(x.shape, stride, dtype=dtype, device=x.device)
    # Two steps, of which the one that reads against the layout is in 16 bits; what is between them stays in the cache
    rows = max(1, _PIECE * len(x) // max(1, x.numel()))
    for piece, source in zip(result.split(rows), x.split(rows), strict=True):
        if dtype.itemsize == 2:
            piece.copy_(source.to(dtype))
        else:
            piece.copy_(torch.empty_like(piece, dtype=source.dtype).copy_(source))
    return result


def convert_op() -> OpOverload:
    """``(x, dtype, stride) -> a new tensor with the values of x``. Torch knows the op once this was called."""
    return own_op(
        "convert(Tensor x, ScalarType dtype, int[] stride) -> Tensor",
        _convert,
        lambda x, dtype, stride: x.new_empty_strided(x.shape, stride, dtype=dtype),
        key="CPU",
        # no strides are asked of its input: undoing them is what it is for
        tags=(torch.Tag.flexible_layout,),
    )


def is_convert(node: fx.Node) -> bool:
    """True for calls of that op."""
    return str(node.target) == "amp_fx.convert.default"
