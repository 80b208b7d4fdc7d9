"""Op lists of MPS autocast: those of CUDA autocast, without what MPS does not register.

Rows of origin ``autocast`` are what ``ATen/autocast_mode.cpp`` registers for ``AutocastMPS``.
"""

from __future__ import annotations

from dataclasses import replace

from .classes import OpClass, OpGroup, Origin
from .common import NEAREST
from .cuda import CUDA_GROUPS

__all__ = ["MPS_GROUPS"]

_LISTED = "listed by MPS autocast"
_UNLISTED = "not listed by MPS autocast"

_UNLISTED_GROUPS: tuple[OpGroup, ...] = (
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"recurrent cell or layer: carries its state in the dtype given, {_UNLISTED}",
        origin=Origin.UNLISTED,
        ops=("_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru.input", "gru_cell", "lstm.input"),
    ),
    OpGroup(
        op_class=OpClass.LOW,
        reason="composite: its inner linear is listed as low",
        origin=Origin.COMPOSITE,
        ops=("rnn_relu_cell", "rnn_tanh_cell"),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason="composite: its inner sum is listed as fp32",
        origin=Origin.COMPOSITE,
        ops=("linalg_vecdot",),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"normalisation: returns the dtype of its input, {_UNLISTED}",
        origin=Origin.UNLISTED,
        own_dtype_slots=("weight",),
        ops=("rms_norm",),
    ),
    OpGroup(
        op_class=OpClass.FOLLOW,
        reason=f"nearest resampling: moves values, {_UNLISTED}",
        origin=Origin.UNLISTED,
        ops=NEAREST,
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"resampling, {_UNLISTED}",
        origin=Origin.UNLISTED,
        ops=(
            "_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa.vec", "_upsample_bilinear2d_aa",
            "_upsample_bilinear2d_aa.vec", "upsample_bicubic2d", "upsample_bicubic2d.vec",
            "upsample_bilinear2d", "upsample_bilinear2d.vec", "upsample_linear1d", "upsample_linear1d.vec",
            "upsample_trilinear3d", "upsample_trilinear3d.vec",
        ),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"runs in the dtype of its inputs, {_UNLISTED}",
        origin=Origin.UNLISTED,
        ops=(
            "_scaled_dot_product_flash_attention", "binary_cross_entropy", "norm.Scalar", "norm.ScalarOpt_dim",
            "norm_except_dim", "pairwise_distance",
        ),
    ),
)  # fmt: skip

#: of CUDA's lists; the common list has a row for vdot, and conv_transpose3d is in another class
_ELSEWHERE = frozenset(
    {"conv_transpose3d.input", "cudnn_convolution", "cudnn_convolution_transpose", "vdot"}.union(
        *(group.ops for group in _UNLISTED_GROUPS)
    )
)


def _of_mps(group: OpGroup) -> OpGroup:
    """A row of CUDA's lists, as far as it holds here."""
    return replace(
        group,
        reason=group.reason.replace("CUDA autocast", "MPS autocast").replace("tensor cores", "GPU"),
        ops=tuple(name for name in group.ops if name not in _ELSEWHERE),
    )


MPS_GROUPS: tuple[OpGroup, ...] = (
    *filter(lambda group: group.ops, map(_of_mps, CUDA_GROUPS)),
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"convolution, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("_mps_convolution",),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"normalisation: sums of squares, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("batch_norm",),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"convolution as in fp32, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("conv_transpose3d.input",),
    ),
    *_UNLISTED_GROUPS,
)
