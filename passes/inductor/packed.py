"""Calls of oneDNN in Inductor's graphs on a CPU: with weights that are packed, and in int8 what follows them."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import (
    LINEAR,
    LINEAR_INT8,
    LINES,
    pointwise_convolution,
    pointwise_convolution_int8,
    quantised_ops,
    takes_packed_inputs,
    write_as_it_is,
)
from amp_fx.graphs.calls import CAST
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.passes.base import Note, Pass, PassContext, PassResult

aten = torch.ops.aten


@dataclass(frozen=True)
class CallPacked(Pass):
    """Puts oneDNN's own calls in the place of convolutions with packed weights, and has Inductor take such weights.

    Runs on Inductor's graphs after partitioning, on CPU: after Inductor has noted the strides of what the graph
    returns, as oneDNN's calls return channels last, and before it fuses with them what follows.

    Before, and after::

        x: f32[1, 8, 6, 6]; w_packed: f32[8, 8, 3, 3]
        conv = torch.ops.amp_fx.packed_convolution.default(
            x, w_packed, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, True, False)
        # after
        conv = torch.ops.mkldnn._convolution_pointwise.default(
            x, w_packed, None, [0, 0], [1, 1], [1, 1], 1, 'none', [], '')

    A line becomes a row before, and is one again behind (:data:`amp_fx._torch.LINES`).
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        calls = {
            "amp_fx.packed_convolution.default": pointwise_convolution,
            "amp_fx.packed_convolution_int8.default": pointwise_convolution_int8,
        }
        found = [(node, calls[name]) for node in gm.graph.nodes if (name := str(node.target)) in calls]
        for node, call in found:
            is_line = call is pointwise_convolution and node.args[-1]
            node.target, node.args = call(*node.args)
            if is_line:
                _lay_as_row(node)
        linears = [node for node in gm.graph.nodes if node.target in (LINEAR, LINEAR_INT8)]
        if found or linears:
            takes_packed_inputs(gm, [*linears, *(node for node, _ in found)])
        return PassResult(f"{len(found)} convolutions have packed weights", len(found))


def _lay_as_row(convolution: fx.Node) -> None:
    call, (x, *more), value = (
        Rewriter(convolution.graph, captured=False),
        convolution.args,
        convolution.meta["val"],
    )
    views, back = LINES[value.ndim]
    with call.before(convolution):
        for view, dim in views:
            x = call(view, x, dim)
    for view, dim in views:
        value = view(value, dim)
    convolution.args, convolution.meta["val"] = (x, *more), value
    line, readers = convolution, [*convolution.users]
    with call.before(convolution.next):
        for view, dim in back:
            line = call(view, line, dim)
    for reader in readers:
        reader.replace_input_with(convolution, line)


@dataclass(frozen=True)
class HoldPacked(Pass):
    """Puts packed weights in the place of constants.

    Runs first on the graphs of a package after partitioning: no exported program, and no fake tensor, stands for what
    oneDNN has packed, so that until then another tensor does.

    Before, and after::

        x: f32[2, 8]
        w = self.w_packed
        linear = torch.ops.aten.linear.default(x, w)
        # after: the same code, and w_packed, which was zeros, is what oneDNN has packed
        w = self.w_packed
        linear = torch.ops.aten.linear.default(x, w)
    """

    packed: Mapping[int, torch.Tensor] = field(default_factory=dict, repr=False)  # by the other's address

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        held = set[int]()
        for target in {str(node.target) for node in gm.graph.find_nodes(op="get_attr")}:
            path, _, name = target.rpartition(".")
            owner = gm.get_submodule(path)
            value = getattr(owner, name)
            # one that Inductor has packed by itself has no address
            is_plain = isinstance(value, torch.Tensor) and not value.is_mkldnn
            if is_plain and (address := value.data_ptr()) in self.packed:
                held.add(address)
                delattr(owner, name)
                setattr(owner, name, self.packed[address])
        return PassResult(f"{len(held)} constants are packed weights", len(held), {Note.HELD: held})


@dataclass(frozen=True)
class ReadScales(Pass):
    """Has kernels read scales that were measured from memory.

    Runs on Inductor's graphs after partitioning, on CPU, once products in int8 do what follows them. The rounding of
    anything else, of a norm, say, is left, and is part of one of Inductor's kernels. With its scale as a number in the
    code, the kernel of each layer would be compiled by itself: 23 kernels for a BERT of 6 layers instead of 11.
    Bytes lie in memory as their value does: heads that lie in rows are rows of bytes without another copy.

    Before, and after::

        norm: f32[2, 8]
        quantize = torch.ops.quantized_decomposed.quantize_per_tensor.default(norm, 0.0125, 131, 0, 255, torch.uint8)
        # after
        constant = self.amp_fx_scale_0                                          # f32[16]
        scale = torch.ops.aten.slice.Tensor(constant, 0, 0, 1)
        zero = torch.ops.aten.slice.Tensor(constant, 0, 1, 2)
        wide = torch.ops.prims.convert_element_type.default(norm, torch.float32)
        mul = torch.ops.aten.mul.Tensor(wide, scale)
        rounded = torch.ops.aten.round.default(mul)
        add = torch.ops.aten.add.Tensor(rounded, zero)
        least = torch.ops.aten.clamp_min.default(add, 0)
        most = torch.ops.aten.clamp_max.default(least, 255)
        quantize = torch.ops.prims.convert_element_type.default(most, torch.uint8)
    """

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        found = gm.graph.find_nodes(op="call_function", target=quantised_ops().quantize_per_tensor.default)
        # which Inductor makes one call of, that pools bytes
        rounds = [node for node in found if not _is_of_pooled(node)]
        for position, node in enumerate(rounds):
            _read_scale(gm, node, f"amp_fx_scale_{position}")
        return PassResult(f"{len(rounds)} values are rounded by kernels", len(rounds))


def _is_of_pooled(node: fx.Node) -> bool:
    [value] = node.all_input_nodes
    return value.target is operator.getitem and "max_pool" in str(value.all_input_nodes[0].target)


def _read_scale(gm: fx.GraphModule, node: fx.Node, name: str) -> None:
    """Writes the rounding of a value as Inductor does, with scale and zero point in memory."""
    value, scale, zero_point, least, largest, dtype = node.args
    # Inductor would write up to eight elements into the code
    numbers: Any = [1.0 / scale, zero_point] + [0.0] * 14  # type: ignore[operator]  # scale is a number
    gm.register_buffer(name, torch.tensor(numbers, dtype=torch.float32))
    call = Rewriter(gm.graph, captured=False)
    with gm.graph.inserting_before(node):
        constant = gm.graph.get_attr(name)
        constant.meta["val"] = node.meta["val"].new_empty(16, dtype=torch.float32)
        inverse, zero = (call(aten.slice.Tensor, constant, 0, at, at + 1) for at in range(2))
        wide = call(CAST, value, torch.float32)
        rounded = call(aten.add.Tensor, call(aten.round.default, call(aten.mul.Tensor, wide, inverse)), zero)
        rounded = call(aten.clamp_max.default, call(aten.clamp_min.default, rounded, least), largest)
        low = call(CAST, rounded, dtype)
    if not low.meta["val"].is_contiguous():
        write_as_it_is(low)
    node.replace_all_uses_with(low)
    gm.graph.erase_node(node)
