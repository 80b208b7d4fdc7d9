"""Convert what matmuls below 16 bits read, once for all of them, and multiply with scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx as fx

from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.keys import CAST_META, LEVEL, PART, REGION_META, STEP_META
from amp_fx.graphs.values import is_view, storage_of, storages_written_in, written_storages
from amp_fx.passes.base import Pass, PassContext
from amp_fx.passes.levels.matmuls import Matmul, Operand, read_matmuls
from amp_fx.passes.levels.place_levels import level_of
from amp_fx.placement.layout import CAST
from amp_fx.policy.levels import FORWARD, Implementation, Level, Scale
from amp_fx.policy.scaled import Product, block_scales, dequantised, quantised, scale_of, scaled
from amp_fx.weights.recipes import Scaled, with_norm
from amp_fx.widened import held_pair

__all__ = ["Part", "QuantiseMatmuls", "erase_unread"]

aten = torch.ops.aten

#: what new nodes take over from the matmul that needs them first
_META = (
    "ac_graph_id",
    "fwd_nn_module_stack",
    "nn_module_stack",
    "partitioner_tag",
    "recompute",
    "stack_trace",
    REGION_META,
)

#: captured graphs have the ops of programs
_OF_PROGRAMS = {CAST: aten.to.dtype, aten.view.default: aten.reshape.default}


@dataclass(frozen=True)
class QuantiseMatmuls(Pass):
    """Runs after :class:`PlaceLevels` has chosen, on the same graph; a captured one stays one that every runtime runs.

    A value is converted where the first matmul reads it, and all that read it in the same dtype, layout and scaling
    share the copy, forward and backward, unless somebody writes to it. Library kernels take the rows of the first
    operand and the columns of the second in one piece each: a copy that lies otherwise is written that way. Cases:

    1. by row: largest magnitude, scale and copy are those of the matrix as the matmul reads it. Or of each block of a
       row: then scales are bytes, see :func:`amp_fx.policy.scaled.block_scales`.
    2. whole: there is one scale and one copy of the value, and one more copy for who reads it transposed; of a weight,
       the backward makes that again.
    3. without gradients, what a value is multiplied by has a scale for each column of the result whatever the level: it
       may be made once and kept.
    4. a weight that is fp32 in memory is read as it is, not as it is cast for a low matmul.
    5. where a plan has the scale of a value, that is rounded to uint8 by it, and what stands between quantised operands
       is a product in the low dtype, or in fp32 where the program is stored: oneDNN and runtimes make one call of that.
    6. a value with an infinity or NaN has a scale of zero or NaN: everything that depends on the scale becomes NaN,
       which a loss scaler sees as it does the infinity.

    Before, with ``w`` of 512 rows::

        w_16 = torch.ops.prims.convert_element_type.default(w, torch.bfloat16)
        w_t = torch.ops.aten.permute.default(w_16, [1, 0])
        mm = torch.ops.aten.mm.default(x, w_t)                                          # bf16[8192, 512]

    After, by row, and likewise for ``x``::

        amax = torch.ops.aten.amax.default(torch.ops.aten.abs.default(w), [1], True)    # f32[512, 1]
        scale = exp2(floor(log2(448 / clamp_min(amax, 2**-100))))
        w_8 = torch.ops.prims.convert_element_type.default(clamp(w * scale), torch.float8_e4m3fn)
        mm = torch.ops.aten._scaled_mm.default(x_8, w_8.t(), 1 / x_scale, 1 / scale, None, None, torch.bfloat16, True)

    Attributes:
        joint: False on a captured graph.
        stored: the program is stored: by measured scales it multiplies in fp32 between quantised values, which runtimes
            know as products of integers.
    """

    joint: bool = True
    stored: bool = False

    def call(self, gm: fx.GraphModule, context: PassContext) -> str:
        work: _Quantiser = _Quantiser(gm.graph) if self.joint else _CapturedQuantiser(gm.graph, self.stored)
        matmuls = read_matmuls(gm, context, joint=self.joint)
        chosen = [(matmul, found) for matmul in matmuls if (found := LEVEL.of(matmul.node)) is not None]
        for matmul, (level, way, scale) in chosen:
            if isinstance(work, _CapturedQuantiser) and scale is not None:
                work.multiply_measured(matmul, level, way, scale)
            else:
                work.multiply(matmul, level, way)
        if chosen:
            work.tidy()
        return f"{len(chosen)} scaled matmuls read {len(work.copies)} copies"


def erase_unread(graph: fx.Graph) -> None:
    """Erases steps, inserted casts and views that nothing reads."""
    for node in reversed(list(graph.nodes)):
        # an op that writes in place returns a view, too
        is_idle = STEP_META in node.meta or CAST_META in node.meta or is_view(node)
        if is_idle and not node.users and not written_storages(node):
            graph.erase_node(node)


@dataclass(frozen=True)
class Part:
    """What a node holds of a matrix: one of the tensors that a recipe makes of it."""

    source: fx.Node
    recipe: Scaled
    index: int


class _WithScale(NamedTuple):
    """An operand with scales."""

    #: in the level's dtype
    data: fx.Node
    #: what gives the values back: one for each row, or one, in fp32; or scales of blocks
    factor: fx.Node
    #: what the value was multiplied by, in fp32; None of a weight that may be stored
    scale: fx.Node | None = None


class _Quantiser:
    """Adds nodes to one joint graph, whose matmuls are multiplied in order, forward before backward.

    Attributes:
        copies: source, dtype and what its scales stand for -> the copy.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.copies: dict[object, _WithScale] = {}
        self._graph = graph
        self._matrices: dict[object, fx.Node] = {}
        #: of the matmul that nodes are added for: itself, whether it is one of the forward, and what was added
        self._like, self._in_forward, self._added = graph.output_node(), True, list[fx.Node]()

    def multiply(self, matmul: Matmul, level: Level, way: Implementation) -> None:
        """Makes a low matmul one of operands with scales."""
        node = self._like = matmul.node
        self._in_forward, self._added = matmul.role == FORWARD, []
        pairs = [(operand, level_of(operand, level)) for operand in matmul.operands]
        with self._graph.inserting_before(node):
            copies = [self._copy(operand, each, way) for operand, each in pairs]
            first, second = (self._matrix(copy, *pair) for copy, pair in zip(copies, pairs, strict=True))
            columns = self._call(aten.permute.default, second, [1, 0])
            # scales of another kind than the level's are multiplied behind the product
            one, other = (
                self._factor(copy, each, shape) if each.scale is level.scale else copy.factor
                for copy, (_, each), shape in zip(copies, pairs, ([-1, 1], [1, -1]), strict=True)
            )
            out = node.meta["val"].dtype
            given = Product(first, columns, (one, other), matmul.bias, out, self._in_forward)
            final = way.multiply(given, self._call)
            self._become(matmul, final)

    def tidy(self) -> None:
        """Erases what nothing reads."""
        self._graph.eliminate_dead_code()

    def _become(self, matmul: Matmul, final: fx.Node) -> None:
        """In place: other operands may be seen through this very node."""
        matmul.node.target, matmul.node.args = final.target, final.args
        self._graph.erase_node(final)

    def _copy(self, operand: Operand, level: Level, way: Implementation) -> _WithScale:
        """What the operand is converted to, by row as the matmul reads it, else as the value lies in memory."""
        dtype = level.dtype_of(is_gradient=operand.is_gradient)
        if way.value is not None and not operand.is_weight:
            dtype = way.value
        key = operand.source, dtype, level.scale, operand.layout if level.by_row else ""
        if key not in self.copies or self._is_written(operand.source):
            first = len(self._added)
            self.copies[key] = self._made(operand, dtype, level)
            if operand.source.op == "placeholder" and not self._in_forward:
                self._make_in_backward(first)
        return self.copies[key]

    def _made(self, operand: Operand, dtype: torch.dtype, level: Level) -> _WithScale:
        value = self._viewed(operand.source, operand) if level.by_row else operand.source
        shape = list(value.meta["val"].shape)
        if level.block is not None:
            value = self._call(aten.view.default, value, [shape[0], -1, level.block])
        # first along rows, which fuses with what computes these
        others = [] if level.by_row else list(range(value.meta["val"].ndim - 1))
        groups = [*filter(None, ([-1], others))]
        is_wide = value.meta["val"].dtype is torch.float32
        scale = scale_of(value, dtype, groups, self._call, powers=level.powers, is_wide=is_wide)
        scale = self._settled(scale)
        data, factor = scaled(value, scale, dtype, self._call)
        if level.block is not None:
            data = self._call(aten.view.default, data, shape)
            factor = block_scales(factor, self._call)
        if level.by_row and data.meta["val"].ndim == 2:
            data = self._in_rows(data)
        return _WithScale(data, factor, scale)

    def _matrix(self, copy: _WithScale, operand: Operand, level: Level) -> fx.Node:
        """The copy as the matrix that is multiplied, its rows in one piece."""
        key = copy.data, operand.layout
        if key not in self._matrices:
            rows = self._in_rows(copy.data) if level.by_row else self._turned_whole(copy, operand)
            # strides spelled out: Inductor lays a copy out as suits the kernel that writes it, unless a view fixes it
            self._matrices[key] = self._strided(rows, [rows.meta["val"].shape[1], 1])
        return self._matrices[key]

    def _turned_whole(self, copy: _WithScale, operand: Operand) -> fx.Node:
        """A copy with one scale, as the operand's matrix.

        What the backward reads the other way round of an input, it makes again of that: so no byte is kept for each
        parameter. Scaled after it was turned, it is not the same expression as the copy, and stays apart from it.
        """
        stays = operand.lies_in_rows or self._in_forward or operand.source.op != "placeholder"
        if stays or copy.scale is None:
            return self._in_rows(self._viewed(copy.data, operand))
        first = len(self._added)
        value = self._viewed(operand.source, operand)
        scale = self._call(aten.view.default, copy.scale, [])
        rows = self._in_rows(scaled(value, scale, copy.data.meta["val"].dtype, self._call)[0])
        self._make_in_backward(first)
        return rows

    def _make_in_backward(self, first: int) -> None:
        """Keeps what is made of an input, and what only the backward reads, out of the forward.

        That takes no memory in between: the input is there. Of other values the partitioner knows what is kept, and
        makes copies again from that: the backward reads their sources for other reasons.
        """
        for step in self._added[first:]:
            if "recompute" not in step.meta:
                step.meta["partitioner_tag"] = "must_be_in_backward"

    def _viewed(self, node: fx.Node, operand: Operand) -> fx.Node:
        """The operand's matrix, of its source or of what has the elements of the source."""
        for view in operand.views:
            node = self._call(view.target, node, *view.args[1:], **view.kwargs)
        return self._call(aten.permute.default, node, [1, 0]) if operand.transposed else node

    def _in_rows(self, node: fx.Node) -> fx.Node:
        """A matrix whose rows are those of the value, in one piece each."""
        if node.meta["val"].ndim != 2:
            node = self._call(aten.view.default, node, [-1, node.meta["val"].shape[-1]])
        value = node.meta["val"]
        if value.stride(1) == 1 and value.stride(0) == value.shape[1]:
            return node
        return self._call(aten.clone.default, node, memory_format=torch.contiguous_format)

    def _factor(self, copy: _WithScale, level: Level, shape: list[int]) -> fx.Node:
        """The factors as a scaled matmul takes them."""
        if level.scale is Scale.BLOCK:
            return copy.factor
        if level.scale is Scale.WHOLE:
            return self._call(aten.view.default, copy.factor, [])
        # strides spelled out: those of a dimension of size 1 are anything in Inductor, and the kernel for CPU wants 1
        return self._strided(self._call(aten.view.default, copy.factor, shape), [1, 1])

    def _settled(self, scale: fx.Node) -> fx.Node:
        """A buffer of its own: of a value that takes many steps to compute, Inductor stores one of them in fp32."""
        # where a size is not known, that dimension is the only one that has more than one element
        return self._strided(scale, [s if isinstance(s, int) else 1 for s in scale.meta["val"].stride()])

    def _strided(self, node: fx.Node, strides: list[Any]) -> fx.Node:
        """What has these strides already, in whichever way the graph is compiled."""
        return self._call(aten.as_strided.default, node, self._sizes(node), strides)

    def _sizes(self, node: fx.Node) -> list[Any]:
        return [
            size if isinstance(size, int) else self._call(aten.sym_size.int, node, dim)
            for dim, size in enumerate(node.meta["val"].shape)
        ]

    def _is_written(self, source: fx.Node) -> bool:
        """True where somebody writes to the value: then nobody shares its copy."""
        return False

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self._graph.call_function(target, args, kwargs)
        node.meta = {key: self._like.meta[key] for key in _META if key in self._like.meta}
        node.meta["val"] = run_fake(node)
        self._added.append(node)
        return node


