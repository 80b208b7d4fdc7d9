"""Weights as oneDNN packs them, and the private calls that multiply by them.

A packed tensor is opaque: it has sizes, and no strides. In a graph that is compiled, a plain fake tensor stands for it.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import logging
import timeit
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from amp_fx._torch.tracing import OpOverload, onednn_computes, own_op, quantised_ops
from amp_fx.runtime.state import cache_results

__all__ = [
    "LINEAR", "LINEAR_INT8", "Packing", "adds_fp32_bias", "convolution_int8_op", "convolution_op", "fuse_quantised",
    "is_faster_as_convolution", "multiplies_int8", "onednn_packs", "packed_memory", "packing",
    "pointwise_convolution", "pointwise_convolution_int8", "takes_packed_inputs",
]  # fmt: skip

logger = logging.getLogger(__name__)

_mkldnn, _onednn = torch.ops.mkldnn, torch.ops.onednn

#: ``(x, packed, bias, "none", [], "")``
LINEAR = _mkldnn._linear_pointwise.default
#: ``(x, scale, zero point, packed, scales, zero points, bias, scale, zero point, dtype, "none", [], "")``
LINEAR_INT8 = _onednn.qlinear_pointwise.default
_CONVOLUTION_INT8 = _onednn.qconv_pointwise.default

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
    """How oneDNN packs a weight; equal if it lays it out alike."""

    #: a key of ``_PACK``
    kind: str
    #: what comes out, as oneDNN describes it
    layout: bytes
    #: of the packed weight
    shape: torch.Size
    #: what packing depends on beside the weight, such as the batch size
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
    is_on = torch.backends.mkldnn.enabled and torch.backends.mkldnn.is_available()
    is_low = dtype in (torch.bfloat16, torch.float16)
    return is_on and (dtype is torch.float32 or (is_low and onednn_computes(dtype)))


@cache_results()
def multiplies_int8() -> bool:
    """Whether oneDNN's sums of products in int8 are exact: on x86 without VNNI it adds each two in 16 bits, clamped."""
    # https://uxlfoundation.github.io/oneDNN/dev_guide_int8_computations.html
    if not onednn_packs(torch.float32):
        return False
    with _disable_current_modes():
        x, weight = torch.full((16, 64), 255, dtype=torch.uint8), torch.full((16, 64), 127, dtype=torch.int8)
        packed = packing("linear_int8", weight.shape, torch.int8, (16, 64))(weight)
        ones = torch.ones(16, dtype=torch.float32)
        given = x, 1.0, 0, packed, ones, torch.zeros(16, dtype=torch.int32), None
        sums = LINEAR_INT8(*given, 1.0, 0, torch.float32, "none", [], "")
    if not (is_exact := bool(sums.eq(255 * 127 * 64).all())):
        logger.warning(
            "oneDNN clamps sums of int8 products on this CPU (no VNNI): amp_fx multiplies in floating point"
        )
    return is_exact


