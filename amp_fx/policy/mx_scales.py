"""Scales of blocks as libraries read them: one byte each (e8m0), in tiles of 128 rows and 4 columns.

OCP Microscaling Formats (MX) 1.0 has the byte; the order within a tile is that of cuBLAS,
https://docs.nvidia.com/cuda/cublas/#d-block-scaling-factors-layout.
"""

from __future__ import annotations

from typing import Any

import torch

from amp_fx.policy.fp8_copy import Call

__all__ = ["TILE", "block_scales"]

aten, prims = torch.ops.aten, torch.ops.prims

#: rows and columns of a tile. Byte 16 * (row % 32) + 4 * (row // 32) + column of it is the scale at (row, column)
TILE = (128, 4)

_MANTISSA_BITS = 23
_EXPONENT = 0xFF


def block_scales(factors: Any, call: Call) -> Any:
    """Factors of blocks as :func:`torch._scaled_mm` takes them.

    Args:
        factors: fp32 ``[rows, blocks, 1]``, powers of two up to rounding errors, sizes known. Infinity becomes NaN,
            which e8m0 has; what stands for a NaN is any number, as everything that was scaled by it is NaN.
        call: what every step is made with.

    Returns:
        e8m0, in one dimension, so that no compiler lays it out otherwise: rows and blocks filled up with the smallest
        scale to full tiles, tile after tile.
    """
    # the exponent of the nearest power of two: functions of a device may miss it by a bit
    bits = call(aten.view.dtype, factors, torch.int32)
    bits = call(aten.add.Tensor, bits, 1 << (_MANTISSA_BITS - 1))
    bits = call(aten.bitwise_right_shift.Tensor_Scalar, bits, _MANTISSA_BITS)
    bits = call(aten.bitwise_and.Scalar, bits, _EXPONENT)
    scales = call(prims.convert_element_type.default, bits, torch.uint8)
    rows, blocks, _ = _shape(factors)
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


def _shape(value: Any) -> tuple[int, ...]:
    """Of a tensor, or of what a node of a graph stands for."""
    return tuple(value.meta["val"].shape if hasattr(value, "meta") else value.shape)
