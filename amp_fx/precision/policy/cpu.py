"""Op lists of CPU autocast, shorter than CUDA's: softmax, layer_norm, sum and exp stay in the low dtype.

Listed rows follow ``KERNEL_CPU`` in ``aten/src/ATen/autocast_mode.cpp``.
"""

from .classes import composite, follow, fp32, listed, low, promote, unlisted
from .common import FFT, LINALG, LINALG_UNTIL_2_14, LISTED_GROUPS, NEAREST

CPU_GROUPS = (
    *LISTED_GROUPS,
    *listed(
        # KERNEL_CPU(..., lower_precision_fp)
        low("matrix product with low-precision instructions", "_addmm_activation"),
        low("convolution with low-precision instructions", "conv1d.padding conv2d.padding conv3d.padding"),
        low("attention: its softmax is in fp32 inside the kernel", "_native_multi_head_attention"),
        low("recurrent layer", "mkldnn_rnn_layer"),
        # KERNEL_CPU(..., fp32)
        fp32("loss: small differences, long sums", """
            binary_cross_entropy cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor
            multilabel_margin_loss_forward
        """),
        fp32("pooling, padding or sampling", """
            _grid_sampler_2d_cpu_fallback adaptive_avg_pool3d adaptive_max_pool3d avg_pool3d
            fractional_max_pool2d fractional_max_pool3d grid_sampler grid_sampler_2d grid_sampler_3d
            max_pool3d max_unpool2d max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d
            replication_pad2d replication_pad3d
        """),
        fp32("statistics or distance", "nanquantile nanquantile.scalar quantile quantile.scalar trace"),
        fp32("transform or complex numbers", f"{FFT} polar view_as_complex"),
        fp32("linear algebra: needs the digits", LINALG),
        fp32("linear algebra: needs the digits", LINALG_UNTIL_2_14, until="2.14"),
        fp32("linear algebra: needs the digits", "linalg_matrix_sqrth", since="2.14"),
        fp32("fake quantization", "fake_quantize_per_tensor_affine"),
        # KERNEL_CPU(..., promote): the widest dtype of its inputs, which is what follow means
        follow("joins tensors: moves values, in the widest dtype of its inputs", "cat stack", mixes=True),
        promote("needs one dtype", "index_copy"),
    ),
    *composite(
        # their inner ops are listed above
        low(
            "composite: its inner mm, bmm or linear is listed as low",
            "chain_matmul einsum inner linalg_multi_dot rnn_relu_cell rnn_tanh_cell tensordot",
        ),
        promote(
            "recurrent cell or layer: carries its state in the dtype given",
            "gru.input gru_cell lstm_cell",
        ),
    ),
    # CUDA autocast lists them
    *unlisted(
        promote(
            "normalisation: sums in fp32 inside the kernel and takes fp32 weights with a low input",
            "group_norm layer_norm native_group_norm native_layer_norm rms_norm", own_dtype_slots="weight bias",
        ),
        promote("sum or softmax: sums in fp32 inside the kernel", """
            cumprod cumsum log_softmax.int logsumexp softmax.int special_log_softmax special_logsumexp
            special_softmax sum sum.dim_IntList sum_to_size
        """, unless_given="dtype"),
        promote("norm or distance: sums in fp32 inside the kernel", """
            cosine_similarity dist frobenius_norm.dim linalg_matrix_norm linalg_matrix_norm.str_ord
            linalg_norm linalg_norm.ord_str linalg_vector_norm norm.Scalar norm.ScalarOpt_dim norm_except_dim
            pairwise_distance renorm
        """, unless_given="dtype"),
        promote(
            "product of vectors or convolution by its inner name",
            "_convolution _convolution_mode addmv addr bilinear convolution mv",
        ),
        follow("nearest resampling: moves values", NEAREST),
        promote("resampling: interpolates in fp32 inside the kernel", """
            upsample_bicubic2d upsample_bicubic2d.vec upsample_bilinear2d upsample_bilinear2d.vec
            upsample_linear1d upsample_linear1d.vec upsample_trilinear3d upsample_trilinear3d.vec
        """),
        promote("pointwise alias", "arccos arcsin special_erfinv special_expm1 special_log1p", mixes=True),
        promote(
            "integral",
            "cumulative_trapezoid.dx cumulative_trapezoid.x trapezoid.dx trapezoid.x trapz.dx trapz.x",
        ),
        fp32("no half kernel", """
            _upsample_bicubic2d_aa _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa
            _upsample_bilinear2d_aa.vec nuclear_norm nuclear_norm.dim pdist
        """),
    ),
)  # fmt: skip
