"""Arguments for every op of the lists: fp32 CPU tensors, cast and moved by the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import pytest
import torch

T = TypeVar("T")
Call: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Builders: TypeAlias = dict[str, Callable[[], tuple[Any, ...]]]


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


def each(names: str, value: T) -> dict[str, T]:
    """The same for several ops."""
    return dict.fromkeys(names.split(), value)


def _spatial(n: int, linear: str) -> Builders:
    """Ops whose names have a number of dimensions; those that interpolate are called otherwise in each."""
    image, kernel = (2, 3, *[4] * n), [3] * n
    resized = {
        f"upsample_nearest{n}d _upsample_nearest_exact{n}d": lambda: (t(*image), [8] * n),
        linear: lambda: (t(*image), [8] * n, False),
    }
    resized |= {
        " ".join(f"{name}.vec" for name in names.split()): lambda make=make: (*make(), None)
        for names, make in resized.items()
    }
    given: Builders = {
        f"conv{n}d": lambda: (t(2, 3, *[6] * n), t(5, 3, *kernel), t(5)),
        f"conv{n}d.padding": lambda: (t(2, 3, *[6] * n), t(5, 3, *kernel), t(5), [1] * n, "same"),
        f"conv_transpose{n}d conv_transpose{n}d.input": lambda: (t(*image), t(3, 5, *kernel), t(5)),
        f"avg_pool{n}d max_pool{n}d max_pool{n}d_with_indices": lambda: (t(*image), [2] * n),
        f"adaptive_avg_pool{n}d _adaptive_avg_pool{n}d adaptive_max_pool{n}d": lambda: (t(*image), kernel),
        f"reflection_pad{n}d replication_pad{n}d": lambda: (t(*image), [1] * 2 * n),
    }
    return {name: make for names, make in (resized | given).items() for name in names.split()}


#: name -> a function returning the positional arguments (a trailing dict holds keyword arguments).
BUILDERS: Builders = {
    # GEMMs
    "linear": lambda: (t(4, 6), t(5, 6), t(5)),
    **each("matmul linalg_matmul mm", lambda: (t(4, 6), t(6, 5))),
    **each("mv prelu", lambda: (t(4, 6), t(6))),
    "bmm": lambda: (t(2, 4, 6), t(2, 6, 5)),
    "addmm": lambda: (t(4, 5), t(4, 6), t(6, 5)),
    "_addmm_activation": lambda: (t(5), t(4, 6), t(6, 5)),
    "addmv": lambda: (t(4), t(4, 6), t(6)),
    "addr": lambda: (t(4, 6), t(4), t(6)),
    "addbmm": lambda: (t(4, 5), t(2, 4, 6), t(2, 6, 5)),
    "baddbmm": lambda: (t(2, 4, 5), t(2, 4, 6), t(2, 6, 5)),
    "einsum": lambda: ("ij,jk->ik", [t(4, 6), t(6, 5)]),
    **each("chain_matmul linalg_multi_dot", lambda: ([t(4, 6), t(6, 5), t(5, 3)],)),
    **each("inner cdist", lambda: (t(4, 6), t(5, 6))),
    "tensordot": lambda: (t(4, 6), t(6, 5), [1], [0]),
    "bilinear": lambda: (t(4, 6), t(4, 5), t(3, 6, 5), t(3)),
    **each("dot vdot", lambda: (t(6), t(6))),
    **each("outer ger", lambda: (t(4), t(6))),
    **each("matrix_power linalg_matrix_power", lambda: (t(4, 4), 3)),
    **_spatial(1, "upsample_linear1d"),
    **_spatial(2, """
        upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa
        _upsample_lanczos2d_aa
    """),
    **_spatial(3, "upsample_trilinear3d"),
    # convolutions
    "_convolution": lambda: (t(2, 3, 6, 6), t(5, 3, 3, 3), t(5), *_CONV, False, False, True, True),
    "_convolution.deprecated": lambda: (t(2, 3, 6, 6), t(5, 3, 3, 3), t(5), *_CONV, False, False, True),
    "convolution": lambda: (t(2, 3, 6, 6), t(5, 3, 3, 3), t(5), *_CONV),
    "_convolution_mode": lambda: (t(2, 3, 6, 6), t(5, 3, 3, 3), t(5), [1, 1], "same", [1, 1], 1),
    "conv_tbc": lambda: (t(7, 2, 3), t(3, 3, 5), t(5)),
    # attention
    **each("scaled_dot_product_attention _scaled_dot_product_flash_attention",
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
    **each("rnn_tanh_cell rnn_relu_cell", lambda: (t(4, 6), t(4, 6), *_cell(1))),
    "_thnn_fused_lstm_cell": lambda: (t(4, 24), t(4, 24), t(4, 6), t(24), t(24)),
    "_thnn_fused_gru_cell": lambda: (t(4, 18), t(4, 18), t(4, 6), t(18), t(18)),
    "mkldnn_rnn_layer": lambda: (
        t(3, 4, 6), *_cell(4), t(1, 4, 6), t(1, 4, 6), False, [], 2, 6, 1, True, False, False, False
    ),
    "lstm.input": lambda: (t(3, 4, 6), [t(1, 4, 6), t(1, 4, 6)], *_rnn(4)),
    "gru.input": lambda: (t(3, 4, 6), t(1, 4, 6), *_rnn(3)),
    **each("rnn_tanh.input rnn_relu.input", lambda: (t(3, 4, 6), t(1, 4, 6), *_rnn(1))),
    # other arithmetic
    **each("cross linalg_cross", lambda: (t(4, 3), t(4, 3))),
    "view_as_complex": lambda: (t(4, 2),),
    # norms
    "layer_norm": lambda: (t(4, 6), [6], p(6), t(6)),
    "native_layer_norm": lambda: (t(4, 6), [6], p(6), t(6), 1e-5),
    "rms_norm": lambda: (t(4, 6), [6], p(6)),
    "group_norm": lambda: (t(2, 6, 4), 2, p(6), t(6)),
    "native_group_norm": lambda: (t(2, 6, 4), p(6), t(6), 2, 6, 4, 2, 1e-5),
    **each("batch_norm instance_norm", lambda: (t(2, 3, 4), *(x.clone() for x in _BN), True, 0.1, 1e-5, False)),
    "native_batch_norm": lambda: (t(2, 3, 4), *(x.clone() for x in _BN), True, 0.1, 1e-5),
    "nuclear_norm.dim": lambda: (t(4, 4), [0, 1]),
    "linalg_matrix_norm": lambda: (t(), 1),
    "linalg_norm.ord_str": lambda: (t(), "fro"),
    "_weight_norm": lambda: (t(4, 6), t(4, 1)),
    # softmax family, sums
    **each("quantile nanquantile", lambda: (t(), torch.tensor(0.5))),
    # losses
    **each("cross_entropy_loss nll_loss nll_loss_nd multi_margin_loss", lambda: (t(), i(6, 4))),
    "nll_loss2d": lambda: (t(2, 5, 3, 3), i(5, 2, 3, 3)),
    "cosine_embedding_loss": lambda: (t(), t(), torch.ones(4, dtype=torch.int64)),
    "hinge_embedding_loss": lambda: (t(), torch.ones(4, 6, dtype=torch.int64)),
    "multilabel_margin_loss": lambda: (t(), i(6, 4, 6)),
    "multilabel_margin_loss_forward": lambda: (t(), i(6, 4, 6), 1),
    "ctc_loss.IntList": lambda: (t(8, 2, 5).log_softmax(-1), i(4, 2, 3) + 1, [8, 8], [3, 3]),
    "ctc_loss.Tensor": lambda: (
        t(8, 2, 5).log_softmax(-1), i(4, 2, 3) + 1, torch.tensor([8, 8]), torch.tensor([3, 3])
    ),
    # resampling
    **each("grid_sampler grid_sampler_2d _grid_sampler_2d_cpu_fallback",
            lambda: (t(2, 3, 4, 4), p(2, 5, 5, 2), 0, 0, False)),
    "grid_sampler_3d": lambda: (t(2, 3, 4, 4, 4), p(2, 5, 5, 5, 3), 0, 0, False),
    "affine_grid_generator": lambda: (t(2, 2, 3), [2, 3, 4, 4], False),
    # pooling and padding
    "max_unpool2d": lambda: (t(1, 1, 2, 2), torch.tensor([[[[0, 2], [8, 10]]]]), [4, 4]),
    "max_unpool3d": lambda: (
        t(1, 1, 1, 2, 2), torch.tensor([[[[[0, 2], [8, 10]]]]]), [1, 4, 4], [1, 2, 2], [0, 0, 0]
    ),
    "fractional_max_pool2d": lambda: (t(2, 3, 8, 8), [2, 2], [3, 3], p(2, 3, 2)),
    "fractional_max_pool3d": lambda: (t(2, 3, 8, 8, 8), [2, 2, 2], [3, 3, 3], p(2, 3, 3)),
    **each("_pad_circular pad", lambda: (t(2, 3, 4, 4), [1, 1, 1, 1])),
    "constant_pad_nd": lambda: (t(), [1, 1]),
    "pad_sequence": lambda: ([t(4, 6), t(3, 6)],),
    **each("stft stft.center", lambda: (t(64), 16, {"window": p(16), "return_complex": True})),
    # linear algebra
    **each("""
        cholesky cholesky_inverse linalg_cholesky linalg_cholesky_ex linalg_cond linalg_eig linalg_eigh
        linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex inverse linalg_qr qr linalg_svd svd
        linalg_svdvals pinverse geqrf _lu_with_info linalg_matrix_rank.atol_rtol_float
        linalg_matrix_rank.atol_rtol_tensor det linalg_det logdet slogdet linalg_slogdet
        linalg_matrix_sqrth matrix_exp linalg_matrix_exp linalg_lu linalg_lu_factor linalg_lu_factor_ex
        linalg_ldl_factor linalg_ldl_factor_ex
    """, lambda: (spd(),)),
    **each("cholesky_solve triangular_solve", lambda: (t(4, 2), spd())),
    "linalg_pinv": lambda: (spd(), 1e-6),
    **each("linalg_pinv.atol_rtol_float linalg_pinv.atol_rtol_tensor", lambda: (spd(),)),
    "linalg_cond.p_str": lambda: (spd(), "fro"),
    "linalg_matrix_rank": lambda: (spd(), 0.1),
    "linalg_matrix_rank.tol_tensor": lambda: (spd(), torch.tensor(0.1)),
    **each("linalg_householder_product orgqr", lambda: (t(4, 3), p(3))),
    **each("linalg_lstsq linalg_solve linalg_solve_ex", lambda: (spd(), t(4, 2))),
    "linalg_solve_triangular": lambda: (spd(), t(4, 2), {"upper": True}),
    "linalg_tensorinv": lambda: (spd(4).reshape(2, 2, 2, 2),),
    "linalg_tensorsolve": lambda: (spd(4).reshape(2, 2, 2, 2), t(2, 2)),
    "lu_solve": lambda: (t(4, 2), spd(), torch.tensor([1, 2, 3, 4], dtype=torch.int32)),
    "linalg_lu_solve": lambda: (spd(), torch.tensor([1, 2, 3, 4], dtype=torch.int32), t(4, 2)),
    "ormqr": lambda: (t(4, 4), p(4), t(4, 2)),
    "fake_quantize_per_tensor_affine": lambda: (t(), 0.1, 0, 0, 255),
    # moving values
    **each("view reshape _unsafe_view", lambda: (t(4, 6), [6, 4])),
    "_reshape_alias": lambda: (t(4, 6), [6, 4], [4, 1]),
    **each("view_as reshape_as", lambda: (t(4, 6), t(6, 4))),
    "unflatten.int": lambda: (t(4, 6), 1, [2, 3]),
    "permute": lambda: (t(2, 3, 4), [2, 0, 1]),
    **each("transpose.int swapaxes swapdims movedim.int moveaxis.int", lambda: (t(), 0, 1)),
    "squeeze.dim": lambda: (t(4, 1), 1),
    **each("expand broadcast_to", lambda: (t(4, 1), [4, 6])),
    "expand_as": lambda: (t(4, 1), t(4, 6)),
    "broadcast_tensors": lambda: ([t(4, 1), t(1, 6)],),
    **each("meshgrid cartesian_prod", lambda: ([t(4), t(6)],)),
    "meshgrid.indexing": lambda: ([t(4), t(6)], {"indexing": "ij"}),
    **each("combinations diag diagflat diag_embed linalg_vander", lambda: (t(4),)),
    "slice.Tensor": lambda: (t(), 1, 1, 4),
    "narrow.Tensor": lambda: (t(), 1, torch.tensor(1), 3),
    **each("split.sizes split_with_sizes unsafe_split_with_sizes", lambda: (t(), [2, 4], 1)),
    **each("chunk unsafe_chunk tensor_split.sections repeat_interleave.self_int", lambda: (t(), 2, 1)),
    "tensor_split.tensor_indices_or_sections": lambda: (t(), torch.tensor([2]), 1),
    "dsplit.int": lambda: (t(2, 2, 4), 2),
    "dsplit.array": lambda: (t(2, 2, 4), [2]),
    **each("repeat tile", lambda: (t(), [2, 1])),
    "repeat_interleave.self_Tensor": lambda: (t(), torch.tensor([1, 2, 1, 2]), 0, {"output_size": 6}),
    "as_strided": lambda: (t(), [2, 3], [6, 1]),
    **each(
        "_grouped_mm transformers::grouped_mm_fallback",
        lambda: (t(6, 8), t(2, 8, 8), torch.tensor([2, 6], dtype=torch.int32)),
    ),
    "im2col": lambda: (t(2, 3, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1]),
    "col2im": lambda: (t(2, 12, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1]),
    **each("pixel_shuffle channel_shuffle native_channel_shuffle", lambda: (t(1, 4, 3, 3), 2)),
    "pixel_unshuffle": lambda: (t(1, 1, 4, 4), 2),
    "block_diag": lambda: ([t(2, 2), t(3, 3)],),
    "where.self": lambda: (b(4, 6), t(), t()),
    "where.ScalarOther": lambda: (b(4, 6), t(), 0.1),
    "where.ScalarSelf": lambda: (b(4, 6), 0.1, t()),
    "gather": lambda: (t(), 1, i(6, 4, 3)),
    "take": lambda: (t(), i(24, 5)),
    "take_along_dim": lambda: (t(), i(6, 4, 3), 1),
    **each("index.Tensor _unsafe_index.Tensor", lambda: (t(), [i(4, 3)])),
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
    **each("index_put _unsafe_index_put", lambda: (t(), [torch.tensor([0, 2])], t(2, 6))),
    **each("index_copy index_add", lambda: (t(), 0, torch.tensor([0, 2]), t(2, 6))),
    "index_fill.int_Scalar": lambda: (t(), 0, torch.tensor([0, 2]), 0.1),
    "index_fill.int_Tensor": lambda: (t(), 0, torch.tensor([0, 2]), torch.tensor(0.1)),
    "index_reduce": lambda: (t(), 0, torch.tensor([0, 2]), t(2, 6), "prod"),
    "put": lambda: (t(), torch.tensor([0, 2]), t(2)),
    "masked_fill.Scalar": lambda: (t(), b(4, 6), 0.1),
    "masked_fill.Tensor": lambda: (t(), b(4, 6), torch.tensor(0.1)),
    # comparing and sorting
    "sort.stable": lambda: (t(), {"stable": True}),
    "bucketize.Tensor": lambda: (t(), t(5).sort().values),
    "searchsorted.Tensor": lambda: (t(5).sort().values, t()),
    # arithmetic with scalars or non-tensor arguments
    **each("clamp clip", lambda: (t(), -0.3, 0.3)),
    **each("clamp.Tensor clip.Tensor", lambda: (t(), t(), t())),
    **each("dropout alpha_dropout native_dropout", lambda: (t(), 0.5, True)),
    **each("feature_dropout feature_alpha_dropout", lambda: (t(2, 3, 4), 0.5, True)),
    "ldexp.Tensor": lambda: (t(), i(3, 4, 6)),
    **each("div.Tensor_mode divide.Tensor_mode", lambda: (t(), t(), {"rounding_mode": "floor"})),
    **each("div.Scalar_mode divide.Scalar_mode", lambda: (t(), 0.3, {"rounding_mode": "floor"})),
    "segment_reduce": lambda: (t(4), "sum", {"lengths": torch.tensor([2, 2])}),
}  # fmt: skip


def generic_arguments(op: torch._ops.OpOverload, tensor: Callable[[], torch.Tensor]) -> Call:
    """Arguments by schema alone, for the many ops that take tensors of one shape and a few numbers."""
    makers: dict[str, Callable[[], Any]] = {
        "Tensor": tensor,
        "List[Tensor]": lambda: [tensor(), tensor()],
        **dict.fromkeys(("number", "Optional[number]", "float"), lambda: 0.3),
        "int": lambda: 1,
        **dict.fromkeys(("List[int]", "Optional[List[int]]"), lambda: [1]),
        "bool": lambda: False,
    }
    wanted = [argument for argument in op._schema.arguments if not argument.has_default_value()]
    given = [(argument, makers[str(argument.type)]()) for argument in wanted]
    args = tuple(value for argument, value in given if not argument.kwarg_only)
    return args, {argument.name: value for argument, value in given if argument.kwarg_only}


def overload(name: str) -> torch._ops.OpOverload:
    namespace, _, rest = name.rpartition("::")
    if namespace == "transformers":
        pytest.importorskip("transformers.integrations.moe")
    packet, _, which = rest.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace or "aten"), packet), which or "default")


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
