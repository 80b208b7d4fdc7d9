"""Scale gradients where they enter the backward, restore and check them where they leave it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.fx as fx

from amp_fx._torch import joint_roles
from amp_fx.graphs.facts import LOW_DTYPES, run_fake
from amp_fx.passes.base import Pass, PassContext, PassResult

__all__ = ["ScaleBackward"]

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class ScaleBackward(Pass):
    """Runs on Inductor's joint graph (forward and backward together), first.

    The graph has two inputs more than the program: the loss scale (fp32, 0-d) and a vector that nothing reads
    (fp32, one element per parameter). Loss scaling then happens inside the backward alone, and outside it every
    gradient is true to scale. Cases:

    1. a gradient that enters is multiplied by the scale, in fp32 or wider.
    2. a gradient that leaves is divided by it, in fp32 or wider, and keeps its dtype. A 16-bit value is widened by
       the division itself: a cast of its own would be one that ``gemm_epilogue`` moves into the matmul, and what
       the division reads and writes would double.
    3. a parameter's gradient is looked through for inf and nan in the kernel that divides it. What was found, 1.0
       or 0.0, is the parameter's element in the gradient of the vector, which autograd adds up over backwards.
    4. graphs without a backward, and bodies of higher-order ops, stay as they are.

    Before::

        mm = torch.ops.aten.mm.default(tangent_16, x)                                    # f16
        grad = torch.ops.prims.convert_element_type.default(mm, torch.float32)           # f32
        return [y, grad, None]

    After::

        mul = torch.ops.aten.mul.Tensor(tangent, scale)                                  # f32, becomes tangent_16
        mm = torch.ops.aten.mm.default(tangent_16, x)                                    # f16
        grad = torch.ops.aten.div.Tensor(mm, scale_1x1)                                  # f32
        bad = torch.ops.aten.bitwise_or.Tensor(isinf(grad), isnan(grad))                 # bool
        flags = torch.ops.prims.convert_element_type.default(cat([any(bad)]), torch.float32)
        return [y, grad, flags]

    Attributes:
        scale: position of the scale among the graph's inputs; the vector comes after it.
        leaves: positions of the parameters, in the order of the vector.
    """

    name: ClassVar[str] = "scale-backward"

    scale: int
    leaves: tuple[int, ...] = ()

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        roles = joint_roles(gm)
        if roles is None or self.scale not in roles.inputs:
            return PassResult(gm, 0, "no backward here")
        work = _Work(gm.graph, roles.inputs[self.scale])
        for tangent in roles.tangents:
            work.enter(tangent)
        output = gm.graph.output_node()
        values = list(output.args[0])  # type: ignore[arg-type]  # a tuple
        restored: dict[fx.Node, fx.Node] = {}
        with gm.graph.inserting_before(output):
            for position in (p for positions in roles.gradients.values() for p in positions):
                node = values[position]
                if isinstance(node, fx.Node) and _is_differentiable(node):
                    # one value may be the gradient of several inputs
                    values[position] = restored.get(node) or restored.setdefault(node, work.leave(node))
            if self.leaves:
                leaves = [[values[p] for p in roles.gradients[leaf]] for leaf in self.leaves]
                (position,) = roles.gradients[self.scale + 1]
                values[position] = work.flags(leaves)
        output.args = (values,)
        summary = (
            f"{len(roles.tangents)} gradients enter, {len(restored)} leave, {len(self.leaves)} are checked"
        )
        return PassResult(gm, len(work.added), summary)


@dataclass
class _Work:
    """Adds nodes to one graph's backward.

    Attributes:
        graph: where to.
        scale: the placeholder of the scale.
        added: the new nodes.
    """

    graph: fx.Graph
    scale: fx.Node
    added: list[fx.Node] = field(default_factory=list)

    def call(self, target: Any, *args: Any, like: fx.Node | None = None) -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta["partitioner_tag"] = "is_backward"
        if like is not None and "stack_trace" in like.meta:
            node.meta["stack_trace"] = like.meta["stack_trace"]
        node.meta["val"] = run_fake(node)
        self.added.append(node)
        return node

    def enter(self, tangent: fx.Node) -> None:
        """Case 1."""
        if not tangent.users or not _is_differentiable(tangent):
            return
        dtype, users = tangent.meta["val"].dtype, list(tangent.users)
        # before the first node that is no placeholder: the forward does not care
        first = next(node for node in self.graph.nodes if node.op != "placeholder")
        with self.graph.inserting_before(first):
            scaled = self.call(aten.mul.Tensor, tangent, self._scale(tangent))
            if scaled.meta["val"].dtype is not dtype:
                scaled = self.call(prims.convert_element_type.default, scaled, dtype)
        for user in users:
            user.replace_input_with(tangent, scaled)

    def leave(self, node: fx.Node) -> fx.Node:
        """Case 2."""
        dtype = node.meta["val"].dtype
        wide = _before_widening(node)
        restored = self.call(aten.div.Tensor, wide, self._scale(wide), like=node)
        if restored.meta["val"].dtype is not dtype:
            restored = self.call(prims.convert_element_type.default, restored, dtype, like=node)
        return restored

    def flags(self, leaves: Sequence[Sequence[fx.Node | None]]) -> fx.Node:
        """Case 3."""
        return self.call(
            prims.convert_element_type.default,
            self.call(aten.cat.default, [self._flag([part for part in parts if part]) for parts in leaves]),
            torch.float32,
        )

    def _flag(self, parts: Sequence[fx.Node]) -> fx.Node:
        """True, in one element, if one of the values has an inf or nan; a tensor subclass has several values."""
        found: fx.Node | None = None
        for part in parts:
            # isfinite is both a fallback and a decomposition, which Inductor refuses at this stage
            inf, nan = self.call(aten.isinf.default, part), self.call(aten.isnan.default, part)
            bad = self.call(aten.any.default, self.call(aten.bitwise_or.Tensor, inf, nan))
            found = bad if found is None else self.call(aten.bitwise_or.Tensor, found, bad)
        if found is None:
            # the graph computes no gradient for this parameter; no scale is negative, so this is never set
            found = self.call(aten.lt.Scalar, self.scale, 0.0)
        return self.call(aten.view.default, found, [1])

    def _scale(self, node: fx.Node) -> fx.Node:
        """The scale on the node's device, with as many dimensions: a 16-bit operand then does not outrank it."""
        value, scale = node.meta["val"], self.scale
        if scale.meta["val"].device != value.device:
            scale = self.call(prims.device_put.default, scale, value.device)
        if value.dtype in LOW_DTYPES and value.ndim:
            scale = self.call(aten.view.default, scale, [1] * value.ndim)
        return scale


def _before_widening(node: fx.Node) -> fx.Node:
    """The 16-bit value that the node only widens to fp32, else the node."""
    source = node.args[0] if node.target is prims.convert_element_type.default else None
    if not isinstance(source, fx.Node) or node.meta["val"].dtype is not torch.float32:
        return node
    return source if source.meta["val"].dtype in LOW_DTYPES else node


def _is_differentiable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
