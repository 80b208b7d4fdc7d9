"""Operands with scales, and their product: the arithmetic of levels below 16 bits, for nodes of a graph and tensors.

Scales are those of torchao: the largest magnitude becomes the largest number of the dtype. FP8 Formats for Deep
Learning, https://arxiv.org/abs/2209.05433. Scales of blocks: OCP Microscaling Formats (MX) 1.0 has the byte; the order
in which libraries read them is that of cuBLAS, https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from amp_fx._torch import quantised_ops

aten, prims = torch.ops.aten, torch.ops.prims

#: runs an op, or adds it to a graph: ``call(op, *args, **kwargs)``
Emit = Callable[..., Any]
#: the smallest magnitude that a scale is made for: scale and inverse are normal numbers in fp32, and zeros stay zeros
_LEAST = 2.0**-100
#: what stands for zero in uint8
ZERO_POINT = 128
#: scales of blocks in a tile: rows and columns. Byte 16 * (row % 32) + 4 * (row // 32) + column of it is the scale at
#: (row, column)
TILE = (128, 4)

_MANTISSA_BITS = 23
_EXPONENT = 0xFF


def run(target: Any, /, *args: Any, **kwargs: Any) -> Any:
    """The :data:`Emit` for tensors."""
    return target(*args, **kwargs)


def scale_of(
    value: Any, dtype: torch.dtype, groups: Sequence[list[int]], call: Emit, *, powers: bool, is_wide: bool
) -> Any:
    """The factor of a value before it is rounded to a dtype; fp32, of size 1 in the dimensions of the groups.

    A scale is shared over the dimensions of the groups, which are reduced one group after the other. Scales that are
    powers of two round nothing themselves.
    """
    amax = call(aten.abs.default, value)
    for dims in groups:
        amax = call(aten.amax.default, amax, dims, True)
    if not is_wide:
        amax = call(prims.convert_element_type.default, amax, torch.float32)
    amax = call(aten.clamp_min.default, amax, _LEAST)
    scale = call(aten.mul.Tensor, call(aten.reciprocal.default, amax), _largest(dtype))
    if powers:
        for function in (aten.log2.default, aten.floor.default, aten.exp2.default):
            scale = call(function, scale)
    return scale


def scaled(value: Any, scale: Any, dtype: torch.dtype, call: Emit) -> tuple[Any, Any]:
    """A value in e4m3, e5m2, int8 or uint8, laid out as it was, and the factors in fp32: ``value ~ data * factors``.

    In uint8 :data:`ZERO_POINT` stands for zero. ``scale`` is from :func:`scale_of`.
    """
    largest, factors = _largest(dtype), call(aten.reciprocal.default, scale)
    # widened by the product itself: a cast of its own would make Inductor keep the value in fp32
    data = call(aten.mul.Tensor, value, scale)
    if not dtype.is_floating_point:
        data = call(aten.round.default, data)
        # integers have no NaN: the factor of an infinity has to become one
        factors = call(aten.add.Tensor, factors, call(aten.sub.Tensor, factors, factors))
    data = call(aten.clamp_min.default, data, -largest)
    data = call(aten.clamp_max.default, data, largest)
    if dtype is torch.uint8:
        data = call(aten.add.Tensor, data, ZERO_POINT)
    return call(prims.convert_element_type.default, data, dtype), factors


def quantised(value: Any, scale: float, zero_point: int, call: Emit) -> Any:
    """A value in uint8 by a scale that was measured; what is beyond its range saturates."""
    return call(quantised_ops().quantize_per_tensor.default, value, scale, zero_point, 0, 255, torch.uint8)


def _largest(dtype: torch.dtype) -> float:
    """The largest magnitude that values have in a dtype."""
    return torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(torch.int8).max


def block_scales(factors: Any, call: Emit) -> Any:
    """Factors of blocks as :func:`torch._scaled_mm` takes them: e8m0, tile after tile, filled up to full tiles.

    In one dimension, so that no compiler lays it out otherwise. Factors are fp32 ``[rows, blocks, 1]``, powers of two
    up to rounding errors. Infinity becomes NaN, which e8m0 has; what stands for a NaN is any number, as everything that
    was scaled by it is NaN.
    """
    # the exponent of the nearest power of two: functions of a device may miss it by a bit
    bits = call(aten.view.dtype, factors, torch.int32)
    bits = call(aten.add.Tensor, bits, 1 << (_MANTISSA_BITS - 1))
    bits = call(aten.bitwise_right_shift.Tensor_Scalar, bits, _MANTISSA_BITS)
    bits = call(aten.bitwise_and.Scalar, bits, _EXPONENT)
    scales = call(prims.convert_element_type.default, bits, torch.uint8)
    rows, blocks, _ = _value(factors).shape
    scales = call(aten.view.default, scales, [rows, blocks])
    below, beside = (-size % tile for size, tile in zip((rows, blocks), TILE, strict=True))
    if below or beside:
        scales = call(aten.constant_pad_nd.default, scales, [0, beside, 0, below], 0)
    full = [rows + below, blocks + beside]
    scales = call(aten.view.default, scales, [full[0] // TILE[0], 4, 32, full[1] // TILE[1], TILE[1]])
    scales = call(aten.permute.default, scales, [0, 3, 2, 1, 4])
    scales = call(aten.clone.default, scales, memory_format=torch.contiguous_format)
    scales = call(aten.view.default, scales, [-1])
    return call(aten.view.dtype, scales, torch.float8_e8m0fnu)


class Product(NamedTuple):
    """Two operands with scales, to be multiplied."""

    first: Any  # (rows, contracted), its rows in one piece each
    second: Any  # (contracted, columns), its columns in one piece each
    #: of both: one, ``[rows, 1]`` and ``[1, columns]``, or :func:`block_scales`; or one of all the first, and
    #: ``[columns, 1]``
    factors: tuple[Any, Any]
    bias: Any  # one number for each column, or None
    dtype: torch.dtype  # of the result
    is_forward: bool

    def finished(self, product: Any, factors: Any, call: Emit) -> Any:
        """The product in fp32 with its last factors and the bias, in the dtype of the result."""
        product = call(aten.mul.Tensor, product, factors)
        if self.bias is not None:
            product = call(aten.add.Tensor, product, self.bias)
        return call(prims.convert_element_type.default, product, self.dtype)


def scaled_mm(given: Product, call: Emit) -> Any:
    """The product by ``torch._scaled_mm``.

    Sums are exact to fp32 in the backward, and as the hardware adds up fastest in the forward. Library kernels take
    scales of one kind: with one for the first and one for each column of the second, those are multiplied behind the
    product, in fp32, where Inductor fuses that with what comes next.
    """
    multiply, (one, other), fast = aten._scaled_mm.default, given.factors, given.is_forward
    if _value(one).ndim == _value(other).ndim:
        return call(multiply, given.first, given.second, one, other, given.bias, None, given.dtype, fast)
    # without the factors of its columns the result may be beyond the range of fp16
    wide = torch.float32 if given.dtype is torch.float16 else given.dtype
    ones = call(aten.ones_like.default, one)
    product = call(multiply, given.first, given.second, one, ones, None, None, wide, fast)
    return given.finished(product, call(aten.view.default, other, [1, -1]), call)


def int8_mm(given: Product, call: Emit) -> Any:
    """The product of a matrix in int8 or uint8 and one in int8 by ``torch._int_mm``; sums are exact.

    A CPU without AVX-VNNI-INT8 multiplies unsigned by signed values in one instruction, signed ones in several.

    Both factors are multiplied first: one after the other, Inductor's freezing takes the product for a quantised one
    with signed values, for which oneDNN has reference kernels only on most CPUs, 200 times slower.
    """
    product = call(aten._int_mm.default, given.first, given.second)
    if _value(given.first).dtype is torch.uint8:
        # of the weight alone, so that it is a constant where that is one
        sums = call(aten.sum.dim_IntList, given.second, [0], dtype=torch.int32)
        product = call(aten.sub.Tensor, product, call(aten.mul.Tensor, sums, ZERO_POINT))
    product = call(prims.convert_element_type.default, product, torch.float32)
    return given.finished(product, call(aten.mul.Tensor, *given.factors), call)


def packed_int8_mm(given: Product, call: Emit) -> Any:
    """The product of a matrix in uint8 and one in int8, for Inductor on a CPU; sums are exact.

    These are the calls of a quantised model as PyTorch exports it, which Inductor's freezing makes one call of oneDNN
    with a packed weight of (``torch/_inductor/fx_passes/quantization.py``).
    """
    weight = call(aten.permute.default, given.second, [1, 0])
    pair = dequantised(given.first, (1.0, ZERO_POINT), weight, given.factors[1], torch.float32, call)
    return given.finished(call(aten.linear.default, *pair), given.factors[0], call)


def measured_int8_mm(given: Product, call: Emit) -> Any:
    """The product of a matrix from :func:`quantised` and one in int8, for Inductor on a CPU; sums are exact.

    The calls of a quantised model in bf16 as PyTorch exports it: what follows, activation, addition and the rounding of
    the result to uint8, becomes part of one call of oneDNN.
    """
    weight = call(aten.permute.default, given.second, [1, 0])
    pair = dequantised(given.first, given.factors[0], weight, given.factors[1], given.dtype, call)
    return call(aten.linear.default, *pair, given.bias)


def whole(value: Any, scale: tuple[float, int], call: Emit) -> Any:
    """A value from :func:`quantised`, in fp32."""
    return call(quantised_ops().dequantize_per_tensor.default, value, *scale, 0, 255, torch.uint8)


def dequantised(
    value: Any, scale: tuple[float, int], weight: Any, factors: Any, dtype: torch.dtype, call: Emit
) -> tuple[Any, Any]:
    """A value from :func:`quantised`, and a weight in int8 with a factor for each row, in a floating dtype again."""
    factors = call(aten.view.default, factors, [-1])
    # made of the weight, so that it is a constant where that is one
    zeros = call(aten.zeros_like.default, factors, dtype=torch.int64)
    wide = whole(value, scale, call)
    weight = call(
        quantised_ops().dequantize_per_channel.default, weight, factors, zeros, 0, -128, 127, torch.int8
    )
    if dtype is torch.float32:
        return wide, weight
    first, second = (call(prims.convert_element_type.default, each, dtype) for each in (wide, weight))
    return first, second


def _value(value: Any) -> torch.Tensor:
    """A tensor, or what a node of a graph stands for."""
    return value.meta["val"] if hasattr(value, "meta") else value
