"""Every op of the lists with arguments for it, and autocast's own answer, on CPU and on fake CUDA tensors.

CUDA's autocast kernels answer on a machine without a GPU: fake tensors on ``device="cuda"`` go through the
real AutocastCUDA dispatch key. CPU autocast is asked with real tensors.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from amp_fx._torch import enable_autocast, has_low_lstm
from amp_fx.policy import table
from amp_fx.policy.classes import OpGroup
from versions import UP_TO_2_12

LOW = {"cpu": torch.bfloat16, "cuda": torch.float16, "mps": torch.float16}

# ---- Arguments for every op: fp32 CPU tensors, cast and moved by the tests.

T = TypeVar("T")
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]


def t(*shape: int) -> torch.Tensor:
    """Random values of both signs, which bf16 has to round."""
    return torch.randn(shape or (4, 6))


def p(*shape: int) -> torch.Tensor:
    """Random values in (0.1, 0.9): inside the domain of log, asin, pow and of the losses."""
    return torch.rand(shape or (4, 6)) * 0.8 + 0.1


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape) > 0.5


def spd(n: int = 4) -> torch.Tensor:
    """A well conditioned symmetric positive matrix, for factorisations."""
    return torch.eye(n) * n + torch.full((n, n), 0.5)


def _cell(gates: int) -> tuple[torch.Tensor, ...]:
    return (t(gates * 6, 6), t(gates * 6, 6), t(gates * 6), t(gates * 6))


def _rnn(gates: int) -> tuple[Any, ...]:
    return (list(_cell(gates)), True, 1, 0.0, False, False, False)


_CONV = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)
_BN = (p(3), t(3), torch.zeros(3), torch.ones(3))


def _all(names: str, value: T) -> dict[str, T]:
    """The same for several ops."""
    return dict.fromkeys(names.split(), value)


#: name -> a function returning the positional arguments (a trailing dict holds keyword arguments).
BUILDERS: dict[str, Callable[[], tuple[Any, ...]]] = {
    # GEMMs
    "linear": lambda: (t(4, 6), t(5, 6), t(5)),
    **_all("matmul linalg_matmul mm", lambda: (t(4, 6), t(6, 5))),
    **_all("mv prelu", lambda: (t(4, 6), t(6))),
    "bmm": lambda: (t(2, 4, 6), t(2, 6, 5)),
    "addmm": lambda: (t(4, 5), t(4, 6), t(6, 5)),
    "_addmm_activation": lambda: (t(5), t(4, 6), t(6, 5)),
    "addmv": lambda: (t(4), t(4, 6), t(6)),
    "addr": lambda: (t(4, 6), t(4), t(6)),
    "addbmm": lambda: (t(4, 5), t(2, 4, 6), t(2, 6, 5)),
    "baddbmm": lambda: (t(2, 4, 5), t(2, 4, 6), t(2, 6, 5)),
    "einsum": lambda: ("ij,jk->ik", [t(4, 6), t(6, 5)]),
    **_all("chain_matmul linalg_multi_dot", lambda: ([t(4, 6), t(6, 5), t(5, 3)],)),
    **_all("inner cdist", lambda: (t(4, 6), t(5, 6))),
    "tensordot": lambda: (t(4, 6), t(6, 5), [1], [0]),
    "bilinear": lambda: (t(4, 6), t(4, 5), t(3, 6, 5), t(3)),
    **_all("dot vdot", lambda: (t(6), t(6))),
    **_all("outer ger", lambda: (t(4), t(6))),
    **_all("matrix_power linalg_matrix_power", lambda: (t(4, 4), 3)),
    # convolutions
    "_convolution": lambda: (t(2, 3, 6, 6), t(5, 3, 3, 3), t(5), *_CONV, False, False, True, True),
    "_convolution.deprecated": lambda: (t(2, 3, 6, 6), t(5, 3, 3, 3), t(5), *_CONV, False, False, True),
    "convolution": lambda: (t(2, 3, 6, 6), t(5, 3, 3, 3), t(5), *_CONV),
    "_convolution_mode": lambda: (t(2, 3, 6, 6), t(5, 3, 3, 3), t(5), [1, 1], "same", [1, 1], 1),
    "conv1d": lambda: (t(2, 3, 6), t(5, 3, 3), t(5)),
    "conv2d": lambda: (t(2, 3, 6, 6), t(5, 3, 3, 3), t(5)),
    "conv3d": lambda: (t(2, 3, 6, 6, 6), t(5, 3, 3, 3, 3), t(5)),
    "conv1d.padding": lambda: (t(2, 3, 6), t(5, 3, 3), t(5), [1], "same"),
    "conv2d.padding": lambda: (t(2, 3, 6, 6), t(5, 3, 3, 3), t(5), [1, 1], "same"),
    "conv3d.padding": lambda: (t(2, 3, 6, 6, 6), t(5, 3, 3, 3, 3), t(5), [1, 1, 1], "same"),
    "conv_tbc": lambda: (t(7, 2, 3), t(3, 3, 5), t(5)),
    "conv_transpose1d": lambda: (t(2, 3, 6), t(3, 5, 3), t(5)),
    "conv_transpose2d.input": lambda: (t(2, 3, 6, 6), t(3, 5, 3, 3), t(5)),
    "conv_transpose3d.input": lambda: (t(2, 3, 4, 4, 4), t(3, 5, 3, 3, 3), t(5)),
    # attention
    **_all("scaled_dot_product_attention _scaled_dot_product_flash_attention",
            lambda: (t(2, 2, 4, 8), t(2, 2, 4, 8), t(2, 2, 4, 8))),
    "_native_multi_head_attention": lambda: (
        t(4, 4, 8), t(4, 4, 8), t(4, 4, 8), 8, 4, t(24, 8), t(24), t(8, 8), t(8)
    ),
    "_transformer_encoder_layer_fwd": lambda: (
        t(2, 4, 8), 8, 2, t(24, 8), t(24), t(8, 8), t(8), True, False, 1e-5,
        p(8), t(8), p(8), t(8), t(16, 8), t(16), t(8, 16), t(8),
    ),
    # rnn
    "lstm_cell": lambda: (t(4, 6), [t(4, 6), t(4, 6)], *_cell(4)),
    "gru_cell": lambda: (t(4, 6), t(4, 6), *_cell(3)),
    **_all("rnn_tanh_cell rnn_relu_cell", lambda: (t(4, 6), t(4, 6), *_cell(1))),
    "_thnn_fused_lstm_cell": lambda: (t(4, 24), t(4, 24), t(4, 6), t(24), t(24)),
    "_thnn_fused_gru_cell": lambda: (t(4, 18), t(4, 18), t(4, 6), t(18), t(18)),
    "mkldnn_rnn_layer": lambda: (
        t(3, 4, 6), *_cell(4), t(1, 4, 6), t(1, 4, 6), False, [], 2, 6, 1, True, False, False, False
    ),
    "lstm.input": lambda: (t(3, 4, 6), [t(1, 4, 6), t(1, 4, 6)], *_rnn(4)),
    "gru.input": lambda: (t(3, 4, 6), t(1, 4, 6), *_rnn(3)),
    **_all("rnn_tanh.input rnn_relu.input", lambda: (t(3, 4, 6), t(1, 4, 6), *_rnn(1))),
    # other arithmetic
    **_all("cross linalg_cross", lambda: (t(4, 3), t(4, 3))),
    "count_nonzero.dim_IntList": lambda: (t(), [1]),
    "view_as_complex": lambda: (t(4, 2),),
    # norms
    "layer_norm": lambda: (t(4, 6), [6], p(6), t(6)),
    "native_layer_norm": lambda: (t(4, 6), [6], p(6), t(6), 1e-5),
    "rms_norm": lambda: (t(4, 6), [6], p(6)),
    "group_norm": lambda: (t(2, 6, 4), 2, p(6), t(6)),
    "native_group_norm": lambda: (t(2, 6, 4), p(6), t(6), 2, 6, 4, 2, 1e-5),
    **_all("batch_norm instance_norm", lambda: (t(2, 3, 4), *(x.clone() for x in _BN), True, 0.1, 1e-5, False)),
    "native_batch_norm": lambda: (t(2, 3, 4), *(x.clone() for x in _BN), True, 0.1, 1e-5),
    "renorm": lambda: (t(), 2, 0, 1.0),
    "norm.ScalarOpt_dim": lambda: (t(), 2, [1]),
    "frobenius_norm.dim": lambda: (t(), [0, 1]),
    "nuclear_norm": lambda: (t(4, 4),),
    "nuclear_norm.dim": lambda: (t(4, 4), [0, 1]),
    "linalg_matrix_norm": lambda: (t(), 1),
    "linalg_norm.ord_str": lambda: (t(), "fro"),
    "_weight_norm": lambda: (t(4, 6), t(4, 1)),
    # softmax family, sums
    **_all("""
        logsumexp special_logsumexp sum.dim_IntList nansum mean.dim nanmean var.dim std.dim var_mean.dim
        std_mean.dim
    """, lambda: (t(), [-1])),
    "sum_to_size": lambda: (t(), [1, 6]),
    **_all("quantile nanquantile", lambda: (t(), torch.tensor(0.5))),
    # losses
    **_all("cross_entropy_loss nll_loss nll_loss_nd multi_margin_loss", lambda: (t(), i(6, 4))),
    "nll_loss2d": lambda: (t(2, 5, 3, 3), i(5, 2, 3, 3)),
    "poisson_nll_loss": lambda: (t(), p(), True, False, 1e-8, 1),
    "cosine_embedding_loss": lambda: (t(), t(), torch.ones(4, dtype=torch.int64)),
    "hinge_embedding_loss": lambda: (t(), torch.ones(4, 6, dtype=torch.int64)),
    "margin_ranking_loss": lambda: (t(6), t(6), torch.ones(6)),
    "multilabel_margin_loss": lambda: (t(), i(6, 4, 6)),
    "multilabel_margin_loss_forward": lambda: (t(), i(6, 4, 6), 1),
    "ctc_loss.IntList": lambda: (t(8, 2, 5).log_softmax(-1), i(4, 2, 3) + 1, [8, 8], [3, 3]),
    "ctc_loss.Tensor": lambda: (
        t(8, 2, 5).log_softmax(-1), i(4, 2, 3) + 1, torch.tensor([8, 8]), torch.tensor([3, 3])
    ),
    # resampling
    **_all("upsample_nearest1d _upsample_nearest_exact1d", lambda: (t(2, 3, 4), [8])),
    **_all("upsample_nearest2d _upsample_nearest_exact2d", lambda: (t(2, 3, 4, 4), [8, 8])),
    **_all("upsample_nearest3d _upsample_nearest_exact3d", lambda: (t(2, 3, 4, 4, 4), [8, 8, 8])),
    "upsample_linear1d": lambda: (t(2, 3, 4), [8], False),
    **_all("""
        upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
        _upsample_lanczos2d_aa
    """, lambda: (t(2, 3, 4, 4), [8, 8], False)),
    "upsample_trilinear3d": lambda: (t(2, 3, 4, 4, 4), [8, 8, 8], False),
    **_all("upsample_nearest1d.vec _upsample_nearest_exact1d.vec", lambda: (t(2, 3, 4), [8], None)),
    **_all("upsample_nearest2d.vec _upsample_nearest_exact2d.vec", lambda: (t(2, 3, 4, 4), [8, 8], None)),
    **_all("upsample_nearest3d.vec _upsample_nearest_exact3d.vec", lambda: (t(2, 3, 4, 4, 4), [8, 8, 8], None)),
    "upsample_linear1d.vec": lambda: (t(2, 3, 4), [8], False, None),
    **_all("""
        upsample_bilinear2d.vec upsample_bicubic2d.vec _upsample_bilinear2d_aa.vec
        _upsample_bicubic2d_aa.vec _upsample_lanczos2d_aa.vec
    """, lambda: (t(2, 3, 4, 4), [8, 8], False, None)),
    "upsample_trilinear3d.vec": lambda: (t(2, 3, 4, 4, 4), [8, 8, 8], False, None),
    **_all("grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback",
            lambda: (t(2, 3, 4, 4), p(2, 5, 5, 2), 0, 0, False)),
    "grid_sampler_3d": lambda: (t(2, 3, 4, 4, 4), p(2, 5, 5, 5, 3), 0, 0, False),
    "affine_grid_generator": lambda: (t(2, 2, 3), [2, 3, 4, 4], False),
    # pooling and padding
    **_all("avg_pool1d max_pool1d max_pool1d_with_indices", lambda: (t(2, 3, 8), [2])),
    **_all("avg_pool2d max_pool2d max_pool2d_with_indices", lambda: (t(2, 3, 8, 8), [2, 2])),
    **_all("avg_pool3d max_pool3d max_pool3d_with_indices", lambda: (t(2, 3, 4, 4, 4), [2, 2, 2])),
    **_all("adaptive_avg_pool1d adaptive_max_pool1d", lambda: (t(2, 3, 8), [3])),
    **_all("adaptive_avg_pool2d _adaptive_avg_pool2d adaptive_max_pool2d", lambda: (t(2, 3, 8, 8), [3, 3])),
    **_all("adaptive_avg_pool3d _adaptive_avg_pool3d adaptive_max_pool3d",
            lambda: (t(2, 3, 4, 4, 4), [3, 3, 3])),
    "max_unpool2d": lambda: (t(1, 1, 2, 2), torch.tensor([[[[0, 2], [8, 10]]]]), [4, 4]),
    "max_unpool3d": lambda: (
        t(1, 1, 1, 2, 2), torch.tensor([[[[[0, 2], [8, 10]]]]]), [1, 4, 4], [1, 2, 2], [0, 0, 0]
    ),
    "fractional_max_pool2d": lambda: (t(2, 3, 8, 8), [2, 2], [3, 3], p(2, 3, 2)),
    "fractional_max_pool3d": lambda: (t(2, 3, 8, 8, 8), [2, 2, 2], [3, 3, 3], p(2, 3, 3)),
    **_all("reflection_pad1d replication_pad1d", lambda: (t(2, 3, 4), [1, 1])),
    **_all("reflection_pad2d replication_pad2d _pad_circular pad", lambda: (t(2, 3, 4, 4), [1, 1, 1, 1])),
    **_all("reflection_pad3d replication_pad3d", lambda: (t(2, 3, 4, 4, 4), [1, 1, 1, 1, 1, 1])),
    "constant_pad_nd": lambda: (t(), [1, 1]),
    "pad_sequence": lambda: ([t(4, 6), t(3, 6)],),
    # fft, stft
    **_all("stft stft.center", lambda: (t(64), 16, {"window": p(16), "return_complex": True})),
    # linear algebra
    **_all("""
        cholesky cholesky_inverse linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh
        linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex inverse linalg_qr qr linalg_svd svd
        linalg_svdvals pinverse geqrf _lu_with_info linalg_matrix_rank.atol_rtol_float
        linalg_matrix_rank.atol_rtol_tensor det linalg_det logdet slogdet linalg_slogdet
        linalg_matrix_sqrth matrix_exp linalg_matrix_exp linalg_lu linalg_lu_factor linalg_lu_factor_ex
        linalg_ldl_factor linalg_ldl_factor_ex
    """, lambda: (spd(),)),
    **_all("cholesky_solve triangular_solve", lambda: (t(4, 2), spd())),
    "linalg_pinv": lambda: (spd(), 1e-6),
    **_all("linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor", lambda: (spd(),)),
    "linalg_cond.p_str": lambda: (spd(), "fro"),
    "linalg_matrix_rank": lambda: (spd(), 0.1),
    "linalg_matrix_rank.tol_tensor": lambda: (spd(), torch.tensor(0.1)),
    **_all("linalg_householder_product orgqr", lambda: (t(4, 3), p(3))),
    **_all("linalg_lstsq linalg_solve linalg_solve_ex", lambda: (spd(), t(4, 2))),
    "linalg_solve_triangular": lambda: (spd(), t(4, 2), {"upper": True}),
    "linalg_tensorinv": lambda: (spd(4).reshape(2, 2, 2, 2),),
    "linalg_tensorsolve": lambda: (spd(4).reshape(2, 2, 2, 2), t(2, 2)),
    "lu_solve": lambda: (t(4, 2), spd(), torch.tensor([1, 2, 3, 4], dtype=torch.int32)),
    "linalg_lu_solve": lambda: (spd(), torch.tensor([1, 2, 3, 4], dtype=torch.int32), t(4, 2)),
    "ormqr": lambda: (t(4, 4), p(4), t(4, 2)),
    "linalg_vander": lambda: (t(4),),
    "fake_quantize_per_tensor_affine": lambda: (t(), 0.1, 0, 0, 255),
    # moving values
    **_all("view reshape _unsafe_view", lambda: (t(4, 6), [6, 4])),
    "_reshape_alias": lambda: (t(4, 6), [6, 4], [4, 1]),
    **_all("view_as reshape_as", lambda: (t(4, 6), t(6, 4))),
    "flatten.using_ints": lambda: (t(2, 3, 4), 1),
    "unflatten.int": lambda: (t(4, 6), 1, [2, 3]),
    "permute": lambda: (t(2, 3, 4), [2, 0, 1]),
    **_all("transpose.int swapaxes swapdims movedim.int moveaxis.int", lambda: (t(), 0, 1)),
    **_all("movedim.intlist moveaxis.intlist", lambda: (t(), [0], [1])),
    "squeeze.dim": lambda: (t(4, 1), 1),
    "squeeze.dims": lambda: (t(4, 1), [1]),
    **_all("expand broadcast_to", lambda: (t(4, 1), [4, 6])),
    "expand_as": lambda: (t(4, 1), t(4, 6)),
    "broadcast_tensors": lambda: ([t(4, 1), t(1, 6)],),
    **_all("meshgrid cartesian_prod", lambda: ([t(4), t(6)],)),
    "meshgrid.indexing": lambda: ([t(4), t(6)], {"indexing": "ij"}),
    **_all("combinations diag diagflat diag_embed", lambda: (t(4),)),
    "slice.Tensor": lambda: (t(), 1, 1, 4),
    "narrow": lambda: (t(), 1, 1, 3),
    "narrow.Tensor": lambda: (t(), 1, torch.tensor(1), 3),
    **_all("split.Tensor unsafe_split.Tensor", lambda: (t(), 3, 1)),
    **_all("split.sizes split_with_sizes unsafe_split_with_sizes", lambda: (t(), [2, 4], 1)),
    **_all("chunk unsafe_chunk tensor_split.sections repeat_interleave.self_int", lambda: (t(), 2, 1)),
    "tensor_split.indices": lambda: (t(), [2], 1),
    "tensor_split.tensor_indices_or_sections": lambda: (t(), torch.tensor([2]), 1),
    **_all("hsplit.int vsplit.int", lambda: (t(), 2)),
    **_all("hsplit.array vsplit.array", lambda: (t(), [2])),
    "dsplit.int": lambda: (t(2, 2, 4), 2),
    "dsplit.array": lambda: (t(2, 2, 4), [2]),
    "flip": lambda: (t(), [1]),
    "roll": lambda: (t(), [1], [1]),
    **_all("repeat tile", lambda: (t(), [2, 1])),
    "repeat_interleave.self_Tensor": lambda: (t(), torch.tensor([1, 2, 1, 2]), 0, {"output_size": 6}),
    "as_strided": lambda: (t(), [2, 3], [6, 1]),
    "unfold": lambda: (t(), 1, 2, 2),
    "im2col": lambda: (t(2, 3, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
    "col2im": lambda: (t(2, 12, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    **_all("pixel_shuffle channel_shuffle native_channel_shuffle", lambda: (t(1, 4, 3, 3), 2)),
    "pixel_unshuffle": lambda: (t(1, 1, 4, 4), 2),
    **_all("""
        cat concat concatenate stack _stack hstack vstack dstack row_stack column_stack
        atleast_1d.Sequence atleast_2d.Sequence atleast_3d.Sequence
    """, lambda: ([t(), t()],)),
    "block_diag": lambda: ([t(2, 2), t(3, 3)],),
    "where.self": lambda: (b(4, 6), t(), t()),
    "where.ScalarOther": lambda: (b(4, 6), t(), 0.1),
    "where.ScalarSelf": lambda: (b(4, 6), 0.1, t()),
    "gather": lambda: (t(), 1, i(6, 4, 3)),
    "take": lambda: (t(), i(24, 5)),
    "take_along_dim": lambda: (t(), i(6, 4, 3), 1),
    **_all("index.Tensor _unsafe_index.Tensor", lambda: (t(), [i(4, 3)])),
    "index_select": lambda: (t(), 1, i(6, 3)),
    "masked_select": lambda: (t(), b(4, 6)),
    "embedding": lambda: (t(), i(4, 3)),
    "embedding_bag": lambda: (t(), i(4, 6), torch.tensor([0, 3])),
    "embedding_bag.padding_idx": lambda: (t(), i(4, 6), torch.tensor([0, 3]), False, 0, False, None, False, None),
    "scatter.src": lambda: (t(), 1, torch.tensor([[0, 1], [2, 3], [4, 5], [1, 0]]), t(4, 2)),
    "scatter.value": lambda: (t(), 1, torch.tensor([[0, 1], [2, 3], [4, 5], [1, 0]]), 0.1),
    "scatter.reduce": lambda: (t(), 1, i(6, 4, 2), t(4, 2), {"reduce": "add"}),
    "scatter.value_reduce": lambda: (t(), 1, i(6, 4, 2), 0.1, {"reduce": "add"}),
    "scatter_add": lambda: (t(), 1, i(6, 4, 2), t(4, 2)),
    "scatter_reduce.two": lambda: (t(), 1, i(6, 4, 2), t(4, 2), "sum"),
    "select_scatter": lambda: (t(), t(6), 0, 1),
    "slice_scatter": lambda: (t(), t(2, 6), 0, 1, 3),
    "diagonal_scatter": lambda: (t(), t(4)),
    "as_strided_scatter": lambda: (t(), t(2, 3), [2, 3], [6, 1]),
    "masked_scatter": lambda: (t(), b(4, 6), t()),
    **_all("index_put _unsafe_index_put", lambda: (t(), [torch.tensor([0, 2])], t(2, 6))),
    **_all("index_copy index_add", lambda: (t(), 0, torch.tensor([0, 2]), t(2, 6))),
    "index_fill.int_Scalar": lambda: (t(), 0, torch.tensor([0, 2]), 0.1),
    "index_fill.int_Tensor": lambda: (t(), 0, torch.tensor([0, 2]), torch.tensor(0.1)),
    "index_reduce": lambda: (t(), 0, torch.tensor([0, 2]), t(2, 6), "prod"),
    "put": lambda: (t(), torch.tensor([0, 2]), t(2)),
    "masked_fill.Scalar": lambda: (t(), b(4, 6), 0.1),
    "masked_fill.Tensor": lambda: (t(), b(4, 6), torch.tensor(0.1)),
    # comparing and sorting
    **_all("kthvalue topk", lambda: (t(), 2)),
    "sort.stable": lambda: (t(), {"stable": True}),
    "bucketize.Tensor": lambda: (t(), t(5).sort().values),
    "searchsorted.Tensor": lambda: (t(5).sort().values, t()),
    "histc": lambda: (t(), 5, -1, 1),
    # arithmetic with scalars or non-tensor arguments
    **_all("clamp clip", lambda: (t(), -0.3, 0.3)),
    **_all("clamp.Tensor clip.Tensor", lambda: (t(), t(), t())),
    **_all("dropout alpha_dropout native_dropout", lambda: (t(), 0.5, True)),
    **_all("feature_dropout feature_alpha_dropout", lambda: (t(2, 3, 4), 0.5, True)),
    **_all("mvlgamma special_multigammaln", lambda: (p() + 3, 2)),
    "copysign.Scalar": lambda: (t(), -1.0),
    "ldexp.Tensor": lambda: (t(), i(3, 4, 6)),
    **_all("div.Tensor_mode divide.Tensor_mode", lambda: (t(), t(), {"rounding_mode": "floor"})),
    **_all("div.Scalar_mode divide.Scalar_mode", lambda: (t(), 0.3, {"rounding_mode": "floor"})),
    "segment_reduce": lambda: (t(4), "sum", {"lengths": torch.tensor([2, 2])}),
}  # fmt: skip


def generic_arguments(op: torch._ops.OpOverload, tensor: Callable[[], torch.Tensor]) -> Call:
    """Arguments by schema alone, for the many ops that take tensors of one shape and a few numbers."""
    makers: dict[str, Callable[[], Any]] = {
        "Tensor": tensor,
        "number": lambda: 0.3,
        "float": lambda: 0.3,
        "int": lambda: 1,
        "bool": lambda: False,
    }
    wanted = [argument for argument in op._schema.arguments if not argument.has_default_value()]
    given = [(argument, makers[str(argument.type)]()) for argument in wanted]
    args = tuple(value for argument, value in given if not argument.kwarg_only)
    return args, {argument.name: value for argument, value in given if argument.kwarg_only}


def overload(name: str) -> torch._ops.OpOverload:
    packet, _, which = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), which or "default")


def arguments(name: str, tensor: Callable[[], torch.Tensor] = p) -> Call:
    """Builds the same fp32 arguments at every call; ``tensor`` makes those that need no special shape."""
    torch.manual_seed(0)
    builder = BUILDERS.get(name)
    if builder is None:
        return generic_arguments(overload(name), tensor)
    args = builder()
    if args and isinstance(args[-1], dict):
        return args[:-1], args[-1]
    return args, {}


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def cast(name: str, call: Call, dtypes: Iterator[torch.dtype], keep: tuple[str, ...] = ()) -> Call:
    """Casts the floating arguments in order, each to the next dtype, but for the slots named in ``keep``."""
    names = [argument.name for argument in overload(name)._schema.arguments]

    def to_next(value: Any) -> Any:
        return value.to(next(dtypes)) if is_float(value) else value

    args, kwargs = call
    return (
        tuple(a if slot in keep else tree_map(to_next, a) for slot, a in zip(names, args, strict=False)),
        {slot: a if slot in keep else tree_map(to_next, a) for slot, a in kwargs.items()},
    )


def repeat(first: torch.dtype, rest: torch.dtype) -> Iterator[torch.dtype]:
    yield first
    while True:
        yield rest


def run(name: str, call: Call) -> Any:
    args, kwargs = call
    with warnings.catch_warnings():
        # deprecated ops (cholesky, chain_matmul ...) are on the lists and warn
        warnings.simplefilter("ignore")
        return overload(name)(*args, **kwargs)


@functools.cache
def _fake() -> FakeTensorMode:
    """One for all calls: making it takes longer than a call."""
    return FakeTensorMode()


def on_device(value: Any, device: str) -> Any:
    """The same with uninitialised tensors of a device."""
    return tree_map_only(
        torch.Tensor, lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device), value
    )


def under_autocast(device: str, name: str, call: Call) -> Any:
    if device == "cpu":
        with torch.autocast("cpu", LOW["cpu"]):
            return run(name, call)
    # torch.autocast("cuda") refuses to start without CUDA; its dispatch key does not
    with _fake(), enable_autocast(device, True, LOW[device]):
        return run(name, on_device(call, device))


def first_dtype(result: Any) -> torch.dtype | None:
    """The dtype of the first floating or complex output; None when there is none (masks, positions)."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex()):
            return leaf.dtype
    return None


