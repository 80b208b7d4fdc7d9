"""Op lists that do not depend on the device: what autocast lists on none, or on CPU and CUDA alike.

A device's own list wins over this one (``max_pool3d`` moves values here, but CPU autocast runs it in fp32).

Left out on purpose, so that they keep the dtypes the program was traced with: ops that create tensors or draw
random ones (``zeros``, ``arange``, ``rand_like``), ops that name their dtype (``to.dtype``, ``type_as``,
``norm.ScalarOpt_dtype``, ``mm.dtype``), ops whose result has one place per distinct value (``unique_dim``),
quantized ops, and everything in-place: the passes decide about writes by the storage they touch.
"""

from .classes import composite, follow, fp32, keep, listed, low, promote

#: Fourier transforms: CPU autocast lists them as fp32; elsewhere half transforms exist for few sizes only.
FFT = """
    fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn
    fft_rfft fft_rfft2 fft_rfftn stft stft.center
"""

#: Factorisations and solvers that CPU autocast lists as fp32; no device has half kernels for them.
LINALG = """
    _lu_with_info cholesky_inverse cholesky_solve geqrf inverse linalg_cholesky linalg_cholesky_ex linalg_cond
    linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product
    linalg_inv linalg_inv_ex linalg_lstsq linalg_matrix_rank linalg_matrix_rank.atol_rtol_float
    linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_qr linalg_solve linalg_svd
    linalg_svdvals linalg_tensorinv linalg_tensorsolve lu_solve orgqr ormqr pinverse svd triangular_solve
"""
LINALG_UNTIL_2_14 = "cholesky qr"

#: nearest resampling: CUDA autocast lists it, others do not
NEAREST = """
    _upsample_nearest_exact1d _upsample_nearest_exact1d.vec _upsample_nearest_exact2d
    _upsample_nearest_exact2d.vec _upsample_nearest_exact3d _upsample_nearest_exact3d.vec upsample_nearest1d
    upsample_nearest1d.vec upsample_nearest2d upsample_nearest2d.vec upsample_nearest3d upsample_nearest3d.vec
"""

