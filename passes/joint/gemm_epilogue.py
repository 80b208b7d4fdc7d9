"""Let a matmul return fp32 where its 16-bit result would only be widened and returned, and where a rule says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.passes.base import JOINT, Pass, PassContext
from amp_fx.passes.joint.wide_results import WIDE, keep_sums

__all__ = ["GemmEpilogue"]

aten = torch.ops.aten

#: position of the dtype that a scaled matmul returns, and of what it adds
_SCALED_DTYPE, _SCALED_BIAS = 6, 4


@dataclass(frozen=True)
class GemmEpilogue(Pass):
    """Runs on Inductor's joint graph (forward and backward together), on CUDA.

    Tensor cores add up in fp32; rounding to 16 bits is the last thing a matmul does. Where the graph returns the
    result in fp32, as it does the gradient of an fp32 weight, the rounding loses digits and the cast is a kernel of
    its own: 2 bytes written, 2 read and 4 written per element instead of 4 written. Cases:

    1. the matmul's only readers are casts to fp32, which the graph returns and nobody else reads.
    2. as 1, with views in between, before or after the cast.
    3. a matmul in fp8 with one scale for each operand, or one for each block; with a scale for each row, not all
       kernels return fp32.
    4. a result that something in the graph reads, in whichever dtype, stays: the cast is part of its reader's kernel
       and costs nothing there, while the matmul would write twice the bytes and the reader read them.
    5. where a rule has the result of a call in fp32 it returns fp32, whoever reads it (:mod:`.wide_results`).

    Before::

        mm = torch.ops.aten.mm.default(grad_t, x)                                        # bf16
        wide = torch.ops.prims.convert_element_type.default(mm, torch.float32)           # f32
        return [y, wide]

    After::

        mm = torch.ops.aten.mm.dtype(grad_t, x, torch.float32)                           # f32
        return [y, mm]

    Attributes:
        marks: names in the plan of the calls of case 5.
    """

    name: ClassVar[str] = "gemm-epilogue"
    needs: ClassVar[frozenset[str]] = frozenset({JOINT})

    marks: tuple[str, ...] = ()

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        """See the class."""
        widened = keep_sums(gm) if self.marks else 0
        for node in list(gm.graph.nodes):
            if not (node.target in WIDE or _returns_fp32(node)) or not _is_low_cuda(node):
                continue
            views, casts = _readers(node)
            if not casts:
                continue
            if node.target in WIDE:
                node.target, node.args = WIDE[node.target], (*node.args, torch.float32)
            else:
                node.update_arg(_SCALED_DTYPE, torch.float32)  # type: ignore[arg-type]  # a dtype is an argument
            for changed in (node, *views):
                changed.meta["val"] = run_fake(changed)
            for cast in casts:
                cast.replace_all_uses_with(cast.all_input_nodes[0])
                gm.graph.erase_node(cast)
            widened += 1
        return f"{widened} matmuls return fp32"


def _returns_fp32(node: fx.Node) -> bool:
    """True for a matmul in fp8, with one scale for each operand or block, and no bias, which no kernel adds in fp32."""
    return (
        node.target is aten._scaled_mm.default
        and node.args[_SCALED_BIAS] is None
        # rows have scales of two dimensions
        and all(scale.meta["val"].ndim < 2 for scale in node.args[2:4])  # type: ignore[union-attr]  # nodes
    )


def _is_low_cuda(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES and value.device.type == "cuda"


def _readers(node: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """(views of the result, casts that end them); no casts unless all that leaves is the result in fp32."""
    views: list[fx.Node] = []
    casts: list[fx.Node] = []
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if has_trait(user, Trait.RESHAPES):
                views.append(user)
                stack.append(user)
            elif (
                has_trait(user, Trait.CAST) and user.meta["val"].dtype is torch.float32 and _only_leaves(user)
            ):
                casts.append(user)
            else:
                return [], []
    return views, casts


def _only_leaves(node: fx.Node) -> bool:
    """True where a value, or a view of it, is returned and not read otherwise."""
    return all(
        user.op == "output" or (has_trait(user, Trait.RESHAPES) and _only_leaves(user)) for user in node.users
    )
