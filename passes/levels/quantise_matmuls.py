"""Convert what matmuls below 16 bits read, once for all of them, and multiply with scales."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.fx as fx

from amp_fx._torch import quantised_ops
from amp_fx.graphs.calls import CAST, PROGRAM_CAST, argument_value, is_cast, values_read
from amp_fx.graphs.fake_runs import run_fake
from amp_fx.graphs.keys import CAST_META, LEVEL, PART, STEP_META
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.values import is_view, storage_of, writers_in, written_storages
from amp_fx.passes.base import Pass, PassContext, PassResult, erase
from amp_fx.passes.levels.matmuls import Matmul, Operand, additions_of, read_matmuls
from amp_fx.passes.levels.quantiser import Quantiser, WithScale
from amp_fx.precision.plans.label import label_of
from amp_fx.precision.policy import OpClass
from amp_fx.precision.policy.forms import ScaledRows, powers_beside, with_norm
from amp_fx.precision.policy.levels import Kernel, Level
from amp_fx.precision.policy.scaled import Product, dequantised, quantised, whole
from amp_fx.runtime.widened import held_pair

aten = torch.ops.aten


class _CapturedRewriter(Rewriter):
    """Adds steps to a captured graph, which has the ops of programs."""

    _OPS: ClassVar = {CAST: PROGRAM_CAST, aten.view.default: aten.reshape.default}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return super().call(self._OPS.get(target, target), *args, **kwargs)

    __call__ = call


@dataclass(frozen=True)
class QuantiseMatmuls(Pass):
    """Runs after :class:`PlaceLevels` has chosen, on the same graph; a captured one stays one that every runtime runs.

    A value is converted where the first matmul reads it, and all that read it in the same dtype, layout and scaling
    share the copy, forward and backward, unless somebody writes to it. Library kernels take the rows of the first
    operand and the columns of the second in one piece each: a copy that lies otherwise is written that way. Cases:

    1. by row: largest magnitude, scale and copy are those of the matrix as the matmul reads it. Or of each block of a
       row: then scales are bytes, see :func:`amp_fx.precision.policy.scaled.block_scales`.
    2. whole: there is one scale and one copy of the value, and one more copy for who reads it transposed; of a weight,
       the backward makes that again.
    3. without gradients, what a value is multiplied by has a scale for each column of the result whatever the level: it
       may be made once and kept.
    4. a weight that is fp32 in memory is read as it is, not as it is cast for a low matmul.
    5. where a plan has the scale of a value, that is rounded to uint8 by it, and what stands between quantised operands
       is a product in the low dtype, or in fp32 where the program is stored: oneDNN and runtimes make one call of that.
       What convolutions read, and otherwise only additions, is read in uint8 by these, and pooled so if it was pooled.
       Where a plan also has the scale of a convolution's result, an addition reads that in uint8.
    6. where a plan equalises a product, a value is divided by a power of two for each channel before it is scaled, and
       the weight is multiplied by it: few large channels then leave the others their digits.
    7. a value with an infinity or NaN has a scale of zero or NaN: everything that depends on the scale becomes NaN,
       which a loss scaler sees as it does the infinity. By the scale of a plan these become finite.

    Before, and after::

        x: bf16[64, 64]
        x_t = torch.ops.aten.permute.default(x, [1, 0])
        mm = torch.ops.aten.mm.default(x, x_t)                                          # bf16[64, 64]; level tensorwise
        # after: one scale and one copy of x; of a value of zeros, the scale is finite
        magnitude = torch.ops.aten.abs.default(x)
        amax = torch.ops.aten.amax.default(magnitude, [-1], True)                       # bf16[64, 1]
        amax = torch.ops.aten.amax.default(amax, [0], True)                             # bf16[1, 1]
        amax = torch.ops.prims.convert_element_type.default(amax, torch.float32)
        amax = torch.ops.aten.clamp_min.default(amax, 7.888609052210118e-31)
        inverse = torch.ops.aten.reciprocal.default(amax)
        scale = torch.ops.aten.mul.Tensor(inverse, 448.0)                               # f32[1, 1]
        scale = torch.ops.aten.as_strided.default(scale, [1, 1], [1, 1])
        factor = torch.ops.aten.reciprocal.default(scale)
        wide = torch.ops.aten.mul.Tensor(x, scale)                                      # f32[64, 64]
        wide = torch.ops.aten.clamp_min.default(wide, -448.0)
        wide = torch.ops.aten.clamp_max.default(wide, 448.0)
        x_8 = torch.ops.prims.convert_element_type.default(wide, torch.float8_e4m3fn)   # f8_e4m3fn[64, 64]
        rows = torch.ops.aten.as_strided.default(x_8, [64, 64], [64, 1])
        columns = torch.ops.aten.permute.default(rows, [1, 0])
        one = torch.ops.aten.view.default(factor, [])
        other = torch.ops.aten.view.default(factor, [])
        mm = torch.ops.aten._scaled_mm.default(rows, columns, one, other, None, None, torch.bfloat16, True)

    Attributes:
        joint: False on a captured graph.
        stored: the program is stored: by measured scales it multiplies in fp32 between quantised values, which runtimes
            know as products of integers.
        results: of convolutions that are added, by a plan: (name in the plan, (scale, zero point)).
    """

    joint: bool = True
    stored: bool = False
    results: tuple[tuple[str, tuple[float, int]], ...] = ()

    def call(self, gm: fx.GraphModule, context: PassContext) -> PassResult:
        work: Quantiser = (
            Quantiser(Rewriter(gm.graph, captured=False))
            if self.joint
            else _CapturedQuantiser(gm.graph, self.stored, context.weight_bits, dict(self.results))
        )
        matmuls = read_matmuls(gm, context, joint=self.joint)
        chosen = [(matmul, found) for matmul in matmuls if (found := matmul.node.meta.get(LEVEL)) is not None]
        for matmul, (level, kernel, scale, exponents) in chosen:
            matmul = work.divided(matmul.equalised(exponents), level)
            if isinstance(work, _CapturedQuantiser) and scale is not None:
                work.multiply_measured(matmul, level, kernel, scale)
            else:
                work.multiply(matmul, level, kernel)
        if chosen:
            work.tidy(context.path)
        return PassResult(f"{len(chosen)} scaled matmuls read {len(work.copies)} copies", len(chosen))


def erase_unread(graph: fx.Graph, path: str = "") -> None:
    """Erases steps, inserted casts and views that nothing reads; ``path`` is the prefix of names in a body."""
    for node in reversed(list(graph.nodes)):
        # an op that writes in place returns a view, too
        is_idle = STEP_META in node.meta or CAST_META in node.meta or is_view(node)
        if is_idle and not node.users and not written_storages(node):
            erase(node, path)


@dataclass(frozen=True)
class Part:
    """The part of a matrix that a node holds: one of the tensors of its form."""

    source: fx.Node
    form: ScaledRows
    index: int


def _passed_on(node: fx.Node) -> fx.Node | None:
    """The value that an activation, cast, view or addition of bytes reads, if one op reads its result; else None."""
    widened = quantised_ops().dequantize_per_tensor.default
    given = [each for each in values_read(node) if each.target is not widened]
    if len(node.users) != 1 or len(given) != 1 or node.meta.get(LEVEL) is not None:
        return None
    label = label_of(node)
    widens = label is not None and label.op_class in (OpClass.FOLLOW, OpClass.PROMOTE)
    return given[0] if widens or is_view(node) or is_cast(node) else None


def _adds_bytes(node: fx.Node) -> bool:
    """True for an addition of values that were rounded to uint8, which is in fp32."""
    given = values_read(node)
    widened = quantised_ops().dequantize_per_tensor.default
    return any(node in additions_of(each) for each in given) and all(each.target is widened for each in given)


class _CapturedQuantiser(Quantiser):
    """Adds nodes to one captured graph, in which somebody may write to values, and weights may be stored as copies."""

    def __init__(
        self, graph: fx.Graph, stored: bool, bits: int, results: Mapping[str, tuple[float, int]]
    ) -> None:
        super().__init__(_CapturedRewriter(graph, meta={STEP_META: True}))
        self._stored, self._bits, self._results = stored, bits, results
        #: results of convolutions -> the scale by which they are added
        self._added: dict[fx.Node, tuple[float, int]] = {}
        self._writers = writers_in(graph)
        self._divided: dict[object, fx.Node] = {}
        #: what convolutions read, and otherwise only additions -> the scale and the bytes, once a convolution has them
        self._convolved: dict[fx.Node, Any] = dict.fromkeys(filter(is_convolved, graph.nodes))

    def divided(self, matmul: Matmul, level: Level) -> Matmul:
        """See :meth:`Quantiser.divided`. What the value is divided by is kept beside the copy of the weight."""
        value, weight = matmul.operands
        key = value.source, weight.equalisation
        if not weight.equalisation:
            return matmul
        if key not in self._divided or self._is_written(value.source):
            form = ScaledRows(level.name, not weight.transposed, self._bits, weight.equalisation)
            with self._call.before(matmul.node):
                powers = powers_beside([-each for each in weight.equalisation], weight.source, self._call)
                powers.meta[PART] = Part(weight.source, form, 2)
                self._divided[key] = self._call(aten.mul.Tensor, value.source, powers)
        source = self._divided[key]
        return replace(matmul, operands=(replace(value, base=source, source=source), weight))

    def tidy(self, path: str) -> None:
        """See :meth:`Quantiser.tidy`."""
        for source, by in self._added.items():
            self._add_rounded(source, by)
        for source, (scale, data) in filter(operator.itemgetter(1), self._convolved.items()):
            if set(source.users) - {data, *data.all_input_nodes} == set(additions_of(source)):
                self._read_bytes(source, scale, data)
        if self._stored:
            self._stay_wide()
        erase_unread(self._graph, path)

    def _read_bytes(self, source: fx.Node, scale: tuple[float, int], data: fx.Node) -> None:
        """Additions read the bytes of a value, and if it was pooled, bytes are pooled."""
        additions = additions_of(source)
        if (first := min(additions, default=data)) < data:
            # it is added before it is convolved
            for step in (*data.all_input_nodes, data):
                if step is not source:
                    first.prepend(step)
        for addition in additions:
            self._add_bytes(addition, source, scale, data)
        # Inductor's call of a pool in uint8 forgets that sizes are rounded up
        pools = source.target is aten.max_pool2d.default and not argument_value(source, "ceil_mode")
        if pools and len((before := source.all_input_nodes[0]).users) == 1:
            with self._call.before(source):
                made = self._rounded(before, scale)
                source.replace_input_with(before, whole(made, scale, self._call))
            source.meta["val"] = run_fake(source)
            self.copies[before, scale] = WithScale(made, made)

    def _add_bytes(self, addition: fx.Node, source: fx.Node, scale: tuple[float, int], data: fx.Node) -> None:
        """An addition reads the bytes of a value; what is added to it may be wider, or be written to."""
        dtype = addition.meta["val"].dtype
        with self._call.before(addition):
            addition.replace_input_with(source, whole(data, scale, self._call))
        addition.meta["val"] = run_fake(addition)
        if addition.meta["val"].dtype is not dtype:
            with self._call.after(addition):
                rounded = self._call(CAST, addition, dtype)
            addition.replace_all_uses_with(rounded, lambda reader: reader is not rounded)

    def _add_rounded(self, source: fx.Node, scale: tuple[float, int]) -> None:
        """The result of a convolution, which nothing else reads, is rounded on its way to an addition."""
        while len(source.users) == 1 and is_cast(reader := next(iter(source.users))):
            source = reader
        additions = additions_of(source)
        if len(source.users) != 1 or not additions:
            return
        with self._call.before(additions[0]):
            data = self._rounded(source, scale)
        self.copies[source, scale] = WithScale(data, data)
        self._add_bytes(additions[0], source, scale, data)

    def _stay_wide(self) -> None:
        """Between a product by measured scales and the next rounding to uint8, activations and views are in fp32.

        Runtimes make one call of that, and of none with casts in between.
        """
        for data in {copy.data for copy in self.copies.values()}:
            if data.target is not quantised_ops().quantize_per_tensor.default:
                continue
            steps, node = list[tuple[fx.Node, fx.Node]](), data.all_input_nodes[0].all_input_nodes[0]
            while (given := _passed_on(node)) is not None:
                steps += [] if is_cast(node) else [(node, given)]
                node = given
            if not _adds_bytes(node):
                if node.meta.get(LEVEL) is None or not is_cast(node) or len(node.users) > 1:
                    continue
                node.args = (node.args[0], torch.float32)
                node.meta["val"] = run_fake(node)
            for step, given in reversed(steps):
                step.replace_input_with(given, node)
                step.meta["val"] = run_fake(step)
                if (label := label_of(step)) is not None:
                    label.dtype = torch.float32
                node = step
            data.replace_input_with(data.all_input_nodes[0], node)

    def multiply_measured(
        self, matmul: Matmul, level: Level, kernel: Kernel, scale: tuple[float, int]
    ) -> None:
        """Multiplies a value, rounded by its plan's scale and zero point, by a weight."""
        node, (operand, matrix) = matmul.node, matmul.operands
        with self._call.before(node):
            key = operand.source, scale
            if key not in self.copies or self._is_written(operand.source):
                data = self._rounded(operand.source, scale)
                self.copies[key] = WithScale(data, data)
            value = self.copies[key].data
            # oneDNN's products in int8 return no fp16
            is_wide = self._stored or node.meta["val"].dtype is torch.float16
            dtype = torch.float32 if is_wide else node.meta["val"].dtype
            if matmul.is_convolution:
                if operand.source in self._convolved and not self._is_written(operand.source):
                    self._convolved[operand.source] = scale, value
                weight, factors, bias = self._weight_of(matmul, level)
                pair = dequantised(value, scale, weight, factors, dtype, self._call)
                bias = bias if bias is None else self._call(CAST, bias, dtype)
                final = self._call(node.target, *pair, bias, *node.args[3:])
                if matmul.name in self._results:
                    self._added[matmul.norm or node] = self._results[matmul.name]
            else:
                copy = self._copy(matrix, level, kernel)
                columns = self._call(aten.permute.default, self._matrix(copy, matrix, level), [1, 0])
                factors = scale, self._factor(copy, level, [1, -1])
                bias = matmul.bias if matmul.bias is None else self._call(CAST, matmul.bias, dtype)
                final = kernel.multiply(Product(value, columns, factors, bias, dtype, True), self._call)
            if is_wide:
                final = self._call(CAST, final, node.meta["val"].dtype)
            super()._become(matmul, final)

    def _rounded(self, value: fx.Node, scale: tuple[float, int]) -> fx.Node:
        # ONNX has a scale in the dtype of the value, and it is fp32; Inductor rounds no fp16
        is_wide = self._stored or value.meta["val"].dtype is torch.float16
        read = self._call(CAST, value, torch.float32) if is_wide else value
        made: fx.Node = quantised(read, *scale, self._call)
        return made

    def _weight_of(self, matmul: Matmul, level: Level) -> tuple[fx.Node, fx.Node, Any]:
        """The weight of a convolution in the level with a factor for each channel, and the bias, BatchNorm folded in.

        The BatchNorm becomes an alias of the result, so its name and its row in the plan stay.
        """
        weight, bias, norm = matmul.operands[1].source, matmul.bias, matmul.norm
        if norm is not None and not any(map(self._is_written, norm.all_input_nodes[1:])):
            given = (*norm.args[1:5], norm.args[7])
            weight, bias = with_norm(weight, bias, given, [-1, 1, 1, 1], self._call)
            norm.target, norm.args = aten.alias.default, (norm.args[0],)
        rows = self._call(aten.view.default, weight, [weight.meta["val"].shape[0], -1])
        data, factors = ScaledRows(level.name, True, self._bits).steps(rows, self._call)
        return self._call(aten.view.default, data, list(weight.meta["val"].shape)), factors, bias

    def _become(self, matmul: Matmul, final: fx.Node) -> None:
        """The call becomes the view that has its shape, so its name and its row in the plan stay."""
        sizes = [*self._sizes(matmul.operands[0].source)[:-1], matmul.sizes[2]]
        # its value stays the one that views of it look into
        matmul.node.target, matmul.node.args = aten.reshape.default, (final, sizes)

    def _made(self, operand: Operand, dtype: torch.dtype, level: Level) -> WithScale:
        if not operand.is_weight:
            return super()._made(operand, dtype, level)
        held = held_pair(operand.source, operand.equalisation)
        if held is not None and held[0].meta["val"].dtype is dtype:
            return WithScale(*held)
        form = ScaledRows(level.name, not operand.transposed, self._bits, operand.equalisation)
        parts = form.steps(operand.source, self._call)
        for index, made in enumerate(parts):
            made.meta[PART] = Part(operand.source, form, index)
        return WithScale(*parts)

    def _settled(self, scale: fx.Node) -> fx.Node:
        return scale

    def _is_written(self, source: fx.Node) -> bool:
        storage = storage_of(source)
        return storage in self._writers and source < self._writers[storage][-1]


def is_convolved(value: fx.Node) -> bool:
    """True where convolutions read a value, and otherwise only additions: all of them may read it in uint8."""
    conv = torch.ops.aten.conv2d.default
    reads = [user for user in value.users if user.target is conv and user.args[0] is value]
    return bool(reads) and len(reads) + len(additions_of(value)) == len(value.users)
