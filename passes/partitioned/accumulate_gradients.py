"""The backward adds gradients to those that are there."""

from __future__ import annotations

import operator
from collections.abc import Collection
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.fx as fx

from amp_fx._torch import OpOverload
from amp_fx.graphs.facts import LOW_DTYPES, run_fake
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.placement.layout import ADD_CONVERTED, CONVERT
from amp_fx.placement.products import ADD_PRODUCT

__all__ = ["AccumulateGradients"]

aten = torch.ops.aten

#: library calls whose results reach memory in 16 bits; the second result of a convolution's is the weight's gradient
_PRODUCERS = frozenset(
    {aten.mm.default, aten.bmm.default, aten.convolution_backward.default, aten._scaled_mm.default}
)

#: library call that returns fp32 -> the one that adds instead, and how many arguments they share. Matmuls that return
#: fp32 are for CUDA, casts that change the layout for a CPU
_ADDS: dict[object, tuple[OpOverload, int]] = {aten.mm.dtype: (ADD_PRODUCT, 2), CONVERT: (ADD_CONVERTED, 1)}

#: views that may stand between them and what is returned
_VIEWS = frozenset(
    {
        aten.view.default,
        aten.reshape.default,
        aten.permute.default,
        aten.t.default,
        aten.transpose.int,
        aten.squeeze.dim,
        aten.unsqueeze.default,
    }
)

#: elements below which a gradient is not worth its share of the checks in each backward
_WORTH_ADDING = 2**14


@dataclass(frozen=True)
class AccumulateGradients(Pass):
    """Runs on a copy of a backward graph, for calls that find gradients in their parameters.

    By itself, the backward widens a gradient, and autograd adds it: 6 and 12 bytes moved per parameter. Added where
    it is widened, it is 10. The bits are the same: one sum of the same two numbers. That is why only results of
    library calls are added, which are rounded to 16 bits in memory. What generated code computes may be fused with the
    addition in another way than without it, and a compiler may contract a multiplication and an addition.

    Where a library call returns fp32, another one adds: on a CPU the cast of a convolution's gradient that changes its
    layout (:class:`amp_fx.passes.LayOutGradients`), on CUDA a matmul (:class:`amp_fx.passes.GemmEpilogue`), 8 bytes
    instead of 16. For the latter the library may choose another kernel, and the last bit may differ.

    The gradient that is there is one more input, after all others, and is written in place; nothing is returned for it.

    Before::

        mm = torch.ops.aten.mm.default(grad_t, x)                                        # bf16
        wide = torch.ops.prims.convert_element_type.default(mm, torch.float32)           # f32
        return [wide]

    After::

        mm = torch.ops.aten.mm.default(grad_t, x)                                        # bf16
        wide = torch.ops.prims.convert_element_type.default(mm, torch.float32)           # f32
        sum = torch.ops.aten.add.Tensor(amp_fx_grad_0, wide)
        copy = torch.ops.aten.copy_.default(amp_fx_grad_0, sum)
        return [None]

    Attributes:
        parameters: positions of leaves among the outputs, which are the inputs of the program.
    """

    name: ClassVar[str] = "accumulate-gradients"

    parameters: Collection[int]

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        output = gm.graph.output_node()
        values = list(output.args[0])  # type: ignore[arg-type]  # a tuple
        chosen = [
            position
            for position in self.parameters
            if values.count(values[position]) == 1 and _is_added(values[position])
        ]
        gradients = [values[position] for position in chosen]
        for position in chosen:
            _add(gm.graph, position, values[position])
            values[position] = None
        output.args = (tuple(values),)
        if "user_visible_output_idxs" in output.meta:
            visible = output.meta["user_visible_output_idxs"]
            output.meta["user_visible_output_idxs"] = [p for p in visible if values[p] is not None]
        for node in gradients:
            if not node.users:
                gm.graph.erase_node(node)
        return PassResult(gm, len(chosen), f"{len(chosen)} gradients are added where they are computed")

    @staticmethod
    def positions(gm: fx.GraphModule) -> tuple[int, ...]:
        """Of a graph after the pass: whose gradients its last inputs are."""
        names = [str(node.target) for node in gm.graph.find_nodes(op="placeholder")]
        return tuple(int(name.removeprefix(_INPUT)) for name in names if name.startswith(_INPUT))


#: names of the new inputs, before the position
_INPUT = "amp_fx_grad_"


def _add(graph: fx.Graph, position: int, gradient: fx.Node) -> None:
    last = graph.find_nodes(op="placeholder")[-1]
    with graph.inserting_after(last):
        before = graph.placeholder(f"{_INPUT}{position}")
    value = gradient.meta["val"]
    with value.fake_mode:
        before.meta["val"] = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    # at the end, where AOTAutograd has its own writes to inputs: Inductor's patterns do not look across a write
    with graph.inserting_before(graph.output_node()):
        if gradient.target in _ADDS:
            add, arguments = _ADDS[gradient.target]
            graph.call_function(add, (before, *gradient.args[:arguments])).meta["val"] = None
            return
        total = graph.call_function(aten.add.Tensor, (before, gradient))
        total.meta["val"] = run_fake(total)
        written = graph.call_function(aten.copy_.default, (before, total))
        written.meta["val"] = before.meta["val"]


def _is_added(node: object) -> bool:
    """True for an fp32 gradient that is a library call's 16-bit result, widened and nothing else."""
    if not isinstance(node, fx.Node):
        return False
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32 or not value.is_contiguous():
        return False
    is_added = _is_added_by_the_library(node) or _is_stored(_before_widening(node))
    return value.numel() >= _WORTH_ADDING and is_added


def _is_added_by_the_library(node: fx.Node) -> bool:
    """True for a call that has a counterpart which adds, if what it returns goes to the program and to nobody else."""
    return node.target in _ADDS and all(user.op == "output" for user in node.users)


def _through_views(node: fx.Node) -> fx.Node:
    while node.target in _VIEWS:
        node = node.all_input_nodes[0]
    return node


def _before_widening(node: fx.Node) -> fx.Node | None:
    """The 16-bit value that a gradient is widened from, or divided by a loss scale from."""
    node = _through_views(node)
    is_cast = node.target is torch.ops.prims.convert_element_type.default
    if not is_cast and node.target is not aten.div.Tensor:
        return None
    source = node.args[0]
    if not isinstance(source, fx.Node) or source.meta["val"].dtype not in LOW_DTYPES:
        return None
    return source


def _is_stored(node: fx.Node | None) -> bool:
    """True for the result of a library call, seen through views."""
    if node is None:
        return False
    node = _through_views(node)
    # a convolution's backward returns several
    source = node.args[0] if node.target is operator.getitem else node
    return isinstance(source, fx.Node) and source.target in _PRODUCERS