class _CapturedQuantiser(_Quantiser):
    """Adds nodes to one captured graph, in which somebody may write to values, and weights may be stored as copies."""

    def __init__(self, graph: fx.Graph, stored: bool) -> None:
        super().__init__(graph)
        self._stored = stored
        self._written = storages_written_in(graph)

    def tidy(self) -> None:
        """Erases what nothing reads."""
        erase_unread(self._graph)

    def multiply_measured(
        self, matmul: Matmul, level: Level, way: Implementation, scale: tuple[float, int]
    ) -> None:
        """The same with the scale and zero point that a plan has for the value, which keeps its dimensions."""
        node, (operand, matrix) = matmul.node, matmul.operands
        self._like = node
        with self._graph.inserting_before(node):
            key = operand.source, scale
            if key not in self.copies or self._is_written(operand.source):
                # ONNX has a scale in the dtype of the value, and it is fp32
                read = self._call(CAST, operand.source, torch.float32) if self._stored else operand.source
                data = quantised(read, *scale, self._call)
                self.copies[key] = _WithScale(data, data)
            value = self.copies[key].data
            dtype = torch.float32 if self._stored else node.meta["val"].dtype
            if matmul.is_convolution:
                weight, factors, bias = self._convolved(matmul, level)
                pair = dequantised(value, scale, weight, factors, dtype, self._call)
                bias = bias if bias is None else self._call(CAST, bias, dtype)
                final = self._call(node.target, *pair, bias, *node.args[3:])
            else:
                copy = self._copy(matrix, level, way)
                columns = self._call(aten.permute.default, self._matrix(copy, matrix, level), [1, 0])
                factors = scale, self._factor(copy, level, [1, -1])
                bias = matmul.bias if matmul.bias is None else self._call(CAST, matmul.bias, dtype)
                final = way.multiply(Product(value, columns, factors, bias, dtype, True), self._call)
            if self._stored:
                final = self._call(CAST, final, node.meta["val"].dtype)
            super()._become(matmul, final)

    def _convolved(self, matmul: Matmul, level: Level) -> tuple[fx.Node, fx.Node, Any]:
        """The weight of a convolution in the level with a factor for each channel, and the bias, BatchNorm folded in.

        The BatchNorm becomes an alias of the result, so its name and its row in the plan stay.
        """
        weight, bias, norm = matmul.operands[1].source, matmul.bias, matmul.norm
        if norm is not None and not any(map(self._is_written, norm.all_input_nodes[1:])):
            given = (*norm.args[1:5], norm.args[7])
            weight, bias = with_norm(weight, bias, given, [-1, 1, 1, 1], self._call)
            norm.target, norm.args = aten.alias.default, (matmul.node,)
        rows = self._call(aten.view.default, weight, [weight.meta["val"].shape[0], -1])
        data, factors = Scaled(level.name, in_rows=True).steps(rows, self._call)
        return self._call(aten.view.default, data, list(weight.meta["val"].shape)), factors, bias

    def _become(self, matmul: Matmul, final: fx.Node) -> None:
        """The call becomes the view that has its shape, so its name and its row in the plan stay."""
        sizes = [*self._sizes(matmul.operands[0].source)[:-1], matmul.sizes[2]]
        # its value stays the one that views of it look into
        matmul.node.target, matmul.node.args = aten.reshape.default, (final, sizes)

    def _made(self, operand: Operand, dtype: torch.dtype, level: Level) -> _WithScale:
        if not operand.is_weight:
            return super()._made(operand, dtype, level)
        held = held_pair(operand.source)
        if held is not None and held[0].meta["val"].dtype is dtype:
            return _WithScale(*held)
        recipe = Scaled(level.name, in_rows=not operand.transposed)
        parts = recipe.steps(operand.source, self._call)
        for index, made in enumerate(parts):
            PART.set(made, Part(operand.source, recipe, index))
        return _WithScale(*parts)

    def _settled(self, scale: fx.Node) -> fx.Node:
        return scale

    def _is_written(self, source: fx.Node) -> bool:
        return storage_of(source) in self._written

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = super()._call(_OF_PROGRAMS.get(target, target), *args, **kwargs)
        node.meta[STEP_META] = True
        return node