COMMON_GROUPS = (
    # ---- follow: the op moves, selects or compares values; rounding before it or after it is the same ----
    follow("view or copy: moves values", """
        _conj_physical _reshape_alias _unsafe_view adjoint alias as_strided atleast_1d atleast_1d.Sequence
        atleast_2d atleast_2d.Sequence atleast_3d atleast_3d.Sequence broadcast_tensors broadcast_to
        cartesian_prod channel_shuffle chunk clone combinations conj conj_physical contiguous detach diag
        diag_embed diagflat diagonal dsplit.array dsplit.int expand flatten.using_ints flip fliplr flipud
        hsplit.array hsplit.int im2col lift lift_fresh lift_fresh_copy linalg_diagonal mH mT matrix_H meshgrid
        meshgrid.indexing moveaxis.int moveaxis.intlist movedim.int movedim.intlist narrow narrow.Tensor
        native_channel_shuffle numpy_T permute pixel_shuffle pixel_unshuffle positive ravel real repeat
        repeat_interleave.self_Tensor repeat_interleave.self_int reshape resolve_conj resolve_neg roll rot90
        select.int slice.Tensor split.Tensor split.sizes split_with_sizes squeeze squeeze.dim squeeze.dims
        swapaxes swapdims t tensor_split.indices tensor_split.sections tensor_split.tensor_indices_or_sections
        tile transpose.int tril triu unbind.int unflatten.int unfold unsafe_chunk unsafe_split.Tensor
        unsafe_split_with_sizes unsqueeze view vsplit.array vsplit.int
    """),
    follow(
        "view or copy: moves values, in the shape of its second argument",
        "expand_as reshape_as view_as", own_dtype_slots="other",
    ),
    # the kernels promote as cat does
    follow(
        "joins tensors: moves values, in the widest dtype of its inputs",
        "_stack block_diag cat column_stack concat concatenate dstack hstack row_stack stack vstack", mixes=True,
    ),
    follow("picks values by index or mask", """
        _unsafe_index.Tensor embedding gather index.Tensor index_select masked_select take take_along_dim
    """),
    # TensorIterator promotes. Clamp by tensors: rounding is monotone, so it commutes once the bounds are rounded too
    follow("picks each value from one of its inputs", """
        clamp.Tensor clamp_max.Tensor clamp_min.Tensor clip.Tensor fmax fmin max.other maximum min.other
        minimum where.self
    """, mixes=True),
    # not mixes: the kernels refuse a second dtype, or squeeze it into the first one's
    follow("copies values of one tensor over places of another", """
        as_strided_scatter diagonal_scatter index_copy masked_scatter max_unpool2d max_unpool3d scatter.src
        select_scatter slice_scatter
    """),
    # the fill is 0 or -inf in practice; pass constrain checks a fill outside the low range
    follow("pads: moves values", """
        _pad_circular constant_pad_nd pad pad_sequence reflection_pad1d reflection_pad2d reflection_pad3d
        replication_pad1d replication_pad2d replication_pad3d
    """),
    # only ops that return values alone; relu6 has bounds that every low dtype holds exactly
    follow("compares values and keeps one of them", """
        abs absolute amax amin aminmax max max_pool1d max_pool2d max_pool3d median min msort nanmedian neg
        negative relu relu6
    """),
    # ---- promote: the op computes, in the widest dtype of its inputs ----
    promote("returns positions: rounding makes ties, and a tie moves the position", """
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d argmax argmin argsort argsort.stable
        bucketize.Tensor cummax cummin fractional_max_pool2d fractional_max_pool3d kthvalue max.dim
        max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices median.dim min.dim mode
        nanmedian.dim searchsorted.Tensor sort sort.stable topk
    """),
    # TensorIterator promotes, and computes in the common dtype
    promote("arithmetic: native type promotion", """
        add.Scalar add.Tensor div.Scalar div.Scalar_mode div.Tensor div.Tensor_mode divide.Scalar
        divide.Scalar_mode divide.Tensor divide.Tensor_mode floor_divide floor_divide.Scalar ger kron
        mul.Scalar mul.Tensor multiply.Scalar multiply.Tensor outer rsub.Scalar rsub.Tensor sub.Scalar
        sub.Tensor subtract.Scalar subtract.Tensor true_divide.Scalar true_divide.Tensor
    """, mixes=True),
    promote("comparison: native type promotion, the result is bool", """
        eq.Scalar eq.Tensor ge.Scalar ge.Tensor greater.Scalar greater.Tensor greater_equal.Scalar
        greater_equal.Tensor gt.Scalar gt.Tensor isin.Tensor_Tensor le.Scalar le.Tensor less.Scalar
        less.Tensor less_equal.Scalar less_equal.Tensor lt.Scalar lt.Tensor ne.Scalar ne.Tensor
        not_equal.Scalar not_equal.Tensor
    """, mixes=True),
    # not follow: fp16 rounds small numbers to 0 and large ones to inf
    promote("truth of values: runs in the dtype of its input", """
        all all.dim all.dims any any.dim any.dims count_nonzero count_nonzero.dim_IntList isclose isreal
        nonzero
    """),
    promote("pointwise, but its kernel wants one dtype", "heaviside lerp.Scalar lerp.Tensor"),
    promote("activation: autocast leaves it in the dtype of its input", """
        celu elu gelu glu hardshrink hardsigmoid hardswish hardtanh leaky_relu log_sigmoid logit mish rrelu
        selu sigmoid silu softshrink special_expit special_logit tanh threshold
    """),
    # composite aliases carry no pointwise tag, so the default row does not see them
    promote("pointwise alias: runs in the dtype of its inputs", """
        arccosh arcsinh arctan arctan2 arctanh clip fix special_digamma special_erf special_erfc special_exp2
        special_gammainc special_gammaincc special_gammaln special_i0 special_multigammaln special_ndtr
        special_polygamma special_psi special_round special_sinc special_xlogy special_xlogy.other_scalar
        special_xlogy.self_scalar
    """, mixes=True),
    promote(
        "dropout: scales what it keeps, in the dtype of its input",
        "alpha_dropout dropout feature_alpha_dropout feature_dropout native_dropout",
    ),
    promote("writes a number that the low dtype may not hold", """
        clamp clamp_max clamp_min index_fill.int_Scalar masked_fill.Scalar scatter.value where.ScalarOther
        where.ScalarSelf
    """),
    promote(
        "writes a 0-d value into its first argument, whose dtype it keeps",
        "index_fill.int_Tensor masked_fill.Tensor", own_dtype_slots="value",
    ),
    promote("adds into a copy: its kernel wants one dtype", """
        _unsafe_index_put col2im index_add index_put index_reduce put scatter.reduce scatter.value_reduce
        scatter_add scatter_reduce.two
    """),
    promote("mean: sums in fp32 inside the kernel", "mean mean.dim nanmean nansum", unless_given="dtype"),
    promote("variance: sums in fp32 inside the kernel", """
        std std.correction std.dim std_mean std_mean.correction std_mean.dim var var.correction var.dim
        var_mean var_mean.correction var_mean.dim
    """),
    promote("average pooling: sums in fp32 inside the kernel", """
        _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
        avg_pool1d avg_pool2d avg_pool3d
    """),
    promote(
        "batch norm: takes a low input with fp32 weights and statistics",
        "batch_norm instance_norm native_batch_norm", own_dtype_slots="weight bias running_mean running_var",
    ),
    promote("not listed by autocast: runs in the dtype of its inputs", """
        _log_softmax _safe_softmax _softmax _transformer_encoder_layer_fwd _weight_norm cross diff dot
        embedding_bag embedding_bag.padding_idx gradient.scalarint grid_sampler_2d grid_sampler_3d histc
        linalg_cross logcumsumexp segment_reduce trace vdot
    """),
    promote(
        "sampling grid: in low precision, as its inner bmm would have it, it would miss pixels",
        "affine_grid_generator",
    ),
    # autocast leaves them in the dtype of their inputs; their weights are most of a mixture's
    low(
        "products of experts with low-precision instructions, on no list of autocast",
        "_grouped_mm transformers::grouped_mm_fallback", unless_given="out_dtype",
    ),
    *composite(
        low(
            "composite: its inner matmul or mm is listed as low",
            "linalg_matmul linalg_matrix_power matrix_power",
        ),
        # by mkldnn_rnn_layer on CPU, _cudnn_rnn or the cells on CUDA; tanh and relu layers by their matmuls
        low(
            "recurrent layer: autocast casts its input, states and weights inside",
            "lstm.input rnn_relu.input rnn_tanh.input",
        ),
    ),
    fp32(
        "transforms: half complex numbers have few kernels",
        f"{FFT} fft_hfft2 fft_hfftn fft_ihfft2 fft_ihfftn polar view_as_complex",
    ),
    fp32("linear algebra: no half kernel, and needs the digits", f"""
        {LINALG} det linalg_det linalg_ldl_factor linalg_ldl_factor_ex linalg_lu linalg_lu_factor
        linalg_lu_factor_ex linalg_lu_solve linalg_pinv linalg_pinv.atol_rtol_float
        linalg_pinv.atol_rtol_tensor linalg_slogdet linalg_solve_ex linalg_solve_triangular linalg_vander
        logdet slogdet
    """),
    fp32("linear algebra: no half kernel, and needs the digits", LINALG_UNTIL_2_14, until="2.14"),
    fp32("linear algebra: no half kernel, and needs the digits", "linalg_matrix_sqrth", since="2.14"),
    fp32("its kernel computes nan in 16 bits", "linalg_matrix_exp matrix_exp"),
    fp32("no half kernel", "_upsample_lanczos2d_aa _upsample_lanczos2d_aa.vec", since="2.12"),
    fp32("no half kernel", """
        nanquantile nanquantile.scalar quantile quantile.scalar special_airy_ai special_bessel_j0
        special_bessel_j1 special_bessel_y0 special_bessel_y1 special_erfcx special_log_ndtr
        special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0
        special_modified_bessel_k1 special_ndtri special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_spherical_bessel_j0 special_zeta special_zeta.other_scalar
        special_zeta.self_scalar
    """),
    keep(
        "computes in fp64 whatever it is given",
        "float_power.Scalar float_power.Tensor_Scalar float_power.Tensor_Tensor",
    ),
)  # fmt: skip

