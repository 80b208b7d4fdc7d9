"""Ops whose class does not depend on the device, because autocast lists them on none or says the same on all.

A device's own list wins over this one (``max_pool3d`` moves values here, but CPU autocast runs it in fp32).

Left out on purpose, so that they keep the dtypes the program was traced with: ops that create tensors or draw
random ones (``zeros``, ``arange``, ``rand_like``), ops that name their dtype (``to.dtype``, ``type_as``,
``norm.ScalarOpt_dtype``, ``mm.dtype``), ops whose result has one place per distinct value (``unique_dim``),
quantized ops, and everything in-place: the passes decide about writes by the storage they touch.
"""

from __future__ import annotations

from .classes import OpClass, OpGroup, Origin

__all__ = ["COMMON_GROUPS", "FFT", "LINALG", "LINALG_SINCE_2_14", "LINALG_UNTIL_2_14", "NEAREST"]

#: Fourier transforms: CPU autocast lists them as fp32; elsewhere half transforms exist for few sizes only.
FFT = (
    "fft_fft", "fft_fft2", "fft_fftn", "fft_hfft", "fft_ifft", "fft_ifft2", "fft_ifftn", "fft_ihfft",
    "fft_irfft", "fft_irfft2", "fft_irfftn", "fft_rfft", "fft_rfft2", "fft_rfftn", "stft", "stft.center",
)  # fmt: skip

#: Factorisations and solvers that CPU autocast lists as fp32; no device has half kernels for them.
LINALG = (
    "_lu_with_info", "cholesky_inverse", "cholesky_solve", "geqrf", "inverse", "linalg_cholesky",
    "linalg_cholesky_ex", "linalg_cond", "linalg_cond.p_str", "linalg_eig", "linalg_eigh", "linalg_eigvals",
    "linalg_eigvalsh", "linalg_householder_product", "linalg_inv", "linalg_inv_ex", "linalg_lstsq",
    "linalg_matrix_rank", "linalg_matrix_rank.atol_rtol_float", "linalg_matrix_rank.atol_rtol_tensor",
    "linalg_matrix_rank.tol_tensor", "linalg_qr", "linalg_solve", "linalg_svd", "linalg_svdvals",
    "linalg_tensorinv", "linalg_tensorsolve", "lu_solve", "orgqr", "ormqr", "pinverse", "svd",
    "triangular_solve",
)  # fmt: skip
#: of the same kind
LINALG_UNTIL_2_14 = ("cholesky", "qr")
LINALG_SINCE_2_14 = ("linalg_matrix_sqrth",)

#: nearest resampling: listed by CUDA autocast, not by others
NEAREST = (
    "_upsample_nearest_exact1d", "_upsample_nearest_exact1d.vec", "_upsample_nearest_exact2d",
    "_upsample_nearest_exact2d.vec", "_upsample_nearest_exact3d", "_upsample_nearest_exact3d.vec",
    "upsample_nearest1d", "upsample_nearest1d.vec", "upsample_nearest2d", "upsample_nearest2d.vec",
    "upsample_nearest3d", "upsample_nearest3d.vec",
)  # fmt: skip

_FOLLOW = OpClass.FOLLOW
_PROMOTE = OpClass.PROMOTE
_NEEDS_DIGITS = "linear algebra: no half kernel, and needs the digits"
_NO_HALF = "no half kernel"

