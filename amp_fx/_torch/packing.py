"""Weights as oneDNN packs them, and the private calls that multiply by them.

A packed tensor is opaque: it has sizes, and no strides. In a graph that is compiled, a plain fake tensor stands for it.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from amp_fx._torch.tracing import OpOverload, own_op
from amp_fx.state import cache_results

__all__ = [
    "LINEAR", "LINEAR_INT8", "Packing", "convolution_int8_op", "convolution_op", "fuse_quantised", "onednn_packs",
    "packed_memory", "packing", "pointwise_convolution", "pointwise_convolution_int8", "takes_packed_inputs",
]  # fmt: skip

_mkldnn, _onednn = torch.ops.mkldnn, torch.ops.onednn

#: ``(x, packed, bias, "none", [], "")``
LINEAR = _mkldnn._linear_pointwise.default
#: ``(x, scale, zero point, packed, scales, zero points, bias, scale, zero point, dtype, "none", [], "")``
LINEAR_INT8 = _onednn.qlinear_pointwise.default

_PACK: dict[str, Callable[..., Tensor]] = {
    "linear": _mkldnn._reorder_linear_weight,
    "linear_int8": _onednn.qlinear_prepack,
    "convolution_int8": lambda weight, *args: _onednn.qconv_prepack(
        weight, weight.new_ones(len(weight)).float(), *args
    ),
    "convolution": _mkldnn._reorder_convolution_weight,
    "transposed_convolution": _mkldnn._reorder_convolution_transpose_weight,
}


@dataclass(frozen=True)
class Packing:
    """How oneDNN packs a weight; equal if it lays it out alike.

    Attributes:
        kind: a key of ``_PACK``.
        layout: what comes out, as oneDNN describes it.
        shape: of the packed weight.
        args: what packing depends on beside the weight, such as the batch size.
    """

    kind: str
    layout: bytes
    shape: torch.Size
    args: tuple[Any, ...] = field(compare=False)

    def __call__(self, weight: Tensor) -> Tensor:
        """A packed copy."""
        return _PACK[self.kind](weight, *self.args)


@cache_results()
def packing(kind: str, shape: torch.Size, dtype: torch.dtype, *args: Any) -> Packing:
    """How oneDNN packs weights of a shape; sizes in ``args`` are tuples."""
    # while a graph is compiled, modes are on that run ops on fake values
    with _disable_current_modes():
        packed = _PACK[kind](torch.zeros(shape, dtype=dtype), *args)
        layout = bytes(_mkldnn._get_mkldnn_serialized_md(packed).numpy())
    return Packing(kind, layout, packed.shape, args)


def onednn_packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN multiplies in a dtype on this processor."""
    if not torch.backends.mkldnn.enabled or not torch.backends.mkldnn.is_available():
        return False
    if dtype is torch.bfloat16:
        return bool(_mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(_mkldnn._is_mkldnn_fp16_supported())
    return dtype is torch.float32


def packed_memory(packed: Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor that oneDNN has packed."""
    return int(_mkldnn.data_ptr(packed)), int(_mkldnn._nbytes(packed))


# ---- convolutions


def convolution_op() -> OpOverload:
    """``aten.convolution`` with a packed weight, and with the strides of that; torch knows it once this was called.

    oneDNN's own call returns channels last whatever it is given, which a program's views may not fit: it takes the
    place of this one (:func:`pointwise_convolution`) when strides are settled.
    """
    return own_op(
        "packed_convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
        "bool transposed, int[] output_padding, int groups) -> Tensor",
        _run_convolution,
        _convolution_meta,
    )


def pointwise_convolution(*args: Any) -> tuple[OpOverload, tuple[Any, ...]]:
    """The call of oneDNN, and its arguments, for the arguments of :func:`convolution_op`."""
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = args
    op = _mkldnn._convolution_transpose_pointwise if transposed else _mkldnn._convolution_pointwise
    paddings = (padding, output_padding) if transposed else (padding,)
    return op.default, (x, weight, bias, *paddings, stride, dilation, groups, "none", [], "")


def convolution_int8_op() -> OpOverload:
    """The same of a value in uint8, by scale and zero point, and a weight in int8, by scales and zero points."""
    return own_op(
        "packed_convolution_int8(Tensor x, float scale, int zero_point, Tensor weight, Tensor scales, Tensor zeros, "
        "Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups, ScalarType dtype) -> Tensor",
        _run_convolution_int8,
        _convolution_int8_meta,
    )


def pointwise_convolution_int8(*args: Any) -> tuple[OpOverload, tuple[Any, ...]]:
    """The call of oneDNN, and its arguments, for the arguments of :func:`convolution_int8_op`."""
    *given, dtype = args
    return _onednn.qconv_pointwise.default, (*given, 1.0, 0, dtype, "none", [], "")


def _run_convolution_int8(*args: Any) -> Tensor:
    op, given = pointwise_convolution_int8(*args)
    result: Tensor = op(*given)
    return result


def _convolution_int8_meta(*args: Any) -> Tensor:
    x, _scale, _zero, weight, _scales, _zeros, _bias, *given, groups, dtype = args
    args = x.to(dtype), weight.to(dtype), None
    return torch.ops.aten.convolution.default(*args, *given, False, [0, 0], groups)


def fuse_quantised(graph: torch.fx.Graph) -> bool:
    """Has oneDNN's products in int8 do what follows them: activations, additions, and the rounding of what they return.

    Inductor does it where it freezes a graph, in the passes behind those that pack weights. False if there are none.
    """
    if not any(node.target in (LINEAR_INT8, _onednn.qconv_pointwise.default) for node in graph.nodes):
        return False
    from torch._inductor.fx_passes import freezing_patterns

    freezing_patterns.lazy_init()
    for patterns in freezing_patterns.pass_patterns[3:]:
        patterns.apply(graph)
    return True


def _run_convolution(*args: Any) -> Tensor:
    op, given = pointwise_convolution(*args)
    x, weight, _, *more = args
    like = _convolution_meta(
        x.to("meta"), torch.empty(weight.shape, dtype=weight.dtype, device="meta"), None, *more
    )
    # the strides that the graph was traced with
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(op(*given))


def _convolution_meta(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    *more: Any,
) -> Tensor:
    # packed, it is the other way round
    weight = weight.transpose(0, 1) if transposed else weight
    return torch.ops.aten.convolution.default(x, weight, bias, stride, padding, dilation, transposed, *more)


# ---- Inductor


def takes_packed_inputs() -> None:
    """Has Inductor take packed weights that are inputs of a graph.

    Where it lowers oneDNN's linears it asserts that weights are constants of the graph, which it reads only to tune
    kernels of its own.
    """
    from torch._inductor.lowering import lowerings
    from torch._inductor.virtualized import V

    def lowering(lower: Callable[..., Any], position: int) -> Callable[..., Any]:
        def with_constant(*args: Any, **kwargs: Any) -> Any:
            constants, name = V.graph.constants, args[position].get_name()
            if name in constants:
                return lower(*args, **kwargs)
            constants[name] = torch.empty(0, device="meta")
            try:
                return lower(*args, **kwargs)
            finally:
                del constants[name]

        with_constant.amp_fx_lowers = lower  # type: ignore[attr-defined]  # it is wrapped once
        return with_constant

    ops = {_mkldnn._linear_pointwise: 1, _onednn.qlinear_pointwise: 3}
    for packet, position in ops.items():
        for name in packet.overloads():
            op = getattr(packet, name)
            if op in lowerings and not hasattr(lowerings[op], "amp_fx_lowers"):
                # what is added stands before the weight
                is_added_first = "binary" in name and packet is _mkldnn._linear_pointwise
                lowerings[op] = lowering(lowerings[op], position + is_added_first)
