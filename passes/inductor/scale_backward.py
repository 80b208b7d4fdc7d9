"""Scale gradients where they enter the backward, restore them where they leave it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.fx as fx

from amp_fx._torch import joint_roles, size_hint
from amp_fx.graphs.calls import start
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.traits import op_row
from amp_fx.graphs.values import LOW_DTYPES
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.precision.policy.table import device_row

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class ScaleBackward(Pass):
    """Runs on Inductor's joint graph (forward and backward together), first.

    The graph has one input more than the program: the loss scale (fp32, 0-d). Loss scaling then happens inside the
    backward alone, and outside it every gradient is true to scale. Cases:

    1. a gradient that enters is multiplied by the scale, in fp32 or wider.
    2. a gradient that leaves is divided by it, in fp32 or wider, and keeps its dtype. A 16-bit value is widened by
       the division itself: a cast of its own would be one that ``gemm_epilogue`` moves into the matmul, and what
       the division reads and writes would double.
    3. a gradient that is rows added into zeros, such as an embedding table's, is divided row by row before, in the
       kernel that makes the rows or adds them: the table is then not read and written once more. One that is sparse
       is always divided so: Inductor has no arithmetic on sparse tensors.
    4. graphs without a backward, and bodies of higher-order ops, stay as they are.

    Before, and after::

        x: f16[4, 8]; scale: f32; tangent: f32[4, 2]
        low = torch.ops.prims.convert_element_type.default(tangent, torch.float16)
        turned = torch.ops.aten.permute.default(low, [1, 0])
        mm = torch.ops.aten.mm.default(turned, x)                                        # f16[2, 8]
        grad = torch.ops.prims.convert_element_type.default(mm, torch.float32)           # f32[2, 8]
        return [x, grad]
        # after
        mul = torch.ops.aten.mul.Tensor(tangent, scale)                                  # f32[4, 2]
        low = torch.ops.prims.convert_element_type.default(mul, torch.float16)
        turned = torch.ops.aten.permute.default(low, [1, 0])
        mm = torch.ops.aten.mm.default(turned, x)
        grad = torch.ops.prims.convert_element_type.default(mm, torch.float32)
        scale_1x1 = torch.ops.aten.view.default(scale, [1, 1])
        div = torch.ops.aten.div.Tensor(mm, scale_1x1)                                   # f32[2, 8]
        return [x, div]
    """

    scale: int  # position of the loss scale among the graph's inputs

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        roles = joint_roles(gm)
        if roles is None or self.scale not in roles.inputs:
            return PassResult("no backward here", 0)
        work = _Work(gm.graph, roles.inputs[self.scale])
        for tangent in roles.tangents:
            work.enter(tangent)
        output = gm.graph.output_node()
        values = list(output.args[0])  # type: ignore[arg-type]  # a tuple
        restored: dict[fx.Node, fx.Node] = {}
        with gm.graph.inserting_before(output):
            for position in roles.gradients:
                node = values[position]
                if isinstance(node, fx.Node) and _is_differentiable(node):
                    # one value may be the gradient of several inputs
                    values[position] = restored.get(node) or restored.setdefault(node, work.leave(node))
        output.args = (values,)
        summary = f"{len(roles.tangents)} gradients enter, {len(restored)} leave"
        return PassResult(summary, len(roles.tangents) + len(restored))


class _Work(Rewriter):
    """Adds nodes to one graph's backward; ``scale`` is the placeholder of the loss scale."""

    def __init__(self, graph: fx.Graph, scale: fx.Node) -> None:
        super().__init__(graph, captured=False, meta={"partitioner_tag": "is_backward"})
        self.scale = scale

    def enter(self, tangent: fx.Node) -> None:
        """Case 1."""
        if not tangent.users or not _is_differentiable(tangent):
            return
        dtype, users = tangent.meta["val"].dtype, list(tangent.users)
        # in front of the forward, which does not care
        with self.graph.inserting_before(start(self.graph)):
            scaled = self.cast(self.call(aten.mul.Tensor, tangent, self._scale(tangent)), dtype)
        for user in users:
            user.replace_input_with(tangent, scaled)

    def leave(self, node: fx.Node) -> fx.Node:
        """Cases 2 and 3."""
        if (position := _added_rows(node)) is None:
            return self._divide(node)
        with self.graph.inserting_before(node):
            rows = self._divide(node.args[position])  # type: ignore[arg-type]  # a node
            if len(node.users) > 1:
                node = self.graph.node_copy(node)
            node.update_arg(position, rows)
        return node

    def _divide(self, node: fx.Node) -> fx.Node:
        dtype = node.meta["val"].dtype
        wide = _before_widening(node)
        return self.cast(self.call(aten.div.Tensor, wide, self._scale(wide), like=(node,)), dtype)

    def _scale(self, node: fx.Node) -> fx.Node:
        """The scale on the node's device, with as many dimensions: a 16-bit operand then does not outrank it."""
        value, scale = node.meta["val"], self.scale
        if scale.meta["val"].device != value.device:
            scale = self.call(prims.device_put.default, scale, value.device)
        if value.dtype in LOW_DTYPES and value.ndim:
            scale = self.call(aten.view.default, scale, [1] * value.ndim)
        return scale


def _added_rows(node: fx.Node) -> int | None:
    """Which argument the node adds into zeros, and nothing else, if dividing that is cheaper; else None."""
    position = op_row(node).rows
    if position is None or node.meta["val"].is_sparse:
        return position
    if len(node.users) != 1:
        return None
    rows = node.args[position]
    if not isinstance(rows, fx.Node) or rows.meta["val"].dtype in LOW_DTYPES:
        return None
    is_external, base = node.target is aten.embedding_dense_backward.default, node.args[0]
    is_full = isinstance(base, fx.Node) and base.target is aten.full.default and base.args[1] in (0, 0.0)
    if not is_external and not is_full:
        return None
    if node.target is aten.index_put.default and node.args[3:] != (True,):
        return None
    value = rows.meta["val"]
    # elsewhere the addition may be a kernel of its own, and the rows may have other readers
    if device_row(value.device.type).fuses_casts and not is_external:
        return position
    return position if size_hint(value.numel()) < size_hint(node.meta["val"].numel()) else None


def _before_widening(node: fx.Node) -> fx.Node:
    """The 16-bit value that the node only widens to fp32, else the node."""
    source = node.args[0] if node.target is prims.convert_element_type.default else None
    if not isinstance(source, fx.Node) or node.meta["val"].dtype is not torch.float32:
        return node
    return source if source.meta["val"].dtype in LOW_DTYPES else node


def _is_differentiable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
