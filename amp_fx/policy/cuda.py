"""Op lists of CUDA autocast; xpu, mtia, maia and hpu expand the same macros.

Rows of origin ``autocast`` follow the macros of ``ATen/autocast_mode.h``, which their comments name.
"""

from __future__ import annotations

from .classes import OpClass, OpGroup, Origin
from .listed import LISTED_GROUPS

__all__ = ["CUDA_GROUPS"]

_LISTED = "listed by CUDA autocast"

CUDA_GROUPS: tuple[OpGroup, ...] = (
    *LISTED_GROUPS,
    # ---- AT_FORALL_LOWER_PRECISION_FP ----
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"matrix product on the tensor cores, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("addmv", "addr", "chain_matmul", "einsum", "linalg_multi_dot", "mv"),
    ),
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"convolution on the tensor cores, {_LISTED}",
        origin=Origin.AUTOCAST,
        # the cudnn ones are registered beside the macro, for CUDA only
        ops=("_convolution", "convolution", "cudnn_convolution", "cudnn_convolution_transpose"),
    ),
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"attention: its softmax is in fp32 inside the kernel, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("_scaled_dot_product_flash_attention",),
    ),
    OpGroup(
        op_class=OpClass.LOW,
        reason=f"recurrent cell: two matrix products, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=(
            "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "gru_cell", "lstm_cell", "rnn_relu_cell",
            "rnn_tanh_cell",
        ),
    ),
    # ---- AT_FORALL_FP32 ----
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"transcendental: range or digits beyond fp16, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=(
            "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2", "pow.Scalar",
            "pow.Tensor_Scalar", "pow.Tensor_Tensor", "reciprocal", "rsqrt", "sinh", "softplus", "tan",
        ),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"normalisation: sums of squares, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("group_norm", "layer_norm", "native_layer_norm"),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"normalisation: sums of squares, {_LISTED}",
        origin=Origin.AUTOCAST,
        since="2.12",  # pytorch#174824
        ops=("rms_norm",),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason="normalisation: returns the dtype of its input, not listed by CUDA autocast before torch 2.12",
        origin=Origin.COMPOSITE,
        own_dtype_slots=("weight",),
        until="2.12",
        ops=("rms_norm",),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"norm or distance: sums of powers, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=(
            "cosine_similarity", "dist", "frobenius_norm.dim", "logsumexp", "nuclear_norm",
            "nuclear_norm.dim", "pdist", "renorm",
        ),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        # registered by hand: autocast raises, since its cast cannot keep the gradient from leaving fp16
        reason="loss that torch.autocast refuses on CUDA; in fp32 the forward is exact,"
        " but prefer binary_cross_entropy_with_logits",
        origin=Origin.AUTOCAST,
        ops=("binary_cross_entropy",),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"resampling: its backward adds up many gradients, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=(
            "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d",
            "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_bicubic2d",
            "upsample_bilinear2d", "upsample_linear1d", "upsample_nearest1d", "upsample_nearest2d",
            "upsample_nearest3d", "upsample_trilinear3d",
        ),
    ),
    # ---- AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE ----
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"sum or softmax: long sums, {_LISTED}",
        origin=Origin.AUTOCAST,
        unless_given=("dtype",),
        ops=(
            "cumprod", "cumsum", "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "linalg_vector_norm",
            "log_softmax.int", "softmax.int", "sum", "sum.dim_IntList",
        ),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=f"norm: sum of powers, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("norm.Scalar", "norm.ScalarOpt_dim"),
    ),
    # ---- AT_FORALL_PROMOTE ----
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"needs one dtype, {_LISTED}",
        origin=Origin.AUTOCAST,
        ops=("bilinear", "cross", "dot", "grid_sampler", "index_put", "scatter_add", "tensordot", "vdot"),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason=f"pointwise: native type promotion, {_LISTED}",
        origin=Origin.AUTOCAST,
        mixes=True,
        ops=("addcdiv", "addcmul", "atan2"),
    ),
    # ---- composites whose inner ops are listed above ----
    OpGroup(
        op_class=OpClass.LOW,
        reason="composite: its inner convolution is listed as low",
        origin=Origin.COMPOSITE,
        ops=("_convolution_mode", "conv1d.padding", "conv2d.padding", "conv3d.padding"),
    ),
    OpGroup(
        op_class=OpClass.LOW,
        reason="recurrent layer: cudnn runs it low, and its cells are listed as low",
        origin=Origin.COMPOSITE,
        ops=("gru.input",),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason="composite: its inner tensordot promotes",
        origin=Origin.COMPOSITE,
        ops=("inner",),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason="loss: its inner log_softmax and nll_loss are listed as fp32",
        origin=Origin.COMPOSITE,
        ops=("cross_entropy_loss",),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason="loss without a half kernel",
        origin=Origin.UNLISTED,
        ops=("ctc_loss.IntList", "ctc_loss.Tensor"),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason="resampling: its inner upsample is listed as fp32",
        origin=Origin.COMPOSITE,
        ops=(
            "_upsample_bicubic2d_aa.vec", "_upsample_bilinear2d_aa.vec", "_upsample_nearest_exact1d.vec",
            "_upsample_nearest_exact2d.vec", "_upsample_nearest_exact3d.vec", "upsample_bicubic2d.vec",
            "upsample_bilinear2d.vec", "upsample_linear1d.vec", "upsample_nearest1d.vec",
            "upsample_nearest2d.vec", "upsample_nearest3d.vec", "upsample_trilinear3d.vec",
        ),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason="alias of an op that is listed as fp32",
        origin=Origin.COMPOSITE,
        unless_given=("dtype",),  # of the softmax ones
        ops=(
            "arccos", "arcsin", "special_erfinv", "special_expm1", "special_log1p", "special_log_softmax",
            "special_logsumexp", "special_softmax", "square",
        ),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason="norm or distance: its inner norm is listed as fp32",
        origin=Origin.COMPOSITE,
        unless_given=("dtype",),
        ops=("linalg_norm", "linalg_norm.ord_str", "norm_except_dim", "pairwise_distance"),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason="integral or sum: its inner sum is listed as fp32",
        origin=Origin.COMPOSITE,
        ops=(
            "cumulative_trapezoid.dx", "cumulative_trapezoid.x", "sum_to_size", "trapezoid.dx", "trapezoid.x",
            "trapz.dx", "trapz.x",
        ),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason="fused attention layer, not listed by CUDA autocast: runs in the dtype of its inputs",
        origin=Origin.UNLISTED,
        ops=("_native_multi_head_attention",),
    ),
    OpGroup(
        op_class=OpClass.PROMOTE,
        reason="normalisation with its statistics, not listed by CUDA autocast",
        origin=Origin.UNLISTED,
        ops=("native_group_norm",),
    ),
)  # fmt: skip
