"""Matmuls of a joint graph as fp8 sees them: what they read, in which layout, and what each is to the forward.

A scaled matmul takes a matrix A whose rows, and a matrix B whose columns, lie in memory in one piece, and one scale for
each of these (or one for all). So B is looked at transposed here: an :class:`Operand` is always a matrix whose rows are
contracted and scaled.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx._torch import joint_roles
from amp_fx.graphs.facts import LOW_DTYPES, is_matmul
from amp_fx.passes.keyed import marked
from amp_fx.placement.layout import CAST
from amp_fx.policy.fp8 import FORWARD, INPUT, WEIGHT

__all__ = [
    "FORWARD",
    "FP8_META",
    "INPUT",
    "WEIGHT",
    "Matmul",
    "Operand",
    "find_matmuls",
    "is_residual",
    "last_matmuls",
]

aten = torch.ops.aten

#: node.meta key of a matmul of a joint graph that is to run in fp8: the recipe
FP8_META = "amp_fx_fp8"

#: what hands on all elements of a value, at most in another shape or order
_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten._unsafe_view.default,
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
    }
)


#: besides these, what a result goes through on its way to a residual stream
_ON_THE_WAY = frozenset(
    {CAST, aten.to.dtype, aten.dropout.default, aten.clone.default, aten.contiguous.default}
)


@dataclass(frozen=True)
class Operand:
    """A matrix that a matmul reads, with the contracted dimension last.

    Attributes:
        base: the value behind all views.
        views: from the base to the matrix as the matmul's argument, in order.
        transposed: True for the second operand, whose rows are the argument's columns.
        is_gradient: True for what depends on a gradient that enters the backward.
    """

    base: fx.Node
    views: tuple[fx.Node, ...]
    transposed: bool
    is_gradient: bool

    @classmethod
    def of(cls, argument: fx.Node, *, transposed: bool, gradients: set[fx.Node]) -> Operand:
        """What stands behind an argument of a matmul."""
        views: list[fx.Node] = []
        base = argument
        while base.target in _VIEWS:
            views.append(base)
            base = base.all_input_nodes[0]
        return cls(base, tuple(reversed(views)), transposed, base in gradients)

    @property
    def value(self) -> torch.Tensor:
        """Fake value of the argument."""
        return (self.views[-1] if self.views else self.base).meta["val"]

    @property
    def layout(self) -> tuple[int, ...]:
        """Sizes and strides of the rows: two operands of one base with equal layouts are the same matrix."""
        rows, columns = (1, 0) if self.transposed else (0, 1)
        value = self.value
        return (value.shape[rows], value.shape[columns], value.stride(rows), value.stride(columns))

    @property
    def layout_key(self) -> str:
        """The layout as text: symbolic sizes have no hash."""
        return str(self.layout)

    @property
    def lies_in_rows(self) -> bool:
        """True where each row lies in memory in one piece."""
        _, columns, stride, step = self.layout
        return step == 1 and stride == columns

    @property
    def source(self) -> fx.Node:
        """What is quantised: an input of the graph as it is, not as it is cast for a low matmul; else the base.

        A weight is then rounded once, and the low copy is not made.
        """
        if self.base.target is CAST:
            given = self.base.all_input_nodes[0]
            before, after = given.meta["val"], self.base.meta["val"]
            if (
                given.op == "placeholder"
                and before.dtype is torch.float32
                and before.stride() == after.stride()
            ):
                return given
        return self.base


@dataclass(frozen=True)
class Matmul:
    """One ``mm`` or ``addmm`` of 16-bit matrices.

    Attributes:
        node: the call.
        name: of the call in the plan that it belongs to; None where that may not run in fp8, or is not known.
        role: :data:`FORWARD`, :data:`INPUT` or :data:`WEIGHT`; None where none fits.
        operands: first and second.
    """

    node: fx.Node
    name: str | None
    role: str | None
    operands: tuple[Operand, Operand]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Rows, contracted, columns; symbolic sizes as they are."""
        first, second = self.operands
        return first.layout[0], first.layout[1], second.layout[0]


def find_matmuls(gm: fx.GraphModule) -> list[Matmul]:
    """The 16-bit ``mm`` and ``addmm`` of a graph, in order."""
    gradients = _gradients(gm)
    found: list[Matmul] = []
    forward: dict[str, list[Matmul]] = {}
    for node in gm.graph.nodes:
        arguments = _arguments(node)
        if arguments is None:
            continue
        first, second = arguments
        operands = (
            Operand.of(first, transposed=False, gradients=gradients),
            Operand.of(second, transposed=True, gradients=gradients),
        )
        name = marked(node)
        role = _role(operands, forward.get(name or "", []))
        found.append(Matmul(node, name, role, operands))
        if role is FORWARD:
            forward.setdefault(name or "", []).append(found[-1])
    return found


def is_residual(node: fx.Node) -> bool:
    """True where the result is added to another value of its shape, as a block adds to the stream it reads."""
    for user in node.users:
        if user.target in _VIEWS or user.target in _ON_THE_WAY:
            if is_residual(user):
                return True
        elif user.target in (aten.add.Tensor, aten.add_.Tensor):
            shapes = [n.meta["val"].shape for n in user.all_input_nodes]
            if len(shapes) == 2 and shapes[0] == shapes[1]:
                return True
    return False


def last_matmuls(gm: fx.GraphModule) -> set[fx.Node]:
    """Calls of the forward that multiply, and whose result no other call of the forward multiplies again."""
    gradients = _gradients(gm)
    feeds: set[fx.Node] = set()
    last: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if node in gradients or node.op != "call_function":
            continue
        below = any(user in feeds for user in node.users)
        multiplies = is_matmul(node)
        if multiplies and not below:
            last.add(node)
        if below or multiplies:
            feeds.add(node)
    return last


def _gradients(gm: fx.GraphModule) -> set[fx.Node]:
    """What depends on a gradient that enters the backward."""
    roles = joint_roles(gm)
    found = set() if roles is None else set(roles.tangents)
    for node in gm.graph.nodes:
        if node.op == "call_function" and any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _arguments(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two matrices of a 16-bit matmul that has an fp8 counterpart."""
    if node.op != "call_function" or node.kwargs:
        return None
    if node.target is aten.mm.default:
        first, second = node.args
    elif node.target is aten.addmm.default and _is_bias(node):
        _, first, second = node.args
    else:
        return None
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return None
    same = first.meta["val"].dtype is second.meta["val"].dtype is node.meta["val"].dtype
    return (first, second) if same and node.meta["val"].dtype in LOW_DTYPES else None


def _is_bias(node: fx.Node) -> bool:
    """True where what ``addmm`` adds is one number for each column, in the dtype of the result."""
    bias = node.args[0]
    if not isinstance(bias, fx.Node) or len(node.args) != 3:
        return False
    value, result = bias.meta["val"], node.meta["val"]
    return value.ndim == 1 and value.shape[0] == result.shape[1] and value.dtype is result.dtype


def _role(operands: tuple[Operand, Operand], forward: list[Matmul]) -> str | None:
    first, second = operands
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