COMMON_GROUPS: tuple[OpGroup, ...] = (
    # ---- follow: the op moves, selects or compares values; rounding before it or after it is the same ----
    OpGroup(
        op_class=_FOLLOW,
        reason="view or copy: moves values",
        origin=Origin.UNLISTED,
        ops=(
            "_conj_physical", "_reshape_alias", "_unsafe_view", "adjoint", "alias", "as_strided",
            "atleast_1d", "atleast_1d.Sequence", "atleast_2d", "atleast_2d.Sequence", "atleast_3d",
            "atleast_3d.Sequence", "broadcast_tensors", "broadcast_to", "cartesian_prod", "channel_shuffle",
            "chunk", "clone", "combinations", "conj", "conj_physical", "contiguous", "detach", "diag",
            "diag_embed", "diagflat", "diagonal", "dsplit.array", "dsplit.int", "expand",
            "flatten.using_ints", "flip", "fliplr", "flipud", "hsplit.array", "hsplit.int", "im2col", "lift",
            "lift_fresh", "lift_fresh_copy", "linalg_diagonal", "mH", "mT", "matrix_H", "meshgrid",
            "meshgrid.indexing", "moveaxis.int", "moveaxis.intlist", "movedim.int", "movedim.intlist",
            "narrow", "narrow.Tensor", "native_channel_shuffle", "numpy_T", "permute", "pixel_shuffle",
            "pixel_unshuffle", "positive", "ravel", "real", "repeat", "repeat_interleave.self_Tensor",
            "repeat_interleave.self_int", "reshape", "resolve_conj", "resolve_neg", "roll",
            "rot90", "select.int", "slice.Tensor", "split.Tensor", "split.sizes", "split_with_sizes",
            "squeeze", "squeeze.dim", "squeeze.dims", "swapaxes", "swapdims", "t", "tensor_split.indices",
            "tensor_split.sections", "tensor_split.tensor_indices_or_sections", "tile", "transpose.int",
            "tril", "triu", "unbind.int", "unflatten.int", "unfold", "unsafe_chunk", "unsafe_split.Tensor",
            "unsafe_split_with_sizes", "unsqueeze", "view", "vsplit.array", "vsplit.int",
        ),
    ),
    OpGroup(
        op_class=_FOLLOW,
        reason="view or copy: moves values, in the shape of its second argument",
        origin=Origin.UNLISTED,
        own_dtype_slots=("other",),
        ops=("expand_as", "reshape_as", "view_as"),
    ),
    OpGroup(
        op_class=_FOLLOW,
        reason="joins tensors: moves values, in the widest dtype of its inputs",
        origin=Origin.UNLISTED,
        mixes=True,  # the kernels promote as cat does
        ops=(
            "_stack", "block_diag", "cat", "column_stack", "concat", "concatenate", "dstack", "hstack",
            "row_stack", "stack", "vstack",
        ),
    ),
    OpGroup(
        op_class=_FOLLOW,
        reason="picks values by index or mask",
        origin=Origin.UNLISTED,
        ops=(
            "_unsafe_index.Tensor", "embedding", "gather", "index.Tensor", "index_select", "masked_select",
            "take", "take_along_dim",
        ),
    ),
    OpGroup(
        op_class=_FOLLOW,
        reason="picks each value from one of its inputs",
        origin=Origin.UNLISTED,
        mixes=True,  # TensorIterator promotes
        # clamp by tensors: rounding is monotone, so it commutes once the bounds are rounded too
        ops=(
            "clamp.Tensor", "clamp_max.Tensor", "clamp_min.Tensor", "clip.Tensor", "fmax", "fmin",
            "max.other", "maximum", "min.other", "minimum", "where.self",
        ),
    ),
    OpGroup(
        op_class=_FOLLOW,
        reason="copies values of one tensor over places of another",
        origin=Origin.UNLISTED,
        # not mixes: the kernels refuse a second dtype, or squeeze it into the first one's
        ops=(
            "as_strided_scatter", "diagonal_scatter", "index_copy", "masked_scatter", "max_unpool2d",
            "max_unpool3d", "scatter.src", "select_scatter", "slice_scatter",
        ),
    ),
    OpGroup(
        op_class=_FOLLOW,
        reason="pads: moves values",
        origin=Origin.UNLISTED,
        # the fill is 0 or -inf in practice; a fill outside the low range is a matter for the constrain pass
        ops=(
            "_pad_circular", "constant_pad_nd", "pad", "pad_sequence", "reflection_pad1d", "reflection_pad2d",
            "reflection_pad3d", "replication_pad1d", "replication_pad2d", "replication_pad3d",
        ),
    ),
    OpGroup(
        op_class=_FOLLOW,
        reason="compares values and keeps one of them",
        origin=Origin.UNLISTED,
        # only ops that return values alone; relu6 has bounds that every low dtype holds exactly
        ops=(
            "abs", "absolute", "amax", "amin", "aminmax", "max", "max_pool1d", "max_pool2d", "max_pool3d",
            "median", "min", "msort", "nanmedian", "neg", "negative", "relu", "relu6",
        ),
    ),
    # ---- promote: the op computes, in the widest dtype of its inputs ----
    OpGroup(
        op_class=_PROMOTE,
        reason="returns positions: rounding makes ties, and a tie moves the position",
        origin=Origin.UNLISTED,
        ops=(
            "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d", "argmax", "argmin",
            "argsort", "argsort.stable", "bucketize.Tensor", "cummax", "cummin", "fractional_max_pool2d",
            "fractional_max_pool3d", "kthvalue", "max.dim", "max_pool1d_with_indices",
            "max_pool2d_with_indices", "max_pool3d_with_indices", "median.dim", "min.dim", "mode",
            "nanmedian.dim", "searchsorted.Tensor", "sort", "sort.stable", "topk",
        ),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="arithmetic: native type promotion",
        origin=Origin.UNLISTED,
        mixes=True,  # TensorIterator promotes, and computes in the common dtype
        ops=(
            "add.Scalar", "add.Tensor", "div.Scalar", "div.Scalar_mode", "div.Tensor", "div.Tensor_mode",
            "divide.Scalar", "divide.Scalar_mode", "divide.Tensor", "divide.Tensor_mode", "floor_divide",
            "floor_divide.Scalar", "ger", "kron", "mul.Scalar", "mul.Tensor", "multiply.Scalar",
            "multiply.Tensor", "outer", "rsub.Scalar", "rsub.Tensor", "sub.Scalar", "sub.Tensor",
            "subtract.Scalar", "subtract.Tensor", "true_divide.Scalar", "true_divide.Tensor",
        ),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="comparison: native type promotion, the result is bool",
        origin=Origin.UNLISTED,
        mixes=True,
        ops=(
            "eq.Scalar", "eq.Tensor", "ge.Scalar", "ge.Tensor", "greater.Scalar", "greater.Tensor",
            "greater_equal.Scalar", "greater_equal.Tensor", "gt.Scalar", "gt.Tensor", "isin.Tensor_Tensor",
            "le.Scalar", "le.Tensor", "less.Scalar", "less.Tensor", "less_equal.Scalar", "less_equal.Tensor",
            "lt.Scalar", "lt.Tensor", "ne.Scalar", "ne.Tensor", "not_equal.Scalar", "not_equal.Tensor",
        ),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="truth of values: runs in the dtype of its input",
        origin=Origin.UNLISTED,
        # not follow: fp16 rounds small numbers to 0 and large ones to inf
        ops=(
            "all", "all.dim", "all.dims", "any", "any.dim", "any.dims", "count_nonzero",
            "count_nonzero.dim_IntList", "isclose", "isreal", "nonzero",
        ),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="pointwise, but its kernel wants one dtype",
        origin=Origin.UNLISTED,
        ops=("heaviside", "lerp.Scalar", "lerp.Tensor"),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="activation: autocast leaves it in the dtype of its input",
        origin=Origin.UNLISTED,
        ops=(
            "celu", "elu", "gelu", "glu", "hardshrink", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu",
            "log_sigmoid", "logit", "mish", "rrelu", "selu", "sigmoid", "silu", "softshrink", "special_expit",
            "special_logit", "tanh", "threshold",
        ),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="pointwise alias: runs in the dtype of its inputs",
        origin=Origin.UNLISTED,
        mixes=True,
        # composite aliases carry no pointwise tag, so the default row does not see them
        ops=(
            "arccosh", "arcsinh", "arctan", "arctan2", "arctanh", "clip", "fix", "special_digamma",
            "special_erf", "special_erfc", "special_exp2", "special_gammainc", "special_gammaincc",
            "special_gammaln", "special_i0", "special_multigammaln", "special_ndtr", "special_polygamma",
            "special_psi", "special_round", "special_sinc", "special_xlogy", "special_xlogy.other_scalar",
            "special_xlogy.self_scalar",
        ),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="dropout: scales what it keeps, in the dtype of its input",
        origin=Origin.UNLISTED,
        ops=("alpha_dropout", "dropout", "feature_alpha_dropout", "feature_dropout", "native_dropout"),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="writes a number that the low dtype may not hold",
        origin=Origin.UNLISTED,
        ops=(
            "clamp", "clamp_max", "clamp_min", "index_fill.int_Scalar", "masked_fill.Scalar", "scatter.value",
            "where.ScalarOther", "where.ScalarSelf",
        ),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="writes a 0-d value into its first argument, whose dtype it keeps",
        origin=Origin.UNLISTED,
        own_dtype_slots=("value",),
        ops=("index_fill.int_Tensor", "masked_fill.Tensor"),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="adds into a copy: its kernel wants one dtype",
        origin=Origin.UNLISTED,
        ops=(
            "_unsafe_index_put", "col2im", "index_add", "index_put", "index_reduce", "put", "scatter.reduce",
            "scatter.value_reduce", "scatter_add", "scatter_reduce.two",
        ),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="mean: sums in fp32 inside the kernel",
        origin=Origin.UNLISTED,
        unless_given=("dtype",),
        ops=("mean", "mean.dim", "nanmean", "nansum"),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="variance: sums in fp32 inside the kernel",
        origin=Origin.UNLISTED,
        ops=(
            "std", "std.correction", "std.dim", "std_mean", "std_mean.correction", "std_mean.dim", "var",
            "var.correction", "var.dim", "var_mean", "var_mean.correction", "var_mean.dim",
        ),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="average pooling: sums in fp32 inside the kernel",
        origin=Origin.UNLISTED,
        ops=(
            "_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
            "adaptive_avg_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
        ),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="batch norm: takes a low input with fp32 weights and statistics",
        origin=Origin.UNLISTED,
        own_dtype_slots=("weight", "bias", "running_mean", "running_var"),
        ops=("batch_norm", "instance_norm", "native_batch_norm"),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="not listed by autocast: runs in the dtype of its inputs",
        origin=Origin.UNLISTED,
        ops=(
            "_log_softmax", "_safe_softmax", "_softmax", "_transformer_encoder_layer_fwd", "_weight_norm",
            "cross", "diff", "dot", "embedding_bag", "embedding_bag.padding_idx", "gradient.scalarint",
            "grid_sampler_2d", "grid_sampler_3d", "histc", "linalg_cross", "linalg_matrix_exp",
            "logcumsumexp", "matrix_exp", "segment_reduce", "trace", "vdot",
        ),
    ),
    OpGroup(
        op_class=_PROMOTE,
        reason="sampling grid: in low precision, as its inner bmm would have it, it would miss pixels",
        origin=Origin.UNLISTED,
        ops=("affine_grid_generator",),
    ),
    # ---- low ----
    OpGroup(
        op_class=OpClass.LOW,
        reason="composite: its inner matmul or mm is listed as low",
        origin=Origin.COMPOSITE,
        ops=("linalg_matmul", "linalg_matrix_power", "matrix_power"),
    ),
    OpGroup(
        op_class=OpClass.LOW,
        reason="recurrent layer: autocast casts its input, states and weights inside",
        origin=Origin.COMPOSITE,
        # by mkldnn_rnn_layer on CPU, _cudnn_rnn or the cells on CUDA; tanh and relu layers by their GEMMs
        ops=("lstm.input", "rnn_relu.input", "rnn_tanh.input"),
    ),
    # ---- fp32 ----
    OpGroup(
        op_class=OpClass.FP32,
        reason="transforms: half complex numbers have few kernels",
        origin=Origin.UNLISTED,
        ops=(*FFT, "fft_hfft2", "fft_hfftn", "fft_ihfft2", "fft_ihfftn", "polar", "view_as_complex"),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=_NEEDS_DIGITS,
        origin=Origin.UNLISTED,
        ops=(
            *LINALG, "det", "linalg_det", "linalg_ldl_factor", "linalg_ldl_factor_ex", "linalg_lu",
            "linalg_lu_factor", "linalg_lu_factor_ex", "linalg_lu_solve", "linalg_pinv",
            "linalg_pinv.atol_rtol_float", "linalg_pinv.atol_rtol_tensor", "linalg_slogdet",
            "linalg_solve_ex", "linalg_solve_triangular", "linalg_vander", "logdet", "slogdet",
        ),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=_NEEDS_DIGITS,
        origin=Origin.UNLISTED,
        until="2.14",
        ops=LINALG_UNTIL_2_14,
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=_NO_HALF,
        origin=Origin.UNLISTED,
        since="2.12",
        ops=("_upsample_lanczos2d_aa", "_upsample_lanczos2d_aa.vec"),
    ),
    OpGroup(
        op_class=OpClass.FP32,
        reason=_NO_HALF,
        origin=Origin.UNLISTED,
        ops=(
            "nanquantile", "nanquantile.scalar",
            "quantile", "quantile.scalar", "special_airy_ai", "special_bessel_j0", "special_bessel_j1",
            "special_bessel_y0", "special_bessel_y1", "special_erfcx", "special_log_ndtr",
            "special_modified_bessel_i0", "special_modified_bessel_i1", "special_modified_bessel_k0",
            "special_modified_bessel_k1", "special_ndtri", "special_scaled_modified_bessel_k0",
            "special_scaled_modified_bessel_k1", "special_spherical_bessel_j0", "special_zeta",
            "special_zeta.other_scalar", "special_zeta.self_scalar",
        ),
    ),
    # ---- keep ----
    OpGroup(
        op_class=OpClass.KEEP,
        reason="computes in fp64 whatever it is given",
        origin=Origin.UNLISTED,
        ops=("float_power.Scalar", "float_power.Tensor_Scalar", "float_power.Tensor_Tensor"),
    ),
)  # fmt: skip
