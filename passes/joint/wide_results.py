"""Products whose result a user's rule has in fp32: nothing rounds it between the tensor core and its readers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload
from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.keys import RESULT_MARK
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.passes.base import marked
from amp_fx.passes.levels.matmuls import gradients_in
from amp_fx.placement.layout import CAST

__all__ = ["WIDE", "keep_sums"]

aten = torch.ops.aten

#: matmul -> the overload that takes an output dtype; they have CUDA kernels only. There is an ``addmm.dtype``, too,
#: but Inductor hands it to a lowering that takes no dtype (``tuned_addmm`` of torch 2.13), and fails
WIDE: dict[OpOverload, OpOverload] = {aten.mm.default: aten.mm.dtype, aten.bmm.default: aten.bmm.dtype}

#: the same with something added -> the product alone
_ADDING: dict[OpOverload, OpOverload] = {
    aten.addmm.default: aten.mm.dtype,
    aten.baddbmm.default: aten.bmm.dtype,
}


def keep_sums(gm: fx.GraphModule) -> int:
    """Lets the products of marked calls return fp32, and has in fp32 what such a call does with them.

    A bias is added in fp32, by a kernel that fuses with what reads the sum: no kernel adds one in the epilogue and
    returns fp32. Gradients of such a call are products of low operands as those of any other; they are left.

    Before::

        addmm = torch.ops.aten.addmm.default(bias, x, w)                                 # bf16, marked
        view = torch.ops.aten.view.default(addmm, [8, 4, 6])                             # bf16, marked
        wide = torch.ops.prims.convert_element_type.default(view, torch.float32)         # f32

    After::

        mm = torch.ops.aten.mm.dtype(x, w, torch.float32)                                # f32
        bias_f32 = torch.ops.prims.convert_element_type.default(bias, torch.float32)
        add = torch.ops.aten.add.Tensor(mm, bias_f32)
        view = torch.ops.aten.view.default(add, [8, 4, 6])                               # f32

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
        if node.target in WIDE or node.target in _ADDING:
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
    graph, target = node.graph, cast("OpOverload", node.target)
    if target in WIDE:
        node.target, node.args = WIDE[target], (*node.args, torch.float32)
        node.meta["val"] = run_fake(node)
        return node
    added, *factors = node.args
    with graph.inserting_before(node):
        product = _call(node, _ADDING[target], *factors, torch.float32)
        total = _call(node, aten.add.Tensor, product, _call(node, CAST, added, torch.float32))
    node.replace_all_uses_with(total)
    graph.erase_node(node)
    return total


def _read_wide(node: fx.Node, wide: Collection[fx.Node]) -> None:
    """Runs what a call does with a product in fp32."""

    def widened(source: fx.Node) -> fx.Node:
        value = source.meta.get("val")
        is_low = source not in wide and isinstance(value, torch.Tensor) and value.dtype in LOW_DTYPES
        return _call(node, CAST, source, torch.float32) if is_low else source

    with node.graph.inserting_before(node):
        node.args, node.kwargs = fx.map_arg((node.args, node.kwargs), widened)  # type: ignore[assignment, arg-type]
    node.meta["val"] = run_fake(node)


def _give(node: fx.Node, low: torch.dtype, users: Sequence[fx.Node]) -> None:
    """Hands an fp32 result to those who have read it low: as it is where they widened it, else rounded."""
    widened = [user for user in users if user.target is CAST and user.meta["val"].dtype is torch.float32]
    for each in widened:
        each.replace_all_uses_with(node)
        node.graph.erase_node(each)
    others = {user for user in users if user not in widened}
    if others:
        with node.graph.inserting_after(node):
            rounded = _call(node, CAST, node, low)
        node.replace_all_uses_with(rounded, delete_user_cb=others.__contains__)


def _call(like: fx.Node, target: OpOverload, *args: Any) -> fx.Node:
    """A call that comes from where another one does."""
    node = like.graph.call_function(target, args)
    node.meta = {**like.meta, "val": run_fake(node)}
    return node
