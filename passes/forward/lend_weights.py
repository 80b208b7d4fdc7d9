"""In training, low copies of weights come in as inputs; their casts stay, as what gradients go through."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload
from amp_fx.graphs.facts import COPY_META, LOW_DTYPES, is_cast, is_view, storage_of, written_storages
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.plans.plan import dtype_name

__all__ = ["LendWeights"]

aten = torch.ops.aten

#: calls that read their operands from memory; convolutions on a CPU are laid out anew in the kernel that casts
_READERS = frozenset({aten.linear, aten.matmul, aten.mm, aten.bmm, aten.addmm, aten.baddbmm})

#: elements below which a cast costs less than knowing that it is not needed
_WORTH_KEEPING = 2**14


@dataclass(frozen=True)
class LendWeights(Pass):
    """Gives the graph an input more for every cast of a weight to 16 bits that matmuls read. Nothing reads it yet.

    The cast stays in the graph, as autograd makes the gradient's way back to the weight from it. In the joint graph,
    where that is done, :class:`amp_fx.passes.ReadCopies` has the matmuls read the copy. The caller hands in the copies,
    and knows when they are out of date. Weights that the graph writes to stay cast.

    Before::

        w_bf16 = torch.ops.aten.to.dtype(w, torch.bfloat16)             # w: f32, an input
        linear = torch.ops.aten.linear.default(x_bf16, w_bf16)

    After::

        w_bfloat16 = placeholder()                                      # bf16, after all others
        w_bf16 = torch.ops.aten.to.dtype(w, torch.bfloat16)
        linear = torch.ops.aten.linear.default(x_bf16, w_bf16)
    """

    name: ClassVar[str] = "lend-weights"
    needs: ClassVar[frozenset[str]] = frozenset({"casts"})

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        if not context.lent:
            return PassResult(gm, 0, "weights are cast in each call")
        placeholders = gm.graph.find_nodes(op="placeholder")
        last, added = placeholders[-1], 0
        for weight in placeholders:
            if weight.name not in context.lent or _is_written(gm, weight):
                continue
            for dtype in {cast.meta["val"].dtype: None for cast in _casts(gm, weight) if _is_kept(cast)}:
                with gm.graph.inserting_after(last):
                    last = gm.graph.placeholder(f"{weight.name}_{dtype_name(dtype)}")
                value = weight.meta["val"]
                with value.fake_mode, torch.no_grad():
                    copy = torch.empty_like(value, dtype=dtype, requires_grad=False)
                last.meta = {"val": copy, "example_value": copy, COPY_META: weight.name}
                added += 1
        return PassResult(gm, added, f"{added} low copies of weights are inputs")


def _casts(gm: fx.GraphModule, weight: fx.Node) -> Iterator[fx.Node]:
    """Casts of an input, also those inside checkpoints."""
    for user in weight.users:
        if is_cast(user):
            yield user
        for body, inside in _in_checkpoint(gm, user, weight):
            yield from _casts(body, inside)


def _is_written(gm: fx.GraphModule, weight: fx.Node) -> bool:
    """True if the graph, or a checkpoint inside it, writes to an input."""
    key = storage_of(weight)
    for node in gm.graph.nodes:
        if _is_checkpoint(node):
            if any(_is_written(body, inside) for body, inside in _in_checkpoint(gm, node, weight)):
                return True
        elif key in written_storages(node):
            return True
    return False


def _in_checkpoint(
    gm: fx.GraphModule, node: fx.Node, weight: fx.Node
) -> Iterator[tuple[fx.GraphModule, fx.Node]]:
    """What a value is called in the body of a checkpoint that it is given to, and that body."""
    if not _is_checkpoint(node):
        return
    body, *given = node.args
    inner: fx.GraphModule = getattr(gm, str(body.target))  # type: ignore[union-attr]  # a node
    placeholders = inner.graph.find_nodes(op="placeholder")
    for value, inside in zip(given, placeholders, strict=True):
        if value is weight:
            yield inner, inside


def _is_checkpoint(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "tag_activation_checkpoint"


def _is_kept(cast: fx.Node) -> bool:
    if len(cast.args) != 2 or cast.kwargs:
        return False
    value, (weight,) = cast.meta["val"], cast.all_input_nodes
    return (
        value.dtype in LOW_DTYPES
        and weight.meta["val"].dtype is torch.float32
        and all(isinstance(size, int) for size in value.shape)
        and value.numel() >= _WORTH_KEEPING
        and _is_read_by_matmuls(cast)
    )


def _is_read_by_matmuls(node: fx.Node) -> bool:
    """True if matmuls read the value, or views of it, and nobody else does."""
    return all(
        _is_read_by_matmuls(user)
        if is_view(user)
        else isinstance(user.target, OpOverload) and user.target.overloadpacket in _READERS
        for user in node.users
    )