def floats_in(name: str) -> int:
    return sum(map(is_float, tree_leaves(arguments(name))))


def row(device: str, name: str) -> OpGroup:
    group = table.lookup(overload(name), device)
    assert group is not None
    return group


# ---- What cannot be asked here, or is answered otherwise on purpose.

NO_CUDA = "its CUDA code path needs a GPU build"
NO_MPS = "its MPS code path needs a build for it"
NO_DRIVER = "a CUDA build asks the driver about cudnn, even for fake tensors"
NO_META = "no meta kernel, so fake tensors cannot run it"
NO_LSTM = "oneDNN has no such kernel for this CPU, and autocast raises"
DATA = "the shape of its result depends on values"
_NO_DRIVER = torch.version.cuda and not torch.cuda.is_available()

#: Everything else in the lists must have arguments, run and answer.
NOT_ASKED: dict[str, dict[str, str]] = {
    "cuda": {
        **_all("_thnn_fused_gru_cell ctc_loss.IntList ctc_loss.Tensor geqrf gru.input gru_cell", NO_META),
        **_all("combinations linalg_lstsq masked_select narrow.Tensor nonzero", DATA),
        **_all("batch_norm cudnn_convolution cudnn_convolution_transpose grid_sampler", NO_CUDA),
        **_all("grid_sampler_2d im2col instance_norm native_batch_norm", NO_CUDA),
        "tensor_split.tensor_indices_or_sections": "takes CPU indices only",
        **_all("lstm.input rnn_relu.input rnn_tanh.input" if _NO_DRIVER else "", NO_DRIVER),
        **_all(
            "_convolution _convolution.deprecated _transformer_encoder_layer_fwd" if UP_TO_2_12 else "",
            NO_META,
        ),
    },
    "mps": {
        **_all("_thnn_fused_gru_cell geqrf", NO_META),
        **_all(
            "combinations ctc_loss.IntList ctc_loss.Tensor linalg_lstsq masked_select narrow.Tensor nonzero",
            DATA,
        ),
        **_all("batch_norm grid_sampler grid_sampler_2d im2col instance_norm native_batch_norm", NO_MPS),
        "scaled_dot_product_attention": NO_MPS,
        "_mps_convolution": "has no arguments in these tables: its kernel is in MPS builds alone",
        "tensor_split.tensor_indices_or_sections": "takes CPU indices only",
    },
    "cpu": _all("" if has_low_lstm(LOW["cpu"]) else "lstm.input mkldnn_rnn_layer", NO_LSTM),
}

#: Where the lists differ from what autocast does, on purpose.
DIFFERS: dict[tuple[str, str], str] = {
    ("cpu", "_transformer_encoder_layer_fwd"): "its inner products are low, and its result is",
    ("cpu", "affine_grid_generator"): "an inner bmm computes the sampling grid in low precision",
    **dict.fromkeys(
        [("cpu", f"linalg_pinv{overload}") for overload in ("", ".atol_rtol_float", ".atol_rtol_tensor")],
        "an inner matmul rounds the inverse",
    ),
}


EVERY_ROW = [(device, name) for device in LOW for name in table.all_names(device)]
ASKED = [(device, name) for device, name in EVERY_ROW if name not in NOT_ASKED[device]]
