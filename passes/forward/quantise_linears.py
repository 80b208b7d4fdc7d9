"""Convert what matmuls in fp8 read, and multiply with scales: in graphs without gradients."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import torch.fx as fx

from amp_fx.graphs.capture import REGION_META
from amp_fx.graphs.facts import is_view, run_fake, storage_of, written_storages
from amp_fx.passes.base import Pass, PassContext, PassResult
from amp_fx.passes.forward.fp8_linears import Linear, linear_of
from amp_fx.passes.joint.fp8_matmuls import FP8_META
from amp_fx.placement.layout import CAST
from amp_fx.plans.plan import CAST_META, STEP_META
from amp_fx.policy.fp8 import Recipe
from amp_fx.policy.fp8_copy import fp8_copy
from amp_fx.weights.forms import Scaled

__all__ = ["PART_META", "Part", "QuantiseLinears", "erase_unread"]

aten = torch.ops.aten

#: node.meta key of an fp8 copy of a matrix and of its factors
PART_META = "amp_fx_fp8_part"

#: what new nodes take over from the matmul that needs them first
_META = ("nn_module_stack", "stack_trace", REGION_META)


@dataclass(frozen=True)
class Part:
    """What a node holds of a matrix.

    Attributes:
        source: the matrix.
        form: of the copy.
        index: which of the form's tensors.
    """

    source: fx.Node
    form: Scaled
    index: int


@dataclass(frozen=True)
class QuantiseLinears(Pass):
    """Runs after :class:`PlaceFp8Linears` has chosen. The result is an ordinary graph that every runtime can run.

    1. The matrix has a scale for each column of the result, whatever the recipe: it may be made once and kept.
    2. The value has a scale for each row, as it is contracted (recipes by row), or one. All that read the value share
       the copy, unless somebody writes to it.
    3. With one scale for the value, library kernels want one for the matrix, too: its factors are multiplied behind
       the matmul, in fp32, where Inductor fuses that with what comes next.

    Before, with ``w`` of 512 rows::

        w_16 = torch.ops.aten.to.dtype(w, torch.bfloat16)
        linear = torch.ops.aten.linear.default(x, w_16, b_16)                           # bf16[8, 1024, 512]

    After, by row, and likewise for ``x``::

        amax = torch.ops.aten.amax.default(torch.ops.aten.abs.default(w), [-1], True)   # f32[512, 1]
        scale = exp2(floor(log2(448 / clamp_min(amax, 2**-100))))
        w_8 = torch.ops.aten.to.dtype(clamp(w * scale), torch.float8_e4m3fn)
        mm = torch.ops.aten._scaled_mm.default(
            x_8, w_8.t(), 1 / x_scale, (1 / scale).t(), b_16, None, torch.bfloat16, True)
        linear = torch.ops.aten.view.default(mm, [8, 1024, 512])
    """

    name: ClassVar[str] = "quantise-linears"
    needs: ClassVar[frozenset[str]] = frozenset({"fp8-linears-placed"})

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        """See the class."""
        written = frozenset[int]().union(*map(written_storages, gm.graph.nodes))
        work = _Work(gm.graph, written)
        count = 0
        for node in list(gm.graph.nodes):
            if FP8_META not in node.meta:
                continue
            recipe = node.meta.pop(FP8_META)
            linear = linear_of(node)
            if linear is not None:
                work.multiply(linear, recipe)
                count += 1
        if count:
            erase_unread(gm.graph)
        return PassResult(gm, count, f"{count} scaled matmuls")


def erase_unread(graph: fx.Graph) -> None:
    """Erases steps, inserted casts and views that nothing reads."""
    for node in reversed(list(graph.nodes)):
        # an op that writes in place returns a view, too
        is_idle = STEP_META in node.meta or CAST_META in node.meta or is_view(node)
        if is_idle and not node.users and not written_storages(node):
            graph.erase_node(node)


@dataclass
class _Work:
    """Adds nodes to one graph.

    Attributes:
        graph: where to.
        written: storages that somebody writes to.
    """

    graph: fx.Graph
    written: frozenset[int]
    _copies: dict[object, tuple[fx.Node, fx.Node]] = field(default_factory=dict)

    def multiply(self, linear: Linear, recipe: Recipe) -> None:
        """Makes a low linear a scaled matmul."""
        node, result = linear.node, linear.node.meta["val"]
        call = functools.partial(self._call, node)
        with self.graph.inserting_before(node):
            value, factor = self._value(linear, recipe)
            matrix, factors = self._matrix(linear)
            rows = call(aten.reshape.default, value, [-1, value.meta["val"].shape[-1]])
            if not rows.meta["val"].is_contiguous():
                rows = call(aten.clone.default, rows, memory_format=torch.contiguous_format)
            # strides spelled out: Inductor lays a copy out as suits the kernel that writes it, unless a view fixes it
            contracted = linear.sizes[0]
            rows, matrix = (self._strided(each, [contracted, 1], node) for each in (rows, matrix))
            columns = call(aten.permute.default, matrix, [1, 0])
            if recipe.by_row:
                scales = self._column(factor, [-1, 1], node), self._column(factors, [1, -1], node)
                bias, out = linear.bias, result.dtype
            else:
                factor = call(aten.reshape.default, factor, [])
                scales = factor, call(aten.ones_like.default, factor)
                # without the factors of its columns the result may be beyond the range of fp16
                bias, out = None, torch.float32 if result.dtype is torch.float16 else result.dtype
            final = call(aten._scaled_mm.default, rows, columns, *scales, bias, None, out, True)
            if not recipe.by_row:
                final = call(aten.mul.Tensor, final, call(aten.reshape.default, factors, [1, -1]))
                if linear.bias is not None:
                    final = call(aten.add.Tensor, final, linear.bias)
                final = call(aten.to.dtype, final, result.dtype)
        self._replace(linear, final)

    def _replace(self, linear: Linear, final: fx.Node) -> None:
        """The call becomes the view that has its shape, so its name and its row in the plan stay."""
        node = linear.node
        shape = [self._size(linear.value, dim) for dim in range(node.meta["val"].ndim - 1)]
        with self.graph.inserting_before(node):
            sizes = [size if isinstance(size, int) else self._call(node, *size) for size in shape]
        # its value stays the one that views of it look into
        node.target, node.args = aten.reshape.default, (final, [*sizes, linear.sizes[1]])

    def _size(self, value: fx.Node, dim: int) -> Any:
        size = value.meta["val"].shape[dim]
        return size if isinstance(size, int) else (aten.sym_size.int, value, dim)

    def _value(self, linear: Linear, recipe: Recipe) -> tuple[fx.Node, fx.Node]:
        """The value in fp8, and its factors."""
        value = linear.value
        if value not in self._copies or storage_of(value) in self.written:
            # first along rows, which fuses with what computes these
            others = [] if recipe.by_row else list(range(value.meta["val"].ndim - 1))
            self._copies[value] = fp8_copy(
                value,
                torch.float8_e4m3fn,
                [*filter(None, ([-1], others))],
                functools.partial(self._call, linear.node),
                powers=recipe.powers,
                is_wide=False,
            )
        return self._copies[value]

    def _matrix(self, linear: Linear) -> tuple[fx.Node, fx.Node]:
        """The matrix in fp8, what is contracted in one piece; and its factors, one for each column of the result."""
        source, form = linear.source, Scaled(linear.in_rows)
        key = source, form
        if key not in self._copies or storage_of(source) in self.written:
            data, factors = form.steps(source, functools.partial(self._call, linear.node))
            for part, made in enumerate((data, factors)):
                made.meta[PART_META] = Part(source, form, part)
            self._copies[key] = data, factors
        return self._copies[key]

    def _column(self, factor: fx.Node, shape: list[int], like: fx.Node) -> fx.Node:
        """The factors of rows or columns.

        Strides of a dimension of size 1 are anything in Inductor, and the kernel for CPU wants 1.
        """
        return self._strided(self._call(like, aten.reshape.default, factor, shape), [1, 1], like)

    def _strided(self, node: fx.Node, strides: list[Any], like: fx.Node) -> fx.Node:
        """What has these strides already, in whichever way the graph is compiled."""
        sizes = [self._size(node, dim) for dim in range(len(strides))]
        sizes = [size if isinstance(size, int) else self._call(like, *size) for size in sizes]
        return self._call(like, aten.as_strided.default, node, sizes, strides)

    def _call(self, like: fx.Node, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        # captured graphs have the op of programs
        node = self.graph.call_function(aten.to.dtype if target is CAST else target, args, kwargs)
        node.meta = {key: like.meta[key] for key in _META if key in like.meta}
        node.meta[STEP_META] = True
        node.meta["val"] = run_fake(node)
        return node