#: Rows that CPU and CUDA autocast list alike. The lists of both begin with them.
LISTED_GROUPS = (
    *listed(
        low(
            "matrix product with low-precision instructions",
            "addbmm addmm baddbmm bmm linalg_vecdot linear matmul mm",
        ),
        low("convolution with low-precision instructions", """
            _convolution.deprecated conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d.input
            conv_transpose3d.input
        """),
        low("attention: its softmax is in fp32 inside the kernel", "scaled_dot_product_attention"),
        low("its weight has to match the activation", "prelu"),
        fp32("loss: small differences, long sums", """
            binary_cross_entropy_with_logits cosine_embedding_loss hinge_embedding_loss huber_loss kl_div
            l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss nll_loss2d
            poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
        """),
        fp32("norm or distance: sums of powers", "cdist"),
        fp32("product: range", "prod prod.dim_int", unless_given="dtype"),
    ),
    *composite(
        fp32("loss: its inner nll_loss is listed as fp32", "nll_loss_nd"),
    ),
)  # fmt: skip

#: Policy "fast": ops on the fp32 list of some device whose kernel widens inside, so that input and result may be low.
#: Norms have fp32 statistics and sums in the kernel; weight and bias keep their own dtype. A softmax has exponentials
#: and their sum in fp32; its probabilities are rounded for the next matmul anyway.
FAST_LOW_IO = frozenset(
    ["layer_norm", "native_layer_norm", "rms_norm", "group_norm", "softmax.int", "_softmax"]
)

#: Policy "fast": ops whose result may be stored low where autocast has fp32. Autocast keeps a value in fp32 as soon as
#: one fp32 tensor is mixed in: every residual stream, every bias added by hand. The arithmetic inside a fused kernel is
#: fp32 all the same (Inductor computes pointwise code and sums in fp32). What the program casts to fp32 itself, what
#: feeds only the loss, and ops that are not here stay as autocast has them.
FAST_MAY_ROUND = FAST_LOW_IO.union([
    # residual adds, biases, gates, rotary embedding, masks within range
    "add.Tensor", "add.Scalar", "sub.Tensor", "sub.Scalar", "mul.Tensor", "mul.Scalar", "div.Tensor", "div.Scalar",
    "neg",
    # activations: monotone or bounded, one rounding of the result
    "relu", "gelu", "silu", "mish", "elu", "leaky_relu", "hardswish", "hardsigmoid", "sigmoid", "tanh", "dropout",
    # make a new tensor of fp32 ones; a lookup computes in fp32, where its gradient adds up, and is rounded at once
    "embedding", "index_select", "gather", "index.Tensor", "cat", "stack", "constant_pad_nd", "pad", "repeat", "roll",
    "flip", "clone",
])  # fmt: skip
