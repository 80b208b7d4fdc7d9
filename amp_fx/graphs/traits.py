"""Traits of single ops beside their precision, for passes, costs, calibration and reports.

Which precision an op gets is in the lists of :mod:`amp_fx.precision.policy`, by the same names. Nobody needs to know
more of an op that is not here.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch.fx as fx

from amp_fx._torch import OpOverload, op_name


class Trait(enum.Enum):
    """A fact about an op that does not depend on the call."""

    # matmuls
    MATMUL = "multiplies matrices, convolves or attends; torch has a formula of its FLOPs, or fake_runs.py"
    # not a MATMUL: no formula counts its operations, and reports go by operations
    UNCOUNTED_MATMUL = "a product of matrices or vectors whose operations nobody counts"
    RECURRENT = "a recurrent layer: matmuls inside, whose operations nobody counts"
    SOMETIMES_MATMUL = "comes down to a matmul that autocast lists for some shapes only"
    WIDE_GRADIENT = "comes down to matmuls that can return the gradient of an operand in fp32"
    PLANAR_CONVOLUTION = "convolves over two dimensions, or any number; the second argument is the weight"
    # what happens to elements
    UNCHANGED = "returns the numbers of its argument in their shape, or a copy of them"
    RESHAPES = "returns every element of its argument once, at most in another shape or order"
    MOVES = "returns elements of its argument, some not at all or several times"
    EXACT_LAYOUT = "a view whose meaning depends on the exact layout of the storage behind it"
    LOOKUP = "reads as many elements as it returns, however large the table"
    # dtypes
    CAST = "returns its argument in another dtype that the call names"
    IMPLIED_CAST = "a cast whose dtype is read off another tensor, or bundled with a device"
    IMPLIED_DTYPE = "makes a tensor of its argument's dtype unless the call names one"
    OWN_DTYPES = "returns each of its arguments in that argument's dtype"
    CONVERTS = "where the call names a dtype, converts its arguments to that before it computes"
    READS_BITS = (
        "reads how its argument is stored: its result, or the shape of that, is another one for each dtype"
    )
    WANTS_DTYPE = "its kernel takes fp32 alone, or its result depends on which numbers the dtype has"
    # derivatives
    LINEAR = "its gradient does not depend on its input"
    PASSES_GRADIENT = "hands the gradient of its result on to operands of the result's shape, up to the sign"
    KINK = "its derivative jumps where its input changes its sign"
    RELU = "a kink that calibration smooths"
    # norms
    NORM = "a norm that computes in fp32 inside, and keeps its statistics for the backward"
    BATCH_NORM = "a norm by given statistics, or its own; kernels for CUDA take a low input with fp32 weights"
    NORM_BACKWARD = "reads the statistics of a norm"
    # hazards of a low range
    DIVIDES = "turns an eps that was flushed to zero into inf or nan"
    ADDS_EPS = "adds a number, or bounds by one"
    SUMS = "adds up many elements"
    ADDS_LOW = "adds up many elements in the dtype that it is given, in the kernel of some device"
    MAY_ADD_LOW = "does so where its argument ``accumulate`` is true"
    COUNTS = "makes positions, of nothing or of what it counts"
    POSITIONS = "arithmetic through which integer positions stay integer-like"
    PERIODIC = "reads its argument as an angle"
    FILLS = "returns or writes numbers that are not its argument's"


#: make a tensor as a given one is
_LIKE = """
    empty_like full_like new_empty new_full new_ones new_zeros ones_like rand_like randint_like randn_like zeros_like
