"""Matmuls as levels below 16 bits see them: what they read, in which layout, and what each is to a call of the forward.

A library kernel that multiplies with scales takes a matrix whose rows, and a matrix whose columns, lie in memory in one
piece, and one scale for each of these (or one for all). So the second is looked at transposed here: an :class:`Operand`
is always a matrix whose rows are contracted and scaled. Captured graphs multiply a value, whose last dimension is
contracted, by a matrix; joint graphs have forward and backward, and all matmuls are of two matrices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.fx as fx

from amp_fx.errors import PlanError
from amp_fx.graphs.calls import CAST, is_cast, values_read
from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.keys import CAST_META, REGION_META
from amp_fx.graphs.traits import Trait, has_trait, op_row
from amp_fx.graphs.values import LOW_DTYPES, PLACED_DTYPES
from amp_fx.passes.base import PassContext, gradients_in, marked
from amp_fx.precision.plans.label import Label, label_of
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.levels import FORWARD, INPUT, WEIGHT
from amp_fx.precision.policy.rules import BELOW

aten = torch.ops.aten

_TRANSPOSES = frozenset({aten.t.default, aten.numpy_T.default, aten.mT.default, aten.adjoint.default})


@dataclass(frozen=True, eq=False)
class Operand:
    """A matrix that a matmul reads, with the contracted dimension last.

    Attributes:
        base: the value behind all views, in the low dtype.
        source: what copies are made of: the base, or what was cast to it, so that a weight is rounded once.
        layout: equal for operands of one source that are the same matrix.
        lies_in_rows: each row lies in memory in one piece.
        readers: all that read the value in the low dtype now.
        views: from the source to the matrix, in order.
        transposed: the rows are the columns of what the views give.
        is_gradient: it depends on a gradient that enters the backward.
        is_weight: it is a matrix that a graph without gradients multiplies by, and may be stored as a copy.
        is_folded: such a copy is made once, outside the graph.
        equalisation: of a weight: exponents of two, one for each contracted channel, or none. It is multiplied by these
            powers, and what it multiplies is divided by them.
    """

    base: fx.Node
    source: fx.Node
    layout: str
    lies_in_rows: bool
    readers: frozenset[fx.Node]
    views: tuple[fx.Node, ...] = ()
    transposed: bool = False
    is_gradient: bool = False
    is_weight: bool = False
    is_folded: bool = False
    equalisation: tuple[int, ...] = ()


@dataclass(frozen=True, eq=False)
class Matmul:
    """A product of two 16-bit matrices, or of a captured graph two in fp32.

    Attributes:
        node: the call.
        name: in the plan, of the call of the forward that it belongs to, which may run below 16 bits.
        role: a value of :data:`amp_fx.precision.policy.levels.ROLES`.
        operands: first and second.
        sizes: rows, contracted, columns; symbolic sizes as they are.
        bias: one number for each column, in the dtype of the result, or None.
        norm: of a convolution the BatchNorm in inference that alone reads it, and may be folded into it.
    """

    node: fx.Node
    name: str
    role: str
    operands: tuple[Operand, Operand]
    sizes: tuple[int | torch.SymInt, int | torch.SymInt, int | torch.SymInt]
    bias: fx.Node | None
    norm: fx.Node | None = None

    def equalised(self, exponents: tuple[int, ...]) -> Matmul:
        """The product by an equalised weight; PlanError where there is not one exponent for each channel."""
        if exponents and (self.is_convolution or len(exponents) != self.sizes[1]):
            raise PlanError(
                f"the plan equalises {len(exponents)} channels of {self.name}, which contracts {self.sizes[1]}. Make a "
                "new plan with amp_fx.calibrate."
            )
        first, second = self.operands
        return replace(self, operands=(first, replace(second, equalisation=exponents)))

    @property
    def is_convolution(self) -> bool:
        """True for a convolution: its weight has one matrix row for each channel of the result."""
        return self.node.target is aten.conv2d.default

    @property
    def variable(self) -> tuple[str, str]:
        """The variable of the cut: all matmuls that a call has in one role go together."""
        return self.name, self.role


def read_matmuls(gm: fx.GraphModule, context: PassContext, *, joint: bool) -> list[Matmul]:
    """The matmuls of a graph that have a counterpart with scales, in order.

    In a joint graph: the 16-bit matmuls of a marked call, and the matmuls that give its gradients.
    """
    if joint:
        return _joint_matmuls(gm)
    found = (captured_matmul(node, context) for node in gm.graph.nodes)
    return [matmul for matmul in found if matmul is not None]


def divides(grain: int, sizes: Sequence[int | torch.SymInt]) -> bool:
    """True where library kernels take these sizes."""
    return all(isinstance(size, int) and size and size % grain == 0 for size in sizes)


def _factors(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None] | None:
    """The value, the matrix and the bias of a product; None of what has no counterpart with scales."""
    form = op_row(node).linear
    if form is None or node.kwargs or len(node.args) > 3:
        return None
    value, matrix = node.args[form.input], node.args[form.weight]
    bias = None if form.bias is None or form.bias >= len(node.args) else node.args[form.bias]
    if not isinstance(value, fx.Node) or not isinstance(matrix, fx.Node):
        return None
    result, left, right = node.meta["val"], value.meta["val"], matrix.meta["val"]
    if right.ndim != 2 or left.ndim < 1 or not left.dtype is right.dtype is result.dtype in PLACED_DTYPES:
        return None
    if bias is None:
        return value, matrix, None
    # one number for each column, in the dtype of the result
    if not isinstance(bias, fx.Node) or bias.meta["val"].dtype is not result.dtype:
        return None
    return (value, matrix, bias) if bias.meta["val"].shape == result.shape[-1:] else None


# ---- captured graphs


def may_run_below(node: fx.Node, context: PassContext) -> bool:
    """True for a matmul that policy and plan let run below 16 bits."""
    label = label_of(node)
    if label is None or not is_matmul(node) or not (label.dtype in LOW_DTYPES or _stays_wide(label, context)):
        return False
    rule = context.policy.rule_for(label.op, label.module_path)
    if rule is not None:
        return rule.precision in BELOW
    if label.result_dtype is not None:
        return False
    region = node.meta.get(REGION_META, {}).get(node.meta["val"].device.type)
    return label.op_class is OpClass.LOW or (region is not None and region.enabled)


def _stays_wide(label: Label, context: PassContext) -> bool:
    """True without gradients for a call that is in fp32 as the device multiplies no faster in 16 bits."""
    profile, is_moved = context.profile, label.op_class is OpClass.LOW and label.dtype is torch.float32
    return not context.training and profile is not None and is_moved and profile.is_slower_in(label.low)


def captured_matmul(node: fx.Node, context: PassContext) -> Matmul | None:
    """The product that a call is; None where it is none of floating values and a matrix."""
    if node.target is aten.conv2d.default:
        return _convolution(node, context)
    label, factors, form = label_of(node), _factors(node), op_row(node).linear
    if label is None or factors is None or form is None:
        return None
    value, matrix, bias = factors
    first = Operand(value, value, "", True, frozenset(value.users))
    second = _weight(matrix, context.folded, in_rows=form.by_rows)
    size = matrix.meta["val"].shape
    contracted, columns = reversed(size) if form.by_rows else size
    sizes = math.prod(value.meta["val"].shape[:-1]), contracted, columns
    return Matmul(node, label.name, FORWARD, (first, second), sizes, bias)


def _convolution(node: fx.Node, context: PassContext) -> Matmul | None:
    """A convolution over two dimensions, with what may be folded into it."""
    label, (value, matrix, bias, *_) = label_of(node), (*node.args, None)
    if label is None or not isinstance(value, fx.Node) or not isinstance(matrix, fx.Node):
        return None
    if node.kwargs or value.meta["val"].ndim != 4 or node.meta["val"].dtype not in PLACED_DTYPES:
        return None
    columns, *window = matrix.meta["val"].shape
    batch, _, *places = node.meta["val"].shape
    first = Operand(value, value, "", True, frozenset(value.users))
    second = _weight(matrix, context.folded, in_rows=True)
    if second.base is not matrix or second.source not in (matrix, *matrix.all_input_nodes):
        # a weight that was turned
        return None
    sizes = batch * math.prod(places), math.prod(window), columns
    return Matmul(node, label.name, FORWARD, (first, second), sizes, bias, _norm_after(node))  # type: ignore[arg-type]  # a node or None


def _norm_after(node: fx.Node) -> fx.Node | None:
    """The only reader of a convolution, or of its cast, if that is a BatchNorm by statistics that are inputs."""
    reader = node
    while reader is node or (is_cast(reader) and CAST_META in reader.meta):
        if len(reader.users) != 1:
            return None
        [reader] = reader.users
    if reader.target is not aten.batch_norm.default:
        return None
    parameters, training = reader.args[1:5], reader.args[5]
    are_inputs = all(isinstance(each, fx.Node) and each.op == "placeholder" for each in parameters)
    return reader if are_inputs and not training else None


def convolution_added(value: fx.Node) -> fx.Node | None:
    """The convolution of which a value is the result, or that of a norm behind it, if an addition alone reads that."""
    node = value.args[0] if value.target is aten.batch_norm.default else value
    if not isinstance(node, fx.Node) or node.target is not aten.conv2d.default:
        return None
    is_result = node is value or _norm_after(node) is value
    return node if is_result and len(value.users) == len(additions_of(value)) == 1 else None


def additions_of(value: fx.Node) -> list[fx.Node]:
    """The calls that add a value to another one."""
    adds = aten.add.Tensor, aten.add_.Tensor
    return [user for user in value.users if user.target in adds and len(values_read(user)) == 2]


def _weight(matrix: fx.Node, folded: frozenset[str], *, in_rows: bool) -> Operand:
    """The operand that multiplies a value, by rows or columns; its source is the value that a pass has cast."""
    base, in_rows = _behind_transposes(matrix, in_rows)
    source = base
    if CAST_META in base.meta and is_cast(base):
        wide = base.all_input_nodes[0]
        if wide.meta["val"].dtype is torch.float32:
            source, in_rows = _behind_transposes(wide, in_rows)
    return Operand(
        base,
        source,
        str(in_rows),
        in_rows,
        frozenset(matrix.users),
        transposed=not in_rows,
        is_weight=True,
        is_folded=source.name in folded,
    )


def _behind_transposes(matrix: fx.Node, in_rows: bool) -> tuple[fx.Node, bool]:
    while _is_transpose(matrix):
        matrix, in_rows = matrix.all_input_nodes[0], not in_rows
    return matrix, in_rows


def _is_transpose(node: fx.Node) -> bool:
    if node.target in _TRANSPOSES:
        return True
    if node.target is aten.permute.default:
        return [dim % 2 for dim in node.args[1]] == [1, 0]  # type: ignore[union-attr]  # of two dimensions
    return node.target is aten.transpose.int and {dim % 2 for dim in node.args[1:]} == {0, 1}  # type: ignore[operator]  # numbers


# ---- joint graphs


def _joint_matmuls(gm: fx.GraphModule) -> list[Matmul]:
    gradients = gradients_in(gm)
    products = [node for node in gm.graph.nodes if node.target in (aten.mm.default, aten.addmm.default)]
    products = [node for node in products if node.meta["val"].dtype in LOW_DTYPES]
    factors = {node: pair for node in products if (pair := _factors(node)) is not None}
    readers: dict[fx.Node, set[fx.Node]] = {}
    for node, (first, second, _) in factors.items():
        for argument in (first, second):
            readers.setdefault(_behind(argument)[0], set()).add(node)
    found: list[Matmul] = []
    forward: dict[str, list[Matmul]] = {}
    for node, (left, right, bias) in factors.items():
        first = _operand(left, readers, gradients, transposed=False)
        second = _operand(right, readers, gradients, transposed=True)
        name = marked(node)
        role = None if name is None else _role(first, second, forward.get(name, []))
        if name is None or role is None:
            continue
        (rows, contracted), (_, columns) = left.meta["val"].shape, right.meta["val"].shape
        found.append(Matmul(node, name, role, (first, second), (rows, contracted, columns), bias))
        if role is FORWARD:
            forward.setdefault(name, []).append(found[-1])
    return found


def _behind(argument: fx.Node) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    """The value behind all views, and the views from it on."""
    views: list[fx.Node] = []
    while has_trait(argument, Trait.RESHAPES):
        views.append(argument)
        argument = argument.all_input_nodes[0]
    return argument, tuple(reversed(views))


def _operand(
    argument: fx.Node, readers: dict[fx.Node, set[fx.Node]], gradients: set[fx.Node], *, transposed: bool
) -> Operand:
    """The matrix that is an argument of a matmul.

    Its source is an input of the graph as it is, not as it is cast for a low matmul; else the base. A weight is then
    rounded once, and the low copy is not made.
    """
    base, views = _behind(argument)
    value, source = argument.meta["val"], base
    rows, columns = (1, 0) if transposed else (0, 1)
    if base.target is CAST:
        given = base.all_input_nodes[0]
        before, after = given.meta["val"], base.meta["val"]
        if given.op == "placeholder" and before.dtype is torch.float32 and before.stride() == after.stride():
            source = given
    # as text: symbolic sizes have no hash
    layout = str((value.shape[rows], value.shape[columns], value.stride(rows), value.stride(columns)))
    in_rows = value.stride(columns) == 1 and value.stride(rows) == value.shape[columns]
    return Operand(
        base, source, layout, in_rows, frozenset(readers[base]), views, transposed, base in gradients
    )


def _role(first: Operand, second: Operand, forward: list[Matmul]) -> str | None:
    """The role of a matmul in a call of the forward; None for a product of two gradients, and for an unknown one."""
    if not (first.is_gradient or second.is_gradient):
        return FORWARD
    if first.is_gradient and second.is_gradient:
        return None
    other = second if first.is_gradient else first
    for call in forward:
        if other.base is call.operands[1].base:
            return INPUT
        if other.base is call.operands[0].base:
            return WEIGHT
    return None
