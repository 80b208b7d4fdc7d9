"""Op lists of CPU autocast, shorter than CUDA's: softmax, layer_norm, sum and exp stay in the low dtype.

Rows of origin ``autocast`` follow ``KERNEL_CPU`` in ``aten/src/ATen/autocast_mode.cpp``.
"""

from __future__ import annotations

from .classes import OpClass, OpGroup, Origin
from .common import FFT, LINALG, LINALG_UNTIL_2_14, NEAREST
from .listed import LISTED_GROUPS

__all__ = ["CPU_GROUPS"]

_LISTED = "listed by CPU autocast"
_UNLISTED = "not listed by CPU autocast"
_NEEDS_DIGITS = f"linear algebra: needs the digits, {_LISTED}"

CPU_GROUPS: tuple[OpGroup, ...] = (
    *LISTED_GROUPS,
    # ---- KERNEL_CPU(..., lower_precision_fp) ----
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"matrix product with low-precision instructions, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("_addmm_activation",),
    ),
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"convolution with low-precision instructions, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("conv1d.padding", "conv2d.padding", "conv3d.padding"),
    ),
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"attention: its softmax is in fp32 inside the kernel, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("_native_multi_head_attention",),
    ),
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"recurrent layer, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("mkldnn_rnn_layer",),
    ),
    # ---- KERNEL_CPU(..., fp32) ----
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"loss: small differences, long sums, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=(
            "binary_cross_entropy", "cross_entropy_loss", "ctc_loss.IntList", "ctc_loss.Tensor",
            "multilabel_margin_loss_forward",
        ),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"pooling, padding or sampling, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=(
            "_grid_sampler_2d_cpu_fallback", "adaptive_avg_pool3d", "adaptive_max_pool3d", "avg_pool3d",
            "fractional_max_pool2d", "fractional_max_pool3d", "grid_sampler", "grid_sampler_2d",
            "grid_sampler_3d", "max_pool3d", "max_unpool2d", "max_unpool3d", "reflection_pad1d",
            "reflection_pad2d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
        ),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"statistics or distance, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("nanquantile", "nanquantile.scalar", "quantile", "quantile.scalar", "trace"),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"transform or complex numbers, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=(*FFT, "polar", "view_as_complex"),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=_NEEDS_DIGITS,
        origin=Origin.AUTOCAST,
        ops=LINALG,
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=_NEEDS_DIGITS,
        origin=Origin.AUTOCAST,
        until="2.14",
        ops=LINALG_UNTIL_2_14,
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"fake quantization, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("fake_quantize_per_tensor_affine",),
    ),
    # ---- KERNEL_CPU(..., promote) ----
    OpGroup(
        op_class=OpClass.FOLLOW,  # the widest of its inputs, which is what the promote list asks for
        reason=f"joins tensors: moves values, in the widest dtype of its inputs, {_LISTED}",
        origin=Origin.AUTOCAST,
        mixes=True,
        ops=("cat", "stack"),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"needs one dtype, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("index_copy",),
    ),
    # ---- composites whose inner ops are listed above ----
    OpGroup(
        op_class=OpClass.LOW,
        reason="composite: its inner mm, bmm or linear is listed as low",
        origin=Origin.COMPOSITE,
        ops=(
            "chain_matmul", "einsum", "inner", "linalg_multi_dot", "rnn_relu_cell", "rnn_tanh_cell",
            "tensordot",
        ),
    ),
    # ---- listed on CUDA, left in the dtype of their inputs here ----
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"recurrent cell or layer: carries its state in the dtype given, {_UNLISTED}",
        origin=Origin.COMPOSITE,
        ops=("gru.input", "gru_cell", "lstm_cell"),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"normalisation: sums in fp32 inside the kernel and takes fp32 weights with a low input,"
        f" {_UNLISTED}",
        origin=Origin.UNLISTED,
        own_dtype_slots=("weight", "bias"),
        ops=("group_norm", "layer_norm", "native_group_norm", "native_layer_norm", "rms_norm"),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"sum or softmax: sums in fp32 inside the kernel, {_UNLISTED}",
        origin=Origin.UNLISTED,
        unless_given=("dtype",),
        ops=(
            "cumprod", "cumsum", "log_softmax.int", "logsumexp", "softmax.int", "special_log_softmax",
            "special_logsumexp", "special_softmax", "sum", "sum.dim_IntList", "sum_to_size",
        ),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"norm or distance: sums in fp32 inside the kernel, {_UNLISTED}",
        origin=Origin.UNLISTED,
        unless_given=("dtype",),
        ops=(
            "cosine_similarity", "dist", "frobenius_norm.dim", "linalg_matrix_norm",
            "linalg_matrix_norm.str_ord", "linalg_norm", "linalg_norm.ord_str", "linalg_vector_norm",
            "norm.Scalar", "norm.ScalarOpt_dim", "norm_except_dim", "pairwise_distance", "renorm",
        ),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"product of vectors or convolution by its inner name, {_UNLISTED}",
        origin=Origin.UNLISTED,
        ops=("_convolution", "_convolution_mode", "addmv", "addr", "bilinear", "convolution", "mv"),
    ),
    OpGroup(
        op_class=OpClass.FOLLOW,
        reason=f"nearest resampling: moves values, {_UNLISTED}",
        origin=Origin.UNLISTED,
        ops=NEAREST,
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"resampling: interpolates in fp32 inside the kernel, {_UNLISTED}",
        origin=Origin.UNLISTED,
        ops=(
            "upsample_bicubic2d", "upsample_bicubic2d.vec", "upsample_bilinear2d", "upsample_bilinear2d.vec",
            "upsample_linear1d", "upsample_linear1d.vec", "upsample_trilinear3d", "upsample_trilinear3d.vec",
        ),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"pointwise alias, {_UNLISTED}",
        origin=Origin.UNLISTED,
        mixes=True,
        ops=("arccos", "arcsin", "special_erfinv", "special_expm1", "special_log1p"),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"integral, {_UNLISTED}",
        origin=Origin.UNLISTED,
        ops=(
            "cumulative_trapezoid.dx", "cumulative_trapezoid.x", "trapezoid.dx", "trapezoid.x", "trapz.dx",
            "trapz.x",
        ),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason="no half kernel",
        origin=Origin.UNLISTED,
        ops=(
            "_upsample_bicubic2d_aa", "_upsample_bicubic2d_aa.vec", "_upsample_bilinear2d_aa",
            "_upsample_bilinear2d_aa.vec", "nuclear_norm", "nuclear_norm.dim", "pdist",
        ),
    ),
)  # fmt: skip
