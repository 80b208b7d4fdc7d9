"""Forms of an ONNX graph for which engines have fast kernels, with the numbers that the graph had before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

#: what stands for zero in a value that is written as uint8
_ZERO_POINT = 128
#: they lay out what they read
_VIEWS = frozenset({"Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})
#: they have no other number than what they read, or its magnitude
_EXACT = frozenset({"Abs", "Expand", "Neg", "ReduceMax", "ReduceMin", "Relu", "Slice", *_VIEWS})


def as_strided(self: Any, size: Sequence[Any], stride: Sequence[Any], storage_offset: Any = None) -> Any:
    """A view that has the elements in their order is a reshape; torch.onnx reads all by a table of int64 indices."""
    from onnxscript import opset18
    from onnxscript.function_libs.torch_lib.ops.core import aten_as_strided

    ops: Any = opset18
    if storage_offset or not _is_in_order(size, stride) or _takes_a_part(self.shape, size):
        return aten_as_strided(self, size, stride, storage_offset)
    if self.shape is not None and list(self.shape) == list(size):
        return ops.Identity(self)
    if all(isinstance(each, int) for each in size):
        return ops.Reshape(self, ops.Constant(value_ints=[*size]))
    one = ops.Constant(value_ints=[-1])
    sizes = [
        ops.Constant(value_ints=[each]) if isinstance(each, int) else ops.Reshape(each, one) for each in size
    ]
    return ops.Reshape(self, ops.Concat(*sizes, axis=0))


def _is_in_order(size: Sequence[Any], stride: Sequence[Any]) -> bool:
    """Whether strides are those of a tensor in one piece; only the outermost size may be unknown."""
    expected: int | None = 1
    for each, step in zip(reversed(size), reversed(stride), strict=True):
        if isinstance(each, int) and each == 1:
            continue
        if expected is None or step != expected:
            return False
        expected = expected * each if isinstance(each, int) else None
    return True


def _takes_a_part(shape: Any, size: Sequence[Any]) -> bool:
    """Whether a view is known to have other elements than all; where sizes are not known, a reshape would raise."""
    if shape is None or not all(isinstance(each, int) for each in (*shape, *size)):
        return False
    return math.prod(shape) != math.prod(size)


def write_fast_forms(model: Any) -> None:
    """Rewrites a model of ``onnx_ir``, in place.

    1. torch.onnx computes the largest magnitude of a value in 16 bits in fp32, step by step, with casts between: those
       of numbers that 16 bits hold go.
    2. A product of two matrices in int8 reads its first as uint8, with a zero point, and what rounds that becomes
       ``QuantizeLinear``: onnxruntime has fast kernels for unsigned by signed alone.
    """
    import onnx_ir as ir
    from onnx_ir.passes.common import RemoveUnusedNodesPass

    _drop_exact_casts(ir, model.graph)
    _Unsigned(ir, model.graph).run()
    RemoveUnusedNodesPass()(model)


def _drop_exact_casts(ir: Any, graph: Any) -> None:
    for node in list(graph):
        if node.op_type != "Cast" or node.outputs[0].is_graph_output():
            continue
        low = node.inputs[0].dtype
        before = node.inputs[0].producer()
        if before is None or before.op_type != "Cast" or node.outputs[0].dtype != ir.DataType.FLOAT:
            continue
        wide = before.inputs[0]
        if wide.dtype == ir.DataType.FLOAT and _is_exact(wide, low):
            node.outputs[0].replace_all_uses_with(wide)


def _is_exact(value: Any, low: Any) -> bool:
    """Whether a value in fp32 has only numbers of the low dtype."""
    producer = value.producer()
    while producer is not None and producer.op_type in _EXACT:
        producer = producer.inputs[0].producer()
    return producer is not None and producer.op_type == "Cast" and producer.inputs[0].dtype == low


class _Unsigned:
    """Case 2 of :func:`write_fast_forms`. What a product needs beside is made in front of the first that reads it."""

    def __init__(self, ir: Any, graph: Any) -> None:
        self._ir, self._graph = ir, graph
        #: values in int8 -> the same in uint8
        self._made: dict[Any, Any] = {}

    def run(self) -> None:
        for node in list(self._graph):
            if node.op_type != "MatMulInteger" or node.inputs[0].dtype != self._ir.DataType.INT8:
                continue
            if len(node.inputs) == 2:
                inputs = [self._unsigned(node.inputs[0], node), node.inputs[1], self._zero_point]
                product = self._call(node, "MatMulInteger", inputs, node.outputs[0], "INT32")
                node.outputs[0].replace_all_uses_with(product, replace_graph_outputs=True)
                self._graph.remove(node, safe=True)

    def _unsigned(self, value: Any, before: Any) -> Any:
        if value not in self._made:
            producer = value.producer()
            if producer is not None and producer.op_type in _VIEWS:
                inputs = [self._unsigned(producer.inputs[0], before), *producer.inputs[1:]]
                attributes = producer.attributes.values()
                made = self._call(before, producer.op_type, inputs, value, "UINT8", attributes)
            else:
                wide = _rounded(value, self._ir)
                if wide is None:
                    to = [self._ir.AttrInt64("to", int(self._ir.DataType.FLOAT))]
                    wide = self._call(before, "Cast", [value], value, "FLOAT", to)
                inputs = [wide, self._stored("scale", 1.0, np.float32), self._zero_point]
                made = self._call(before, "QuantizeLinear", inputs, value, "UINT8")
            self._made[value] = made
        return self._made[value]

    def _call(
        self, before: Any, op: str, inputs: Sequence[Any], like: Any, dtype: str, attributes: Any = ()
    ) -> Any:
        """The result of a node, of the shape of a value."""
        node = self._ir.Node("", op, inputs, attributes, num_outputs=1, name=f"{like.name}_{op}")
        node.metadata_props.update(before.metadata_props)
        (result,) = node.outputs
        result.name, result.shape, result.dtype = node.name, like.shape, self._ir.DataType[dtype]
        before.prepend(node)
        return result

    @property
    def _zero_point(self) -> Any:
        return self._stored("zero_point", _ZERO_POINT, np.uint8)

    def _stored(self, name: str, number: float, kind: Any) -> Any:
        """A number that is stored with the model, once."""
        name = f"unsigned_{name}"
        if (found := self._graph.initializers.get(name)) is None:
            tensor = self._ir.tensor(np.array(number, kind), name=name)
            found = self._ir.Value(name=name, const_value=tensor)
            found.shape, found.dtype = tensor.shape, tensor.dtype
            self._graph.register_initializer(found)
        return found


def _rounded(value: Any, ir: Any) -> Any:
    """What was rounded to a value in int8 and clamped to at most its range, in fp32; None where it is not so."""
    node = value.producer()
    if node is None or node.op_type != "Cast":
        return None
    node = node.inputs[0].producer()
    if node is None or node.op_type != "Clip" or len(node.inputs) != 3:
        return None
    ends = [each.const_value.numpy() if each.const_value is not None else None for each in node.inputs[1:]]
    if any(end is None for end in ends) or not (-128 <= ends[0] <= -127 and ends[1] == 127):  # type: ignore[operator]
        return None
    node = node.inputs[0].producer()
    if node is None or node.op_type != "Round" or node.inputs[0].dtype != ir.DataType.FLOAT:
        return None
    return node.inputs[0]
