"""Extra results of a graph: the values that one module hands to another, and their gradients.

``relu(linear(x))`` becomes::

    linear = torch.ops.aten.linear.default(x, weight, bias)                 # bf16
    add = torch.ops.aten.add.Tensor(linear, amp_fx_zero_0)                  # its gradient is that of linear
    to = torch.ops.aten.to.dtype(add.detach(), torch.float32)
    clone = torch.ops.aten.clone.default(to.reshape(-1)[::7])               # elements at equal steps
    amax = torch.ops.aten.amax.default(to.abs())                            # inf or nan if an element is
    relu = torch.ops.aten.relu.default(add)
    return (relu, clone, amax)

What a kernel holds in fp32 and never writes low is handed out as it is there: the cast to fp32 is part of that kernel.
The zero is one number that is expanded, so that the input takes no memory; adding it rounds nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx
from torch import Tensor

from amp_fx._torch import FakeTensor, known_sizes, size_hint, size_with
from amp_fx.graphs.calls import add_input, grad_modes, is_gradient_call, is_parameter, module_path, start
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.values import is_eligible, numel, storage_of, written_storages
from amp_fx.instruments.calibration.ranges import sample_stride

#: elements of a value that are compared
SAMPLES = 16384

aten = torch.ops.aten


class Sample(NamedTuple):
    """Elements of a value at equal steps, flat in fp32, and the largest magnitude in it, 0-d."""

    elements: Tensor
    largest: Tensor


def boundary_values(gm: fx.GraphModule, *, every_call: bool) -> dict[str, tuple[str, ...]]:
    """The floating values of a captured graph that leave the module which computed them, or the results of all calls.

    Name of a value -> paths of the modules whose result it is, outermost first; the whole model is ``""``.
    """
    found = dict[str, tuple[str, ...]]()
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if not is_eligible(value) or not numel(value) or is_parameter(node):
            continue
        # what the graph returns is read by no module
        path = module_path(node)
        readers = [None if user.op == "output" else module_path(user) for user in node.users]
        if every_call or any(reader != path for reader in readers):
            around = _around(path) if node.op == "call_function" else []
            found[node.name] = tuple(
                outer for outer in around if any(outer not in _around(reader) for reader in readers)
            )
    return found


def _around(path: str | None) -> list[str]:
    """A module and those around it: ``"a.b"`` -> ``["", "a", "a.b"]``."""
    if path is None:
        return []
    parts = path.split(".") if path else []
    return [".".join(parts[:end]) for end in range(len(parts) + 1)]


@dataclass(frozen=True)
class Taps:
    """The inputs and results of a graph besides the program's own."""

    #: names of the values that it returns, of each a :class:`Sample`
    values: tuple[str, ...]
    #: name of a value with a gradient -> the fake input that is added to it
    zeros: dict[str, FakeTensor]
    #: fake values of the program's own inputs
    inputs: tuple[Any, ...]

    def make_zeros(self, args: Sequence[Any]) -> dict[str, tuple[Tensor, list[int]]]:
        """Name of a value -> a number with a gradient, and the size that it is expanded to as an extra input."""
        sizes = known_sizes(self.inputs, args) if self.zeros else {}
        return {
            name: (
                torch.zeros((), dtype=fake.dtype, device=fake.device, requires_grad=True),
                [size_with(size, sizes) for size in fake.shape],
            )
            for name, fake in self.zeros.items()
        }


def tap(gm: fx.GraphModule, names: Collection[str], args: Sequence[Any], *, gradients: bool) -> Taps:
    """Rewrites a graph in place so that it returns the values of these names, as far as it has them.

    ``args`` are example values of its inputs; ``gradients``: it will be differentiated, and those are wanted, too.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    first, work = start(gm.graph), Rewriter(gm.graph)
    differentiable = _differentiable(gm, placeholders, args) if gradients else set()
    taken = [node for node in gm.graph.nodes if node.name in names and is_eligible(node.meta.get("val"))]
    last = placeholders[-1]
    zeros, results = dict[str, FakeTensor](), list[fx.Node]()
    for node in taken:
        stride = sample_stride([size_hint(size) for size in node.meta["val"].shape], SAMPLES)
        with gm.graph.inserting_before(first if node.op == "placeholder" else node.next):
            value = node
            if node in differentiable:
                last = _zero(node.meta["val"], last, len(zeros))
                zeros[node.name] = last.meta["val"]
                readers = set(node.users)
                value = work.call(aten.add.Tensor, node, last)
                node.replace_all_uses_with(value, delete_user_cb=readers.__contains__)
            results += _results(work, value, stride)
    output = gm.graph.output_node()
    output.args = ((*output.args[0], *results),)  # type: ignore[misc]  # a tuple or list
    gm.recompile()
    inputs = tuple(node.meta.get("example_value", node.meta.get("val")) for node in placeholders)
    return Taps(tuple(node.name for node in taken), zeros, inputs)


def _zero(like: FakeTensor, last: fx.Node, number: int) -> fx.Node:
    """An input that is added to a value: its gradient is that of the value."""
    with like.fake_mode:
        zero = torch.empty((), dtype=like.dtype, device=like.device).expand(like.shape).requires_grad_()
    return add_input(last, f"amp_fx_zero_{number}", zero)


def _results(call: Rewriter, value: fx.Node, stride: int) -> tuple[fx.Node, fx.Node]:
    wide = call.cast(call(aten.detach.default, value), torch.float32)
    every = flat = call(aten.reshape.default, wide, [-1])
    if stride > 1:
        every, flat = wide, call(aten.slice.Tensor, flat, 0, 0, sys.maxsize, stride)
    return call(aten.clone.default, flat), call(aten.amax.default, call(aten.abs.default, every))


def _differentiable(gm: fx.GraphModule, placeholders: Sequence[fx.Node], args: Sequence[Any]) -> set[fx.Node]:
    """Values that have a gradient and a storage of their own, to which nobody writes."""
    if any(map(is_gradient_call, gm.graph.nodes)):
        # a train step takes its gradients itself
        return set()
    modes = grad_modes(gm.graph)
    found = {
        node
        for node, given in zip(placeholders, args, strict=True)
        if isinstance(given, Tensor) and given.requires_grad
    }
    fixed = {storage_of(node) for node in placeholders}.union(*map(written_storages, gm.graph.nodes))
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        floats = isinstance(value, (list, tuple)) or is_eligible(value)
        cut = node.target is aten.detach.default or not modes[node]
        if node.op == "call_function" and floats and not cut and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return {
        node
        for node in found
        if node.op == "call_function" and is_eligible(node.meta["val"]) and storage_of(node) not in fixed
    }
