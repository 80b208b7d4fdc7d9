"""Weights as oneDNN packs them, and the private calls that multiply by them.

A packed tensor is opaque: it has sizes, and no strides. In a graph that is compiled, a plain fake tensor stands for it.
"""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import _disable_current_modes

from amp_fx._torch.tracing import onednn_computes, quantised_ops
from amp_fx.runtime.state import cache_results

__all__ = [
    "CONVOLUTION_INT8", "LINEAR", "LINEAR_INT8", "Packing", "fuse_quantised", "multiplies_int8", "onednn_packs",
    "packed_memory", "packing", "takes_packed_inputs",
]  # fmt: skip

logger = logging.getLogger(__name__)

_mkldnn, _onednn = torch.ops.mkldnn, torch.ops.onednn

#: ``(x, packed, bias, "none", [], "")``
LINEAR = _mkldnn._linear_pointwise.default
#: ``(x, scale, zero point, packed, scales, zero points, bias, scale, zero point, dtype, "none", [], "")``
LINEAR_INT8 = _onednn.qlinear_pointwise.default
CONVOLUTION_INT8 = _onednn.qconv_pointwise.default

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


def packed_memory(packed: Tensor) -> tuple[int, int]:
    """Address and bytes of a tensor that oneDNN has packed."""
    return int(_mkldnn.data_ptr(packed)), int(_mkldnn._nbytes(packed))


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
_ADDING = {LINEAR_INT8: _onednn.qlinear_pointwise.binary, CONVOLUTION_INT8: _onednn.qconv2d_pointwise.binary}


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
        if op is CONVOLUTION_INT8:
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
    for op, count, activations in ((LINEAR_INT8, 13, gelu), (CONVOLUTION_INT8, 17, others)):
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
    And it casts nothing beside a bias in fp32: what is packed can be read by oneDNN alone.
    """
    read = {given for call in calls for given in call.all_input_nodes}
    _inputs[gm] = frozenset(str(node.target) for node in read if node.op == "placeholder")
    from torch._inductor.lowering import lowerings

    constants = _mkldnn._linear_pointwise, _mkldnn._convolution_transpose_pointwise, _onednn.qlinear_pointwise
    others = _mkldnn._convolution_pointwise, _mkldnn._convolution_pointwise_
    for packet in constants + others:
        for op in (getattr(packet, name) for name in packet.overloads()):
            if op in lowerings and not isinstance(lowerings[op], partial):  # it is wrapped once
                # what adds in place is lowered with its arguments in the order of what does not
                schema = _mkldnn._convolution_pointwise.binary if packet is others[1] else op
                names = [argument.name for argument in schema._schema.arguments]
                weight = names.index("qw" if "qw" in names else "W") if packet in constants else None
                lowerings[op] = partial(_lower, lowerings[op], names, weight)


def _lower(
    lower: Callable[..., Any], names: Sequence[str], constant: int | None, *args: Any, **kwargs: Any
) -> Any:
    """Lowers a call of oneDNN with arguments of some names; ``constant``: the position of one that is a constant."""
    from torch._inductor.virtualized import V

    if V.graph.module not in _inputs:
        return lower(*args, **kwargs)
    given = dict(zip(names, args, strict=False)) | kwargs
    if "padding" in given:
        _write_line_by_channels(args[0])
    if "X" in given and "other" in given and given["B"] and given["B"].dtype is not given["X"].dtype:
        return _lower_apart(given)
    # without what makes one dtype of all arguments
    lower = getattr(lower, "__wrapped__", lower)
    constants, name = V.graph.constants, "" if constant is None else args[constant].get_name()
    if name in constants or name not in _inputs[V.graph.module]:
        return lower(*args, **kwargs)
    with _disable_current_modes():
        constants[name] = torch.zeros(1, dtype=torch.float32).to_mkldnn()
    try:
        return lower(*args, **kwargs)
    finally:
        del constants[name]


def _write_line_by_channels(x: Any) -> None:
    """Has the value ``[N, C, L]`` behind a row ``[N, C, 1, L]`` written channels last, as convolutions read it.

    Inductor fixes the layout of a value that is viewed before it asks for the layout of the view: it would be written
    twice.
    """
    from torch._inductor import ir

    behind = x.data.data if isinstance(x.data, ir.BaseView) else None
    if not isinstance(behind, ir.StorageBox) or len(sizes := [*behind.get_size()]) != 3:
        return
    if [*x.get_size()] != [*sizes[:2], 1, sizes[2]]:
        return
    behind.realize()
    if isinstance(behind.get_layout(), ir.FlexibleLayout):
        ir.as_storage_and_layout(behind, freeze=True, want_contiguous=False, stride_order=[2, 0, 1])


def _lower_apart(given: Mapping[str, Any]) -> Any:
    """Lowers a call that adds another value as well as a sum of its own: oneDNN refuses a bias in fp32 beside that."""
    from torch._inductor.lowering import lowerings

    aten, is_linear = torch.ops.aten, "padding" not in given
    settings = [] if is_linear else [given[name] for name in ("padding", "stride", "dilation", "groups")]
    plain = LINEAR if is_linear else _mkldnn._convolution_pointwise.default
    product = lowerings[plain](given["X"], given["W"], given["B"], *settings, "none", [], "")
    kind, factor = given["attr" if is_linear else "binary_attr"], given.get("alpha")
    together = {"add": aten.add.Tensor, "sub": aten.sub.Tensor, "mul": aten.mul.Tensor}[kind]
    total = lowerings[together](product, given["other"], **({} if factor is None else {"alpha": factor}))
    return lowerings[aten.relu.default](total) if given.get("unary_attr") == "relu" else total