@cache_results()
def adds_fp32_bias(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed convolution in a 16-bit dtype takes a bias in fp32 and does not round it: tried once."""
    if not onednn_packs(dtype):
        return False
    one, unit, none = torch.Size((1, 1, 1, 1)), (1, 1), (0, 0)
    with _disable_current_modes():
        weight = packing("convolution", one, dtype, none, unit, unit, 1, tuple(one))(
            torch.ones(one, dtype=dtype)
        )
        # the sum is exact in 16 bits, its bias is not
        given = torch.full(one, -1.0, dtype=dtype), weight, torch.tensor([1 + 2**-12])
        try:
            total = convolution_op()(*given, unit, none, unit, False, none, 1, False)
        except RuntimeError:
            return False
    return total.item() == 2**-12


def packed_memory(packed: Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor that oneDNN has packed."""
    return int(_mkldnn.data_ptr(packed)), int(_mkldnn._nbytes(packed))


@cache_results()
def is_faster_as_convolution(sizes: tuple[int, int, int], dtype: torch.dtype, threads: int) -> bool:
    """Whether oneDNN takes clearly less time for a product that it is given as a convolution with a window of one.

    Up to version 3.13, with AMX, its products may leave threads without work: with two threads, one of them for
    512 x 768 by 768 x 768. Which ones follows no rule, so both are timed. ``sizes``: rows, columns, contracted.
    """
    rows, columns, contracted = sizes
    is_asked = threads > 1 and dtype is not torch.float32 and torch.cpu._is_amx_tile_supported()
    if not is_asked or not 2**26 <= rows * columns * contracted <= 2**32:
        return False
    with _disable_current_modes():
        x, weight = (torch.zeros(size, contracted, dtype=dtype) for size in (rows, columns))
        image, kernel = x.t()[None, ..., None], weight[..., None, None]
        matrix = packing("linear", weight.shape, dtype, rows)(weight)
        window = (0, 0), (1, 1), (1, 1), 1
        kernel = packing("convolution", kernel.shape, dtype, *window, tuple(image.shape))(kernel)
        calls = (
            partial(LINEAR, x, matrix, None, "none", [], ""),
            partial(_mkldnn._convolution_pointwise.default, image, kernel, None, *window, "none", [], ""),
        )
        linear, convolution = (min(timeit.repeat(call, number=1, repeat=12)) for call in calls)
    return convolution < 0.85 * linear


# ---- convolutions


def convolution_op() -> OpOverload:
    """``aten.convolution`` with a packed weight, and with the strides of that; torch knows it once this was called.

    oneDNN's own call returns channels last whatever it is given, which a program's views may not fit: it takes the
    place of this one (:func:`pointwise_convolution`) when strides are settled. The last argument tells them, as they
    depend on the weight's before it was packed.
    """
    return own_op(
        "packed_convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
        "bool transposed, int[] output_padding, int groups, bool channels_last) -> Tensor",
        _run_convolution,
        _convolution_meta,
    )


def pointwise_convolution(*args: Any) -> tuple[OpOverload, tuple[Any, ...]]:
    """The call of oneDNN, and its arguments, for the arguments of :func:`convolution_op`."""
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, _ = args
    op = _mkldnn._convolution_transpose_pointwise if transposed else _mkldnn._convolution_pointwise
    paddings = (padding, output_padding) if transposed else (padding,)
    return op.default, (x, weight, bias, *paddings, stride, dilation, groups, "none", [], "")


def convolution_int8_op() -> OpOverload:
    """The op of a convolution of a uint8 value by an int8 weight, each with scale and zero point."""
    return own_op(
        "packed_convolution_int8(Tensor x, float scale, int zero_point, Tensor weight, Tensor scales, Tensor zeros, "
        "Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups, ScalarType dtype, bool channels_last) "
        "-> Tensor",
        lambda *args: _CONVOLUTION_INT8(*pointwise_convolution_int8(*args)[1]),
        _convolution_int8_meta,
    )


def pointwise_convolution_int8(*args: Any) -> tuple[OpOverload, tuple[Any, ...]]:
    """The call of oneDNN, and its arguments, for the arguments of :func:`convolution_int8_op`."""
    *given, dtype, _ = args
    return _CONVOLUTION_INT8, (*given, 1.0, 0, dtype, "none", [], "")


def _convolution_int8_meta(*args: Any) -> Tensor:
    x, _scale, _zero, weight, _scales, _zeros, _bias, *given, groups, dtype, channels_last = args
    given += False, [0, 0], groups, channels_last
    return _convolution_meta(x.to(dtype), weight.to(dtype), None, *given)


def _run_convolution(*args: Any) -> Tensor:
    op, given = pointwise_convolution(*args)
    x, weight, _, *more = args
    plain = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    like = _convolution_meta(x.to("meta"), plain, None, *more)
    # the strides that the graph was traced with
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(op(*given))


def _convolution_meta(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
    # that of a transposed one is the other way round once it is packed
    weight = weight.transpose(0, 1) if more[4] else weight
    out = torch.ops.aten.convolution.default(x, weight, *more[:-1])
    last = torch.channels_last if out.ndim == 4 else torch.channels_last_3d
    return torch.empty_like(out, memory_format=last if more[-1] else torch.contiguous_format)


# ---- Inductor


def fuse_quantised(graph: fx.Graph) -> bool:
    """Has oneDNN's products in int8 do what follows them: activations, additions, and the rounding of what they return.

    Up to torch 2.13 Inductor does it where it freezes a graph; then it left that to torchao. False if there are none.
    """
    if not any(node.target in _ADDING for node in graph.nodes):
        return False
    _fusions().apply(graph)
    return True


#: what is added as well stands behind the weight
_ADDING = {LINEAR_INT8: _onednn.qlinear_pointwise.binary, _CONVOLUTION_INT8: _onednn.qconv2d_pointwise.binary}


def _fuse(activation: str, algorithm: str, match: Any, *_: Any, other: Any = None, **named: Any) -> None:
    """Makes one call of all that was found, with oneDNN's names of an activation, where there is one."""
    product: Any = next(node for node in match.nodes if node.target in _ADDING)
    out, added, is_rounded = match.output_node(), (), "scale" in named
    op, *given, dtype = product.target, *product.args[:-6], out.meta["val"].dtype
    written = (torch.float32, torch.bfloat16) if other is not None else (product.args[-4],)
    # with AMX oneDNN takes up to twice as long for a silu with its rounding as for both apart, but with 1 x 1
    is_slow = activation == "swish" and max(product.args[3].meta["val"].shape[2:]) > 1
    is_fit = not is_slow if is_rounded else dtype in written and len(match.nodes) > 1
    # a keyword is a factor of what is added
    if product.args[-3] != "none" or not is_fit or any(node.kwargs for node in match.nodes):
        return
    if other is not None:
        if not isinstance(other, fx.Node) or other.meta["val"].shape != product.meta["val"].shape:
            return
        added = 1.0, 0, "add", 1.0
        if op is _CONVOLUTION_INT8:
            if other.target is not quantised_ops().dequantize_per_tensor.default:
                return
            # it adds where that lies, which nobody may read later: bytes if it writes bytes
            other, *scales = other.args[:3] if is_rounded else (other, 1.0, 0)
            added = *scales, "sum", 1.0
            is_own = not any(getattr(node.target, "is_view", True) for node in (other, *other.users))
            is_fit = not is_rounded or other.meta["val"].dtype is dtype
            if not is_own or not is_fit or other is product.args[0] or max(other.users) > out:
                return
        given.insert(6, other)
        op = _ADDING[op]
    limits = [named[name] for name in ("min_value", "max_value") if name in named]
    after = named.get("scale", 1.0), named.get("zero_point", 0), dtype, *added, activation, limits, algorithm
    made = match.graph.call_function(op, (*given, *after))
    made.meta.update(out.meta)
    out.replace_all_uses_with(made)
    match.erase_nodes()


@cache_results()
def _fusions() -> Any:
    """Inductor's patterns of activations, behind a product, an addition, or both, and before a rounding or none."""
    from torch._inductor import pattern_matcher as patterns
    from torch._inductor.fx_passes import mkldnn_fusion as known

    found: Any = patterns.PatternMatcherPass()
    aten, other = torch.ops.aten, patterns.KeywordArg("other")

    def call(op: Any, *args: Any, more: int = 0, users: int = 1) -> Any:
        # each Arg stands for one value
        return patterns.CallFunction(op, *args, *(patterns.Arg() for _ in range(more)), _users=users)

    def register(pattern: Any, *names: str) -> None:
        by = map(patterns.KeywordArg, ("scale", "zero_point"))
        for each in (pattern, call(quantised_ops().quantize_per_tensor.default, pattern, *by, more=3)):
            patterns.register_graph_pattern(each, pass_dict=found)(partial(_fuse, *names))

    # decomposed, as Inductor knows them, with the number of times that they read a value
    gelu = [("gelu", "none", known._gelu_fusion_1, 2), ("gelu", "tanh", known._gelu_fusion_2, 4)]
    clamped = [("hardtanh", "", known._hardtanh_fusion, 1), ("hardswish", "", known._hardswish_fusion, 2)]
    others = [*clamped, ("swish", "", known._silu_fusion, 2)]
    cast = partial(call, torch.ops.prims.convert_element_type.default, more=1)
    # on ARM they do nothing beside
    if _mkldnn._is_mkldnn_acl_supported():
        return found
    for op, count, activations in ((LINEAR_INT8, 13, gelu), (_CONVOLUTION_INT8, 17, others)):
        product = partial(call, op, more=count)
        added = [call(aten.add.Tensor, *pair) for pair in ((product(), other), (other, product()))]
        for pattern in (product(), *added, *map(cast, added)):
            register(pattern, "none", "")
            register(call(aten.relu.default, pattern), "relu", "")
        for *names, activation, users in activations:
            register(activation(product(users=users)), *names)
            register(cast(activation(cast(product(), users=users))), *names)
    return found


#: graph -> its inputs that are packed weights; those of other programs are lowered as they were
_inputs: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()


def takes_packed_inputs(gm: fx.GraphModule, calls: Iterable[fx.Node]) -> None:
    """Has Inductor take packed weights that are inputs of a graph, where it looks for constants of the graph.

    There has to be one for a linear, and from torch 2.15 on a packed one, or a transposed convolution gets wrong sizes.
    """
    read = {given for call in calls for given in call.all_input_nodes}
    _inputs[gm] = frozenset(str(node.target) for node in read if node.op == "placeholder")
    from torch._inductor.lowering import lowerings

    packets = _mkldnn._linear_pointwise, _mkldnn._convolution_transpose_pointwise, _onednn.qlinear_pointwise
    for op in (getattr(packet, name) for packet in packets for name in packet.overloads()):
        if op in lowerings and not isinstance(lowerings[op], partial):  # it is wrapped once
            names = [argument.name for argument in op._schema.arguments]
            weight = "qw" if "qw" in names else "W"
            lowerings[op] = partial(_lower_with_constant, lowerings[op], names.index(weight))


def _lower_with_constant(lower: Callable[..., Any], position: int, *args: Any, **kwargs: Any) -> Any:
    from torch._inductor.virtualized import V

    constants, name = V.graph.constants, args[position].get_name()
    if name in constants or name not in _inputs.get(V.graph.module, ()):
        return lower(*args, **kwargs)
    with _disable_current_modes():
        constants[name] = torch.zeros(1, dtype=torch.float32).to_mkldnn()
    try:
        return lower(*args, **kwargs)
    finally:
        del constants[name]