"""

#: Ops by ATen name, as the lists of the policy write it: ``"transpose.int"``. ``"add.*"`` holds for every overload, and
#: for the in-place form of each; an op has the traits of both of its names.
_NAMES: Mapping[Trait, str] = {
    Trait.MATMUL: """
        linear addmm _int_mm mm matmul.* bmm baddbmm bilinear chain_matmul einsum tensordot
        scaled_dot_product_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_flash_attention_for_cpu_backward conv1d.* conv2d.* conv3d.*
        conv_transpose1d.* conv_transpose2d.* conv_transpose3d.* convolution.* _convolution.*
        _convolution_mode.* _grouped_mm transformers::grouped_mm_fallback
        transformers::grouped_mm_fallback_backward
    """,
    Trait.UNCOUNTED_MATMUL: "addbmm addmv dot mv",
    Trait.RECURRENT: "gru.* lstm.* rnn_relu.* rnn_tanh.*",
    Trait.SOMETIMES_MATMUL: """
        chain_matmul einsum tensordot inner linalg_matrix_power linalg_multi_dot matrix_power
    """,
    Trait.WIDE_GRADIENT: """
        linear addmm mm matmul bmm baddbmm chain_matmul einsum tensordot inner linalg_multi_dot
    """,
    Trait.PLANAR_CONVOLUTION: "conv2d.* conv_transpose2d.* convolution.* _convolution.* _convolution_mode.*",
    Trait.UNCHANGED: "alias detach.* lift_fresh_copy clone contiguous",
    Trait.RESHAPES: """
        alias detach.* _unsafe_view mT numpy_T permute reshape squeeze squeeze.dim squeeze.dims t
        transpose.int unsqueeze view
    """,
    Trait.MOVES: "expand select.int slice.Tensor",
    Trait.EXACT_LAYOUT: "as_strided set_.source_Tensor",
    Trait.LOOKUP: "embedding gather index.Tensor index_select take",
    Trait.CAST: "to.dtype _to_copy prims::convert_element_type amp_fx::convert",
    Trait.IMPLIED_CAST: "to.other to.prim_dtype type_as",
    Trait.IMPLIED_DTYPE: _LIKE,
    Trait.OWN_DTYPES: """
        atleast_1d.Sequence atleast_2d.Sequence atleast_3d.Sequence broadcast_tensors meshgrid
        meshgrid.indexing
    """,
    Trait.CONVERTS: """
        _safe_softmax cumprod.* cumsum.* empty_like full_like linalg_matrix_norm.* linalg_norm.* linalg_vector_norm
        log_softmax.* mean.* nanmean nansum new_empty new_empty_strided new_full new_ones new_zeros norm.* ones_like
        prod.* rand_like.* randint_like.* randn_like.* softmax.* special_log_softmax special_softmax sum.* to.*
        _to_copy zeros_like
    """,
    Trait.READS_BITS: "hash_tensor view.dtype view_copy.dtype",
    Trait.WANTS_DTYPE: "nextafter quantize_per_channel quantize_per_tensor.* quantize_per_tensor_dynamic",
    Trait.LINEAR: "add.Scalar add.Tensor mean neg sub.Scalar sub.Tensor sum",
    Trait.PASSES_GRADIENT: "clone contiguous add.Tensor add_.Tensor neg sub.Tensor sub_.Tensor",
    Trait.KINK: "hardtanh.* leaky_relu.* prelu relu.* relu6.* threshold.*",
    Trait.RELU: "relu.*",
    Trait.NORM: "group_norm layer_norm native_group_norm native_layer_norm",
    Trait.BATCH_NORM: "batch_norm instance_norm",
    Trait.NORM_BACKWARD: "native_group_norm_backward native_layer_norm_backward",
    Trait.DIVIDES: "div.* log.* pow.* reciprocal.* rsqrt.* sqrt.* true_divide.*",
    Trait.ADDS_EPS: "add.* clamp.* clamp_min.* maximum.*",
    Trait.SUMS: "cumsum.* logsumexp.* mean.* sum.*",
    Trait.ADDS_LOW: """
        col2im histc index_add.* index_reduce.* scatter.reduce scatter.value_reduce scatter_.reduce
        scatter_.value_reduce scatter_add.* scatter_reduce.* segment_reduce
    """,
    Trait.MAY_ADD_LOW: "_unsafe_index_put index_put.* put.*",
    Trait.COUNTS: "arange.* cumsum.* linspace.*",
    Trait.POSITIONS: """
        add.* div.* divide.* einsum floor_divide.* ger mul.* multiply.* neg.* outer pow.* remainder.* rsub.* square.*
        sub.* subtract.* true_divide.*
    """,
    Trait.PERIODIC: "cos.* polar.* sin.* sinc.* special_sinc.* tan.*",
    Trait.FILLS: f"fill.* zero.* {_LIKE}",
}


@dataclass(frozen=True)
class LinearForm:
    """``input @ weight.T + bias`` or ``input @ weight + bias``, by the positions of the arguments."""

    input: int
    weight: int
    bias: int | None
    by_rows: bool  # the rows of the matrix are contracted, not its columns


@dataclass(frozen=True)
class Op:
    """One row."""

    traits: frozenset[Trait] = frozenset()
    #: how it multiplies, where the second factor may be a matrix; it and its gradients may run below 16 bits
    linear: LinearForm | None = None
    #: name of an argument, besides ``bias``, that is added to a product and whose gradient is a sum
    addend: str = ""
    #: position of the argument whose rows are added to those of a table
    rows: int | None = None
    #: arguments that it writes to though its schema does not say so, and the one that says whether it does
    writes: tuple[str, ...] = ()
    writes_if: str = ""
    #: arguments that torch gives no gradient, and refuses where they ask for one
    constants: tuple[str, ...] = ()


#: of batch and instance norm
_RUNNING = ("running_mean", "running_var")

#: what traits do not say
_MORE: Mapping[str, Op] = {
    "linear": Op(linear=LinearForm(0, 1, 2, by_rows=True)),
    "addmm": Op(linear=LinearForm(1, 2, 0, by_rows=False), addend="self"),
    "mm": Op(linear=LinearForm(0, 1, None, by_rows=False)),
    "matmul": Op(linear=LinearForm(0, 1, None, by_rows=False)),
    "baddbmm": Op(addend="self"),
    "_embedding_bag_backward": Op(rows=0),
    "_sparse_coo_tensor_with_dims_and_tensors": Op(rows=4),
    "_unsafe_masked_index_put_accumulate": Op(rows=3),
    "embedding_dense_backward": Op(rows=0),
    "index_add": Op(rows=3),
    "index_put": Op(rows=2),
    "scatter_add": Op(rows=3),
    "batch_norm": Op(writes=_RUNNING, writes_if="training", constants=_RUNNING),
    "instance_norm": Op(writes=_RUNNING, writes_if="use_input_stats", constants=_RUNNING),
    "binary_cross_entropy": Op(constants=("weight",)),
    "binary_cross_entropy_with_logits": Op(constants=("weight", "pos_weight")),
    "cross_entropy_loss": Op(constants=("weight",)),
    "fake_quantize_per_channel_affine": Op(constants=("scale", "zero_point")),
    "fake_quantize_per_tensor_affine.tensor_qparams": Op(constants=("scale", "zero_point")),
    "fractional_max_pool2d": Op(constants=("random_samples",)),
    "fractional_max_pool3d": Op(constants=("random_samples",)),
    "multi_margin_loss": Op(constants=("weight",)),
    "nll_loss": Op(constants=("weight",)),
    "nll_loss2d": Op(constants=("weight",)),
    "nll_loss_nd": Op(constants=("weight",)),
    "soft_margin_loss": Op(constants=("target",)),
}


def _rows() -> dict[str, Op]:
    rows = dict(_MORE)
    for trait, names in _NAMES.items():
        for name in names.split():
            row = rows.get(name, _NO_ROW)
            rows[name] = replace(row, traits=row.traits | {trait})
    return rows


_NO_ROW = Op()
OPS: Mapping[str, Op] = MappingProxyType(_rows())

#: calls that multiply rows by one matrix, by ATen name: position of the matrix
LINEAR_OPS = {name: row.linear.weight for name, row in OPS.items() if row.linear is not None}


def op_row(call: object) -> Op:
    """The row of a node, an overload, or an op's name as a plan has it; an empty one where there is none."""
    name = _name(call)
    return _NO_ROW if name is None else OPS.get(name, _NO_ROW)


def has_trait(call: object, *traits: Trait) -> bool:
    """True if a node, an overload, or an op's name as a plan has it, has one of the traits."""
    name = _name(call)
    if name is None:
        return False
    base, every = OPS.get(name, _NO_ROW), OPS.get(f"{name.partition('.')[0].removesuffix('_')}.*", _NO_ROW)
    return any(trait in base.traits or trait in every.traits for trait in traits)


def linear_form(node: fx.Node) -> LinearForm | None:
    """How a call multiplies rows by one matrix; None for other calls, such as ``matmul`` of a vector or of a batch."""
    found = op_row(node).linear
    if found is None or node.kwargs:
        return None
    operands = [node.args[found.input], node.args[found.weight]]
    values = [operand.meta["val"] for operand in operands if isinstance(operand, fx.Node)]
    if len(values) < 2 or values[0].ndim < 2 or values[1].ndim != 2:
        return None
    return found


def _name(call: object) -> str | None:
    target = call.target if isinstance(call, fx.Node) else call
    if isinstance(target, OpOverload):
        return op_name(target)
    # the target of an input or of a method is a name that means something else
    return target if isinstance(target, str) and target is call else None
