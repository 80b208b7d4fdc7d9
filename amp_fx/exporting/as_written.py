"""A copy of an ONNX file of which an engine computes every result in the precision that the file says.

An engine may compute otherwise than a file says: onnxruntime's provider for CPUs runs a file in fp16 in fp32 and rounds
at its end, has no kernels for bf16, and clamps sums of products in int8 where a CPU has no VNNI. It keeps casts that
are in a file. So the copy has each operator in fp32 between casts: a result is rounded where the file rounds it, and
sums are formed in fp32, as matrix units form them.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from amp_fx.graphs.calls import innermost_line

#: dtypes that are widened, by ONNX's names
_LOW = frozenset({"FLOAT16", "BFLOAT16"})
#: what a cast rounds from
_WIDE = frozenset({"FLOAT", "DOUBLE"})
#: operators that name the dtype of their result
_CASTS = frozenset({"Cast", "CastLike"})


@dataclass(frozen=True)
class Watched:
    """A result that the file has in a low dtype, and the outputs of the copy that say what it was in fp32."""

    #: as ``Gemm 'node_linear'``
    node: str
    #: path of the module that calls it; empty for the model itself
    module: str
    #: ``file:line: code`` of the call, or an empty string
    line: str
    #: FLOAT16 or BFLOAT16
    dtype: str
    #: output: the largest finite magnitude
    largest: str
    #: output: 1 where there is a NaN, else 0
    has_nan: str


@dataclass(frozen=True)
class Copy:
    """The copy, serialised: inputs and outputs that are low in the file are fp32."""

    model: bytes
    watched: tuple[Watched, ...]


def as_written(path: str | os.PathLike[str], *, watches: bool = False) -> Copy:
    """Reads a file, and returns its copy, whose weights are where the file's are.

    With ``watches`` the copy has outputs beside those of the file, for each low result outside of branches and loops.
    """
    import onnx_ir as ir

    model = ir.load(os.fspath(path))
    work = _Widening(ir, model.graph, watches)
    work.widen(model.graph)
    for value in model.graph.inputs:
        if work.is_low(value):
            next(iter(model.graph)).prepend(work.narrow(value))
    for index, value in enumerate(model.graph.outputs):
        if work.is_low(value):
            wide: Any = work.call("Cast", [value], "FLOAT", to=ir.DataType.FLOAT)
            model.graph.append(wide.producer())
            model.graph.outputs[index] = wide
    model.graph.outputs.extend(work.added)
    return Copy(ir.to_proto(model).SerializeToString(), tuple(work.watched))


class _Widening:
    """Rewrites the nodes of a graph and of the graphs inside it."""

    def __init__(self, ir: Any, graph: Any, watches: bool) -> None:
        self._ir, self._outer, self._watches = ir, graph, watches
        self._count = 0
        self.watched: list[Watched] = []
        self.added: list[Any] = []

    def is_low(self, value: Any) -> bool:
        return value is not None and value.dtype is not None and value.dtype.name in _LOW

    def call(self, op: str, inputs: Sequence[Any], dtype: str, **attributes: Any) -> Any:
        """The result of a node that stands nowhere yet."""
        self._count += 1
        node = self._ir.node(op, inputs, attributes, name=f"as_written_{self._count}")
        node.outputs[0].name, node.outputs[0].dtype = node.name, self._ir.DataType[dtype]
        return node.outputs[0]

    def narrow(self, value: Any) -> Any:
        """Makes a low value fp32; returns the node that rounds it for its readers, which stands nowhere yet."""
        low = value.dtype
        rounded = self.call("Cast", [], low.name, to=low)
        rounded.shape, cast = value.shape, rounded.producer()
        value.replace_all_uses_with(rounded, replace_graph_outputs=True)
        cast.resize_inputs(1)
        cast.replace_input_with(0, value)
        value.dtype = self._ir.DataType.FLOAT
        return cast

    def widen(self, graph: Any) -> None:
        """Every node of a graph: low operands are widened before it, and low results rounded behind it."""
        for node in list(graph):
            inner = [
                attribute.as_graph()
                for attribute in node.attributes.values()
                if attribute.type == self._ir.AttributeType.GRAPH
            ]
            for each in inner:
                self.widen(each)
            if node.op_type in _CASTS:
                self._watch_cast(node)
            elif node.op_type == "MatMulInteger":
                self._multiply_exactly(node)
            elif not inner:
                # a branch or loop hands on what it is given
                self._widen_node(node)

    def _before(self, node: Any, op: str, inputs: Sequence[Any], dtype: str, **attributes: Any) -> Any:
        value = self.call(op, inputs, dtype, **attributes)
        node.prepend(value.producer())
        return value

    def _wide(self, node: Any, value: Any) -> Any:
        return self._before(node, "Cast", [value], "FLOAT", to=self._ir.DataType.FLOAT)

    def _widen_node(self, node: Any) -> None:
        operands = [index for index, value in enumerate(node.inputs) if self.is_low(value)]
        for index in operands:
            node.replace_input_with(index, self._wide(node, node.inputs[index]))
        # a node without such operands names the dtype of its results
        results = [value for value in node.outputs if self.is_low(value)] if operands else []
        for value in results:
            dtype = value.dtype.name
            cast = self.narrow(value)
            node.append(cast)
            self._watch(node, value, dtype, last=cast)

    def _watch_cast(self, node: Any) -> None:
        source, result = node.inputs[0], node.outputs[0]
        if self.is_low(result) and source.dtype is not None and source.dtype.name in _WIDE:
            self._watch(node, source, result.dtype.name, last=node)

    def _multiply_exactly(self, node: Any) -> None:
        """A product of 8-bit integers as one in fp32, which some CPUs' kernels clamp."""
        wide = [self._wide(node, value) for value in node.inputs]
        factors = [
            self._before(node, "Sub", [value, zero], "FLOAT")
            for value, zero in zip(wide[:2], wide[2:], strict=False)
        ]
        factors += wide[len(factors) : 2]
        product = self._before(node, "MatMul", factors, "FLOAT")
        kind = self._ir.DataType.INT32
        result = self._before(node, "Cast", [product], "INT32", to=kind)
        node.outputs[0].replace_all_uses_with(result, replace_graph_outputs=True)
        node.graph.remove(node, safe=True)

    def _watch(self, node: Any, value: Any, dtype: str, last: Any) -> None:
        """Adds outputs about a value in fp32 that is rounded."""
        if not self._watches or node.graph is not self._outer:
            return

        def call(op: str, inputs: Sequence[Any], kind: str, **attributes: Any) -> Any:
            nonlocal last
            result = self.call(op, inputs, kind, **attributes)
            last.append(result.producer())
            last = result.producer()
            return result

        def number(what: float) -> Any:
            return call("Constant", [], "FLOAT", value=self._ir.tensor(np.array(what, np.float32)))

        def largest(of: Any) -> Any:
            found = call("ReduceMax", [of], "FLOAT", keepdims=0)
            found.shape = self._ir.Shape([])
            self.added.append(found)
            return found.name

        single = call("Cast", [value], "FLOAT", to=self._ir.DataType.FLOAT)
        size = call("Abs", [single], "FLOAT")
        is_finite = call("Less", [size, number(np.inf)], "BOOL")
        finite = largest(call("Where", [is_finite, size, number(0.0)], "FLOAT"))
        is_nan = call("IsNaN", [single], "BOOL")
        has_nan = largest(call("Cast", [is_nan], "FLOAT", to=self._ir.DataType.FLOAT))
        noted = {key.removeprefix("pkg.torch.onnx."): text for key, text in node.metadata_props.items()}
        # from the model inwards, the call itself last
        scopes = ast.literal_eval(noted.get("name_scopes", "['']"))
        module, line = next(iter(scopes[-2:-1]), ""), innermost_line(noted.get("stack_trace", ""))
        self.watched.append(Watched(f"{node.op_type} {node.name!r}", module, line, dtype, finite, has_nan))
