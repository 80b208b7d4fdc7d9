"""Op lists of CUDA autocast, and of MPS autocast, which has most of its rows; xpu, mtia, maia and hpu have all.

Listed rows follow the macros of ``ATen/autocast_mode.h``, which comments name, and for MPS what
``ATen/autocast_mode.cpp`` registers for ``AutocastMPS``.
"""

from .classes import composite, follow, fp32, listed, low, promote, unlisted
from .common import LISTED_GROUPS, NEAREST

CUDA_GROUPS = (
    *LISTED_GROUPS,
    *listed(
        # AT_FORALL_LOWER_PRECISION_FP
        low(
            "matrix product with low-precision instructions",
            "addmv addr chain_matmul einsum linalg_multi_dot mv",
        ),
        low("convolution with low-precision instructions", "_convolution convolution"),
        low("attention: its softmax is in fp32 inside the kernel", "_scaled_dot_product_flash_attention"),
        low(
            "recurrent cell: two matrix products",
            "_thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell",
        ),
        # AT_FORALL_FP32
        fp32("transcendental: range or digits beyond fp16", """
            acos asin cosh erfinv exp expm1 log log10 log1p log2 pow.Scalar pow.Tensor_Scalar
            pow.Tensor_Tensor reciprocal rsqrt sinh softplus tan
        """),
        fp32("normalisation: sums of squares", "group_norm layer_norm native_layer_norm"),
        fp32("normalisation: sums of squares", "rms_norm", since="2.12"),  # pytorch#174824
        fp32(
            "norm or distance: sums of powers",
            "cosine_similarity dist frobenius_norm.dim logsumexp nuclear_norm nuclear_norm.dim pdist renorm",
        ),
        # registered by hand: autocast raises, since its cast cannot keep the gradient from leaving fp16
        fp32(
            "loss that torch.autocast refuses: the forward is exact in fp32; prefer binary_cross_entropy_with_logits",
            "binary_cross_entropy",
        ),
        fp32("resampling: its backward adds up many gradients", """
            _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
            _upsample_nearest_exact3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d
            upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
        """),
        # AT_FORALL_FP32_SET_OPT_DTYPE and AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE
        fp32("sum or softmax: long sums", """
            cumprod cumsum linalg_matrix_norm linalg_matrix_norm.str_ord linalg_vector_norm log_softmax.int
            softmax.int sum sum.dim_IntList
        """, unless_given="dtype"),
        fp32("norm: sum of powers", "norm.Scalar norm.ScalarOpt_dim"),
        # AT_FORALL_PROMOTE
        promote("needs one dtype", "bilinear cross dot grid_sampler index_put scatter_add tensordot vdot"),
        promote("pointwise: native type promotion", "addcdiv addcmul atan2", mixes=True),
    ),
    *composite(
        promote(
            "normalisation: returns the dtype of its input before torch 2.12",
            "rms_norm", own_dtype_slots="weight", until="2.12",
        ),
        low(
            "composite: its inner convolution is listed as low",
            "_convolution_mode conv1d.padding conv2d.padding conv3d.padding",
        ),
        low("recurrent layer: cudnn runs it low, and its cells are listed as low", "gru.input"),
        promote("composite: its inner tensordot promotes", "inner"),
        fp32("loss: its inner log_softmax and nll_loss are listed as fp32", "cross_entropy_loss"),
        fp32("resampling: its inner upsample is listed as fp32", """
            _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.vec _upsample_nearest_exact1d.vec
            _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec upsample_bicubic2d.vec
            upsample_bilinear2d.vec upsample_linear1d.vec upsample_nearest1d.vec upsample_nearest2d.vec
            upsample_nearest3d.vec upsample_trilinear3d.vec
        """),
        fp32("alias of an op that is listed as fp32", """
            arccos arcsin special_erfinv special_expm1 special_log1p special_log_softmax special_logsumexp
            special_softmax square
        """, unless_given="dtype"),  # of the softmax ones
        fp32(
            "norm or distance: its inner norm is listed as fp32",
            "linalg_norm linalg_norm.ord_str norm_except_dim pairwise_distance", unless_given="dtype",
        ),
        fp32("integral or sum: its inner sum is listed as fp32", """
            cumulative_trapezoid.dx cumulative_trapezoid.x sum_to_size trapezoid.dx trapezoid.x trapz.dx
            trapz.x
        """),
    ),
    *unlisted(
        fp32("loss without a half kernel", "ctc_loss.IntList ctc_loss.Tensor"),
        promote("fused attention layer: runs in the dtype of its inputs", "_native_multi_head_attention"),
        promote("normalisation with its statistics", "native_group_norm"),
    ),
)  # fmt: skip

#: registered beside the macros, and for CUDA only
CUDA_ALONE = listed(
    low("convolution with low-precision instructions", "cudnn_convolution cudnn_convolution_transpose"),
    fp32("linear algebra: needs the digits", "linalg_matrix_sqrth", since="2.14"),
)

#: rows that MPS autocast has in place of those of CUDA's, or besides
MPS_GROUPS = (
    *listed(
        low("convolution", "_mps_convolution"),
        fp32("normalisation: sums of squares", "batch_norm"),
        fp32("convolution as in fp32", "conv_transpose3d.input"),
    ),
    *composite(
        low("composite: its inner linear is listed as low", "rnn_relu_cell rnn_tanh_cell"),
        fp32("composite: its inner sum is listed as fp32", "linalg_vecdot"),
    ),
    *unlisted(
        promote(
            "recurrent cell or layer: carries its state in the dtype given",
            "_thnn_fused_gru_cell _thnn_fused_lstm_cell gru.input gru_cell lstm.input",
        ),
        promote("normalisation: returns the dtype of its input", "rms_norm", own_dtype_slots="weight"),
        follow("nearest resampling: moves values", NEAREST),
        promote("resampling", """
            _upsample_bicubic2d_aa _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa
            _upsample_bilinear2d_aa.vec upsample_bicubic2d upsample_bicubic2d.vec upsample_bilinear2d
            upsample_bilinear2d.vec upsample_linear1d upsample_linear1d.vec upsample_trilinear3d
            upsample_trilinear3d.vec
        """),
        promote("runs in the dtype of its inputs", """
            _scaled_dot_product_flash_attention binary_cross_entropy norm.Scalar norm.ScalarOpt_dim
            norm_except_dim pairwise_distance vdot
        """),
    ),
)  # fmt: skip
