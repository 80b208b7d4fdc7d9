"""Let a matmul return fp32 where its 16-bit result would only be widened and returned, and where a rule says so."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import cast

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload
from amp_fx.graphs.calls import CAST
from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.keys import RESULT_MARK
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.traits import Trait, has_trait
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.passes.base import Pass, PassContext, PassResult, gradients_in, marked
from amp_fx.precision.policy.table import device_row

aten = torch.ops.aten

#: matmul -> the overload that takes an output dtype; they have CUDA kernels only. There is an ``addmm.dtype``, too,
#: but Inductor hands it to a lowering that takes no dtype (``tuned_addmm`` of torch 2.13), and fails
_WIDE: dict[OpOverload, OpOverload] = {aten.mm.default: aten.mm.dtype, aten.bmm.default: aten.bmm.dtype}
#: the same with something added -> the product alone
_ADDING = {aten.addmm.default: aten.mm.dtype, aten.baddbmm.default: aten.bmm.dtype}

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
    5. where a rule has the result of a call in fp32 it returns fp32, whoever reads it (:func:`_keep_sums`).

    Before, and after::

        grad_t: bf16[64, 32]; x: bf16[32, 16]
        mm = torch.ops.aten.mm.default(grad_t, x)                                        # bf16[64, 16]
        wide = torch.ops.prims.convert_element_type.default(mm, torch.float32)           # f32[64, 16]
        return [wide]
        # after
        mm = torch.ops.aten.mm.dtype(grad_t, x, torch.float32)                           # f32[64, 16]
        return [mm]
    """

    marks: tuple[str, ...] = ()  # names in the plan of the calls of case 5

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        widened = _keep_sums(gm) if self.marks else 0
        for node in list(gm.graph.nodes):
            if not (node.target in _WIDE or _returns_fp32(node)):
                continue
            value = node.meta["val"]
            if value.dtype not in LOW_DTYPES or not device_row(value.device.type).wide_results:
                continue
            views, casts = _readers(node)
            if not casts:
                continue
            if node.target in _WIDE:
                node.target, node.args = _WIDE[node.target], (*node.args, torch.float32)
            else:
                node.update_arg(_SCALED_DTYPE, torch.float32)  # type: ignore[arg-type]  # a dtype is an argument
            for changed in (node, *views):
                changed.meta["val"] = run_fake(changed)
            for widening in casts:
                widening.replace_all_uses_with(widening.all_input_nodes[0])
                gm.graph.erase_node(widening)
            widened += 1
        return PassResult(f"{widened} matmuls return fp32", widened)


def _returns_fp32(node: fx.Node) -> bool:
    """True for a matmul in fp8, with one scale for each operand or block, and no bias, which no kernel adds in fp32."""
    return (
        node.target is aten._scaled_mm.default
        and node.args[_SCALED_BIAS] is None
        # rows have scales of two dimensions
        and all(scale.meta["val"].ndim < 2 for scale in node.args[2:4])  # type: ignore[union-attr]  # nodes
    )


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
            elif has_trait(user, Trait.CAST) and user.meta["val"].dtype is torch.float32 and _leaves(user):
                casts.append(user)
            else:
                return [], []
    return views, casts


def _leaves(node: fx.Node) -> bool:
    """True where a value, or a view of it, is returned and not read otherwise."""
    return all(n.op == "output" or (has_trait(n, Trait.RESHAPES) and _leaves(n)) for n in node.users)


# ---- results that a user's rule has in fp32: nothing rounds them between the tensor core and their readers


def _keep_sums(gm: fx.GraphModule) -> int:
    """Lets the products of marked calls return fp32, and has in fp32 what such a call does with them.

    A bias is added in fp32, by a kernel that fuses with what reads the sum: no kernel adds one in the epilogue and
    returns fp32. Gradients of such a call are products of low operands as those of any other; they are left.

    Before, and after::

        addmm = torch.ops.aten.addmm.default(bias, x, w)                                 # bf16, marked
        wide = torch.ops.prims.convert_element_type.default(addmm, torch.float32)        # f32
        # after
        mm = torch.ops.aten.mm.dtype(x, w, torch.float32)                                # f32
        bias_f32 = torch.ops.prims.convert_element_type.default(bias, torch.float32)
        add = torch.ops.aten.add.Tensor(mm, bias_f32)

    Returns how many products that are. ``gm`` is a joint graph, on CUDA.
    """
    gradients = gradients_in(gm)
    calls = [node for node in gm.graph.nodes if marked(node, RESULT_MARK) and node not in gradients]
    #: what is fp32 now, and what it was
    wide: dict[fx.Node, torch.dtype] = {}
    #: what reads that as it is
    readers: set[fx.Node] = set()
    for node in calls:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in LOW_DTYPES:
            continue
        if node.target in _WIDE or node.target in _ADDING:
            wide[_widen(node)] = value.dtype
        elif not wide.keys().isdisjoint(node.all_input_nodes):
            _read_wide(node, wide.keys())
            readers.add(node)
            wide[node] = value.dtype
    for node, low in wide.items():
        _give(node, low, [user for user in node.users if user not in readers])
    return len(wide) - len(readers)


def _widen(node: fx.Node) -> fx.Node:
    """The sum of a product in fp32, in the place of its rounded result."""
    target = cast("OpOverload", node.target)
    if target in _WIDE:
        node.target, node.args = _WIDE[target], (*node.args, torch.float32)
        node.meta["val"] = run_fake(node)
        return node
    added, *factors = node.args
    work = Rewriter(node.graph, captured=False)
    with work.before(node):
        product = work.call(_ADDING[target], *factors, torch.float32)
        total = work.call(aten.add.Tensor, product, work.call(CAST, added, torch.float32))
    work.replace(node, total)
    return total


def _read_wide(node: fx.Node, wide: Collection[fx.Node]) -> None:
    """Runs what a call does with a product in fp32."""
    work = Rewriter(node.graph, captured=False)

    def widened(source: fx.Node) -> fx.Node:
        value = source.meta.get("val")
        is_low = source not in wide and isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES
        return work.cast(source, torch.float32) if is_low else source

    with work.before(node):
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), widened)  # type: ignore[assignment, arg-type]
    node.meta["val"] = run_fake(node)


def _give(node: fx.Node, low: torch.dtype, users: Sequence[fx.Node]) -> None:
    """Hands an fp32 result to those who have read it low: as it is where they widened it, else rounded."""
    widened = [user for user in users if user.target is CAST and user.meta["val"].dtype is torch.float32]
    for each in widened:
        each.replace_all_uses_with(node)
        node.graph.erase_node(each)
    if others := {user for user in users if user not in widened}:
        work = Rewriter(node.graph, captured=False)
        with work.after(node):
            rounded = work.cast(node, low)
        node.replace_all_uses_with(rounded, delete_user_cb=others.__contains__)
