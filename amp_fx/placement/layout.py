"""Casts that change the layout as well: the weights of convolutions, which run channels last on a CPU.

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

from amp_fx._torch import OpOverload, own_op
from amp_fx.graphs.calls import CAST
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import LOW_DTYPES

aten = torch.ops.aten

#: elements of a 16-bit piece: half of a megabyte, the second-level cache of today's cores
_PIECE = 2**18
#: elements below which calling the library costs what its copy saves
_WORTH_A_CALL = 2**15


def _convert(x: Tensor, dtype: torch.dtype, stride: Sequence[int]) -> Tensor:
    """``x`` in another dtype, laid out as ``stride`` says. ``x`` has at least one dimension."""
    result = torch.empty_strided(x.shape, stride, dtype=dtype, device=x.device)
    # Two steps, of which the one that reads against the layout is in 16 bits; what is between them stays in the cache
    rows = max(1, _PIECE * len(x) // max(1, x.numel()))
    for piece, source in zip(result.split(rows), x.split(rows), strict=True):
        if dtype in LOW_DTYPES:
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


def lay_out(cast: fx.Node, stride: Sequence[int]) -> None:
    """Puts a call that also changes the layout in the place of a cast."""
    work = Rewriter(cast.graph, captured=False)
    with work.before(cast):
        laid_out = work.call(convert_op(), cast.all_input_nodes[0], cast.meta["val"].dtype, list(stride))
    work.replace(cast, laid_out)


def is_convolution(node: fx.Node) -> bool:
    """True for calls that Inductor lays out channels last; the second argument is the weight."""
    return has_trait(node, Trait.PLANAR_CONVOLUTION)


def relaid_weight(node: object) -> fx.Node | None:
    """The input of a graph of AOTAutograd's that a 16-bit value is cast from, if it is worth laying out."""
    if not isinstance(node, fx.Node) or node.target is not CAST or node.meta["val"].dtype not in LOW_DTYPES:
        return None
    (source,) = node.all_input_nodes
    return source if source.op == "placeholder" and is_relaid(source.meta["val"]) else None


def is_relaid(weight: Tensor) -> bool:
    """True for a convolution's weight on a CPU whose conversion to or from channels last is worth a library call."""
    return (
        weight.device.type == "cpu"
        and weight.ndim == 4
        and all(isinstance(size, int) for size in weight.shape)
        and weight.numel() >= _WORTH_A_CALL
        and weight.is_contiguous()
        # as with kernels of 1 x 1 and one channel per group
        and not weight.is_contiguous(memory_format=torch.channels_last)
    )
