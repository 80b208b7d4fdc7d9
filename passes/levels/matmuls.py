"""Matmuls as levels below 16 bits see them: what they read, in which layout, and what each is to a call of the forward.

A library kernel that multiplies with scales takes a matrix whose rows, and a matrix whose columns, lie in memory in one
piece, and one scale for each of these (or one for all). So the second is looked at transposed here: an :class:`Operand`
is always a matrix whose rows are contracted and scaled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx.graphs.fake_runs import is_matmul
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.passes.base import marked
from amp_fx.plans.label import label_of

__all__ = ["Matmul", "Operand", "call_name", "divides", "last_calls"]

aten = torch.ops.aten

#: besides dropout, what a result goes through on its way to a residual stream
_ON_THE_WAY = Trait.RESHAPES, Trait.UNCHANGED, Trait.CAST


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


@dataclass(frozen=True, eq=False)
class Matmul:
    """A product of two 16-bit matrices.

    Attributes:
        node: the call.
        name: in the plan, of the call of the forward that it belongs to, which may run below 16 bits.
        role: a value of :data:`amp_fx.policy.levels.ROLES`.
        operands: first and second.
        sizes: rows, contracted, columns; symbolic sizes as they are.
        bias: one number for each column, in the dtype of the result, or None.
    """

    node: fx.Node
    name: str
    role: str
    operands: tuple[Operand, Operand]
    sizes: tuple[int | torch.SymInt, int | torch.SymInt, int | torch.SymInt]
    bias: fx.Node | None

    @property
    def variable(self) -> tuple[str, str]:
        """What the cut decides about: all matmuls that a call has in one role go together."""
        return self.name, self.role


def call_name(node: fx.Node) -> str | None:
    """The name in the plan of a call, or of the one that a node of a joint graph comes from, if that is known."""
    row = label_of(node)
    return marked(node) if row is None else row.name


def divides(grain: int, sizes: Sequence[int | torch.SymInt]) -> bool:
    """True where library kernels take these sizes."""
    return all(isinstance(size, int) and size and size % grain == 0 for size in sizes)


def last_calls(gm: fx.GraphModule, gradients: set[fx.Node]) -> set[str | None]:
    """Names of the calls that multiply, and whose result is multiplied no more, nor added to a residual stream.

    Args:
        gm: captured or joint.
        gradients: what the backward of a joint graph computes.
    """
    feeds: set[fx.Node] = set()
    last: set[str | None] = set()
    for node in reversed(gm.graph.nodes):
        if node in gradients or node.op != "call_function":
            continue
        below = any(user in feeds for user in node.users)
        multiplies = is_matmul(node)
        if multiplies and not below and not _is_residual(node):
            last.add(call_name(node))
        if below or multiplies:
            feeds.add(node)
    return last


def _is_residual(node: fx.Node) -> bool:
    """True where the result is added to another value of its shape, as a block adds to the stream it reads."""
    for user in node.users:
        if has_trait(user, *_ON_THE_WAY) or user.target is aten.dropout.default:
            if _is_residual(user):
                return True
        elif user.target in (aten.add.Tensor, aten.add_.Tensor):
            shapes = [n.meta["val"].shape for n in user.all_input_nodes]
            if len(shapes) == 2 and shapes[0] == shapes[1]:
                return True
    return False
