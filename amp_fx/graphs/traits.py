"""What is known of single ops: one row each, for passes, costs, calibration and reports.

Which precision an op gets is not here but in the lists of :mod:`amp_fx.policy`, by the same names. An op that has no
row is one that nobody needs to know more of.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch.fx as fx

from amp_fx._torch import OpOverload, op_name

__all__ = ["NO_ROW", "OPS", "LinearForm", "Op", "Trait", "has_trait", "op_row"]


class Trait(enum.Enum):
    """A fact about an op that does not depend on the call."""

    # matmuls
    MATMUL = "multiplies matrices, convolves or attends; in torch's own list of FLOP formulas, or composite"
    # not a MATMUL: no formula counts its operations, and reports go by operations
    UNCOUNTED_MATMUL = "a product of matrices or vectors whose operations nobody counts"
    RECURRENT = "a recurrent layer: matmuls inside, whose operations nobody counts"
    SOMETIMES_MATMUL = "comes down to a matmul that autocast lists for some shapes only"
    WIDE_GRADIENT = "comes down to matmuls that can return the gradient of an operand in fp32"
    PLANAR_CONVOLUTION = (
        "convolves over two dimensions, or any number of them; the second argument is the weight"
    )
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
    # derivatives
    LINEAR = "its gradient does not depend on its input"
    PASSES_GRADIENT = "hands the gradient of its result on to operands of the result's shape, up to the sign"
    KINK = "its derivative jumps where its input changes its sign"
    RELU = "a kink that calibration smooths"
    # norms
    NORM = "a norm that computes in fp32 inside, and keeps its statistics for the backward"
    BATCH_NORM = (
        "a norm by statistics that it may be given; kernels for CUDA take a low input with fp32 weights"
    )
    NORM_BACKWARD = "reads the statistics of a norm"
    # hazards of a low range
    DIVIDES = "turns an eps that was flushed to zero into inf or nan"
    ADDS_EPS = "adds a number, or bounds by one"
    SUMS = "adds up many elements"
    POSITIONS = "arithmetic through which integer positions stay integer-like"


@dataclass(frozen=True)
class LinearForm:
    """``input @ weight.T + bias`` or ``input @ weight + bias``.

    Attributes:
        input: position of the argument whose rows are multiplied.
        weight: of the matrix.
        bias: of what is added, or None.
        by_rows: the rows of the matrix are contracted, not its columns.
    """

    input: int
    weight: int
    bias: int | None
    by_rows: bool


@dataclass(frozen=True)
class Op:
    """One row.

    Attributes:
        traits: see :class:`Trait`.
        linear: where the second factor may be a matrix, how it multiplies.
        addend: name of an argument, besides ``bias``, that is added to a product and whose gradient is a sum.
        rows: position of the argument whose rows are added to those of a table.
        writes: arguments that it writes to though its schema does not say so.
        writes_if: the argument that says whether it does.
    """

    traits: frozenset[Trait] = frozenset()
    linear: LinearForm | None = None
    addend: str = ""
    rows: int | None = None
    writes: tuple[str, ...] = ()
    writes_if: str = ""


def _op(
    *traits: Trait,
    linear: LinearForm | None = None,
    addend: str = "",
    rows: int | None = None,
    writes: tuple[str, ...] = (),
    writes_if: str = "",
) -> Op:
    return Op(frozenset(traits), linear, addend, rows, writes, writes_if)


_T = Trait
_BY_ROWS, _BY_COLUMNS = LinearForm(0, 1, 2, by_rows=True), LinearForm(0, 1, None, by_rows=False)

#: By ATen name, as the lists of the policy write it: ``"transpose.int"``. ``"add.*"`` holds for every overload, and for
#: the in-place form of each; an op has the traits of both of its rows.
OPS: Mapping[str, Op] = MappingProxyType(
    {
        # matmuls
        "linear": _op(_T.MATMUL, _T.WIDE_GRADIENT, linear=_BY_ROWS),
        "addmm": _op(_T.MATMUL, _T.WIDE_GRADIENT, linear=LinearForm(1, 2, 0, by_rows=False), addend="self"),
        "_int_mm": _op(_T.MATMUL),
        "mm": _op(_T.MATMUL, _T.WIDE_GRADIENT, linear=_BY_COLUMNS),
        "matmul": _op(_T.WIDE_GRADIENT, linear=_BY_COLUMNS),
        "matmul.*": _op(_T.MATMUL),
        "bmm": _op(_T.MATMUL, _T.WIDE_GRADIENT),
        "baddbmm": _op(_T.MATMUL, _T.WIDE_GRADIENT, addend="self"),
        "bilinear": _op(_T.MATMUL),
        "chain_matmul": _op(_T.MATMUL, _T.SOMETIMES_MATMUL, _T.WIDE_GRADIENT),
        "einsum": _op(_T.MATMUL, _T.SOMETIMES_MATMUL, _T.WIDE_GRADIENT),
        "tensordot": _op(_T.MATMUL, _T.SOMETIMES_MATMUL, _T.WIDE_GRADIENT),
        "inner": _op(_T.SOMETIMES_MATMUL, _T.WIDE_GRADIENT),
        "linalg_matrix_power": _op(_T.SOMETIMES_MATMUL),
        "linalg_multi_dot": _op(_T.SOMETIMES_MATMUL, _T.WIDE_GRADIENT),
        "matrix_power": _op(_T.SOMETIMES_MATMUL),
        "addbmm": _op(_T.UNCOUNTED_MATMUL),
        "addmv": _op(_T.UNCOUNTED_MATMUL),
        "dot": _op(_T.UNCOUNTED_MATMUL),
        "mv": _op(_T.UNCOUNTED_MATMUL),
        "scaled_dot_product_attention": _op(_T.MATMUL),
        "_scaled_dot_product_flash_attention_for_cpu": _op(_T.MATMUL),
        "_scaled_dot_product_flash_attention_for_cpu_backward": _op(_T.MATMUL),
        "gru.*": _op(_T.RECURRENT),
        "lstm.*": _op(_T.RECURRENT),
        "rnn_relu.*": _op(_T.RECURRENT),
        "rnn_tanh.*": _op(_T.RECURRENT),
        # convolutions
        "conv1d.*": _op(_T.MATMUL),
        "conv2d.*": _op(_T.MATMUL, _T.PLANAR_CONVOLUTION),
        "conv3d.*": _op(_T.MATMUL),
        "conv_transpose1d.*": _op(_T.MATMUL),
        "conv_transpose2d.*": _op(_T.MATMUL, _T.PLANAR_CONVOLUTION),
        "conv_transpose3d.*": _op(_T.MATMUL),
        "convolution.*": _op(_T.MATMUL, _T.PLANAR_CONVOLUTION),
        "_convolution.*": _op(_T.MATMUL, _T.PLANAR_CONVOLUTION),
        "_convolution_mode.*": _op(_T.MATMUL, _T.PLANAR_CONVOLUTION),
        # the numbers stay
        "alias": _op(_T.UNCHANGED, _T.RESHAPES),
        "detach.*": _op(_T.UNCHANGED, _T.RESHAPES),
        "lift_fresh_copy": _op(_T.UNCHANGED),
        "clone": _op(_T.UNCHANGED, _T.PASSES_GRADIENT),
        "contiguous": _op(_T.UNCHANGED, _T.PASSES_GRADIENT),
        "_unsafe_view": _op(_T.RESHAPES),
        "mT": _op(_T.RESHAPES),
        "numpy_T": _op(_T.RESHAPES),
        "permute": _op(_T.RESHAPES),
        "reshape": _op(_T.RESHAPES),
        "squeeze": _op(_T.RESHAPES),
        "squeeze.dim": _op(_T.RESHAPES),
        "squeeze.dims": _op(_T.RESHAPES),
        "t": _op(_T.RESHAPES),
        "transpose.int": _op(_T.RESHAPES),
        "unsqueeze": _op(_T.RESHAPES),
        "view": _op(_T.RESHAPES),
        "expand": _op(_T.MOVES),
        "select.int": _op(_T.MOVES),
        "slice.Tensor": _op(_T.MOVES),
        "as_strided": _op(_T.EXACT_LAYOUT),
        "set_.source_Tensor": _op(_T.EXACT_LAYOUT),
        # tables
        "embedding": _op(_T.LOOKUP),
        "gather": _op(_T.LOOKUP),
        "index.Tensor": _op(_T.LOOKUP),
        "index_select": _op(_T.LOOKUP),
        "take": _op(_T.LOOKUP),
        "_unsafe_masked_index_put_accumulate": _op(rows=3),
        "embedding_dense_backward": _op(rows=0),
        "index_add": _op(rows=3),
        "index_put": _op(rows=2),
        "scatter_add": _op(rows=3),
        # casts, and what makes a tensor
        "to.dtype": _op(_T.CAST),
        "_to_copy": _op(_T.CAST),
        "prims::convert_element_type": _op(_T.CAST),
        "amp_fx::convert": _op(_T.CAST),
        "to.other": _op(_T.IMPLIED_CAST),
        "to.prim_dtype": _op(_T.IMPLIED_CAST),
        "type_as": _op(_T.IMPLIED_CAST),
        "empty_like": _op(_T.IMPLIED_DTYPE),
        "full_like": _op(_T.IMPLIED_DTYPE),
        "new_empty": _op(_T.IMPLIED_DTYPE),
        "new_full": _op(_T.IMPLIED_DTYPE),
        "new_ones": _op(_T.IMPLIED_DTYPE),
        "new_zeros": _op(_T.IMPLIED_DTYPE),
        "ones_like": _op(_T.IMPLIED_DTYPE),
        "rand_like": _op(_T.IMPLIED_DTYPE),
        "randint_like": _op(_T.IMPLIED_DTYPE),
        "randn_like": _op(_T.IMPLIED_DTYPE),
        "zeros_like": _op(_T.IMPLIED_DTYPE),
        "atleast_1d.Sequence": _op(_T.OWN_DTYPES),
        "atleast_2d.Sequence": _op(_T.OWN_DTYPES),
        "atleast_3d.Sequence": _op(_T.OWN_DTYPES),
        "broadcast_tensors": _op(_T.OWN_DTYPES),
        "meshgrid": _op(_T.OWN_DTYPES),
        "meshgrid.indexing": _op(_T.OWN_DTYPES),
        # arithmetic
        "add.*": _op(_T.ADDS_EPS, _T.POSITIONS),
        "add.Scalar": _op(_T.LINEAR),
        "add.Tensor": _op(_T.LINEAR, _T.PASSES_GRADIENT),
        "add_.Tensor": _op(_T.PASSES_GRADIENT),
        "clamp.*": _op(_T.ADDS_EPS),
        "clamp_min.*": _op(_T.ADDS_EPS),
        "cumsum.*": _op(_T.SUMS, _T.POSITIONS),
        "div.*": _op(_T.DIVIDES, _T.POSITIONS),
        "floor_divide.*": _op(_T.POSITIONS),
        "log.*": _op(_T.DIVIDES),
        "logsumexp.*": _op(_T.SUMS),
        "maximum.*": _op(_T.ADDS_EPS),
        "mean": _op(_T.LINEAR),
        "mean.*": _op(_T.SUMS),
        "mul.*": _op(_T.POSITIONS),
        "neg": _op(_T.LINEAR, _T.PASSES_GRADIENT),
        "neg.*": _op(_T.POSITIONS),
        "pow.*": _op(_T.DIVIDES, _T.POSITIONS),
        "reciprocal.*": _op(_T.DIVIDES),
        "rsqrt.*": _op(_T.DIVIDES),
        "rsub.*": _op(_T.POSITIONS),
        "sqrt.*": _op(_T.DIVIDES),
        "sub.*": _op(_T.POSITIONS),
        "sub.Scalar": _op(_T.LINEAR),
        "sub.Tensor": _op(_T.LINEAR, _T.PASSES_GRADIENT),
        "sub_.Tensor": _op(_T.PASSES_GRADIENT),
        "sum": _op(_T.LINEAR),
        "sum.*": _op(_T.SUMS),
        "true_divide.*": _op(_T.DIVIDES),
        # activations
        "hardtanh.*": _op(_T.KINK),
        "leaky_relu.*": _op(_T.KINK),
        "prelu": _op(_T.KINK),
        "relu.*": _op(_T.KINK, _T.RELU),
        "relu6.*": _op(_T.KINK),
        "threshold.*": _op(_T.KINK),
        # norms
        "batch_norm": _op(_T.BATCH_NORM, writes=("running_mean", "running_var"), writes_if="training"),
        "instance_norm": _op(
            _T.BATCH_NORM, writes=("running_mean", "running_var"), writes_if="use_input_stats"
        ),
        "group_norm": _op(_T.NORM),
        "layer_norm": _op(_T.NORM),
        "native_group_norm": _op(_T.NORM),
        "native_layer_norm": _op(_T.NORM),
        "native_group_norm_backward": _op(_T.NORM_BACKWARD),
        "native_layer_norm_backward": _op(_T.NORM_BACKWARD),
    }
)

#: of an op that is not in the table
NO_ROW = Op()


def op_row(call: object) -> Op:
    """The row of an overload, for what it says besides traits; an empty one where it has none.

    Args:
        call: a node, an overload, or an op's name as a plan has it.
    """
    name = _name(call)
    return NO_ROW if name is None else OPS.get(name, NO_ROW)


def has_trait(call: object, *traits: Trait) -> bool:
    """True if an op has one of the traits.

    Args:
        call: a node, an overload, or an op's name as a plan has it; what is no op has no traits.
        traits: any of them.
    """
    name = _name(call)
    if name is None:
        return False
    base, every = OPS.get(name, NO_ROW), OPS.get(f"{name.partition('.')[0].removesuffix('_')}.*", NO_ROW)
    return any(trait in base.traits or trait in every.traits for trait in traits)


def _name(call: object) -> str | None:
    target = call.target if isinstance(call, fx.Node) else call
    if isinstance(target, OpOverload):
        return op_name(target)
    # the target of an input or of a method is a name that means something else
    return target if isinstance(target, str) and target is call else None
