"""Convolutions as oneDNN's packed calls take them, in floating point and in int8."""

# what is imported here is private on purpose
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from amp_fx._torch.packing import CONVOLUTION_INT8, LINEAR, Packing, onednn_packs, packing
from amp_fx._torch.tracing import OpOverload, own_op
from amp_fx.runtime.state import cache_results

__all__ = [
    "LINES", "Convolution", "adds_fp32_bias", "convolution_int8_op", "convolution_op", "pointwise_convolution",
    "pointwise_convolution_int8",
]  # fmt: skip

_mkldnn, _aten = torch.ops.mkldnn, torch.ops.aten

#: dimensions of a value -> the views, each an op and its argument, of ``[N, C, L]`` or ``[N, C, L, 1]`` as
#: ``[N, C, 1, L]``, and those that undo it. oneDNN's kernels for one row are up to 13 times as fast as those for one
#: column: in fp32 15.5 for 205 ms, 16 signals of 1,532 by 1,024 windows of 512 (a Xeon with AMX, two threads)
LINES = {
    3: (((_aten.unsqueeze.default, 2),), ((_aten.squeeze.dim, 2),)),
    4: (
        ((_aten.squeeze.dim, 3), (_aten.unsqueeze.default, 2)),
        ((_aten.squeeze.dim, 2), (_aten.unsqueeze.default, 3)),
    ),
}


@dataclass(frozen=True)
class Convolution:
    """A convolution of a value by a weight, with the settings of oneDNN's packed call.

    Attributes:
        sizes: of the value that the call takes; None where one is not known.
        kernel: sizes of the weight.
        stride: a number for each dimension, as ``padding`` and ``dilation``.
        output_padding: of a transposed one; None for others.
        groups: of channels.
        is_line: it is over one dimension, of ``[N, C, L]`` or ``[N, C, L, 1]``; all else is that of a row (``LINES``).
    """

    sizes: tuple[int, ...] | None
    kernel: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...] | None
    groups: int
    is_line: bool = False

    def result(self) -> tuple[int, ...]:
        """The sizes of the result but for batch and channels, of known sizes."""
        assert self.sizes is not None
        windows = zip(self.sizes[2:], self.kernel[2:], self.stride, self.padding, self.dilation, strict=True)
        if self.output_padding is None:
            return tuple((x + 2 * pad - far * (k - 1) - 1) // step + 1 for x, k, step, pad, far in windows)
        sizes = [(x - 1) * step - 2 * pad + far * (k - 1) + 1 for x, k, step, pad, far in windows]
        return tuple(size + more for size, more in zip(sizes, self.output_padding, strict=True))

    def gradient(self) -> Convolution:
        """Of a transposed one, the convolution that gives the gradient of its value."""
        assert self.sizes is not None
        sizes = self.sizes[0], self.kernel[1] * self.groups, *self.result()
        return replace(self, sizes=sizes, output_padding=None)

    @property
    def is_packed(self) -> bool:
        """True where oneDNN has a packed call of it that Inductor knows."""
        if self.output_padding is None:
            return len(self.kernel) > 3
        is_fit = all(more < step for more, step in zip(self.output_padding, self.stride, strict=True))
        return self.groups == 1 and self.sizes is not None and is_fit

    def packing(self, dtype: torch.dtype) -> Packing | None:
        """How its weight is packed in a dtype; None: as it is, for any size."""
        if self.sizes is None:
            return None
        more = () if self.output_padding is None else (self.output_padding,)
        kind = "transposed_convolution" if more else "convolution"
        settings = self.padding, *more, self.stride, self.dilation, self.groups, self.sizes
        return packing(kind, self.kernel, dtype, *settings)

    def args(self, *, channels_last: bool) -> tuple[Any, ...]:
        """What follows value, weight and bias in a call of :func:`convolution_op`."""
        transposed, more = self.output_padding is not None, self.output_padding or (0,) * len(self.stride)
        settings = self.stride, self.padding, self.dilation, transposed, more, self.groups
        return *settings, channels_last, self.is_line


def convolution_op() -> OpOverload:
    """``aten.convolution`` with a packed weight, and with the strides of that; torch knows it once this was called.

    oneDNN's own call returns channels last whatever it is given, which a program's views may not fit: it takes the
    place of this one (:func:`pointwise_convolution`) when strides are settled. ``channels_last`` tells them, as they
    depend on the weight's before it was packed. ``is_line``: it is over one dimension, of ``[N, C, L]`` or
    ``[N, C, L, 1]``, and weight and settings are those of a row (:data:`LINES`).
    """
    return own_op(
        "packed_convolution(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding, int[] dilation, "
        "bool transposed, int[] output_padding, int groups, bool channels_last, bool is_line) -> Tensor",
        _run_convolution,
        _convolution_meta,
    )


def pointwise_convolution(*args: Any) -> tuple[OpOverload, tuple[Any, ...]]:
    """The call of oneDNN, and its arguments, for those of :func:`convolution_op`; it takes a line as a row."""
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, *_ = args
    op = _mkldnn._convolution_transpose_pointwise if transposed else _mkldnn._convolution_pointwise
    paddings = (padding, output_padding) if transposed else (padding,)
    return op.default, (x, weight, bias, *paddings, stride, dilation, groups, "none", [], "")


def convolution_int8_op() -> OpOverload:
    """The op of a convolution of a uint8 value by an int8 weight, each with scale and zero point."""
    return own_op(
        "packed_convolution_int8(Tensor x, float scale, int zero_point, Tensor weight, Tensor scales, Tensor zeros, "
        "Tensor? bias, int[] stride, int[] padding, int[] dilation, int groups, ScalarType dtype, bool channels_last) "
        "-> Tensor",
        lambda *args: CONVOLUTION_INT8(*pointwise_convolution_int8(*args)[1]),
        _convolution_int8_meta,
    )


def pointwise_convolution_int8(*args: Any) -> tuple[OpOverload, tuple[Any, ...]]:
    """The call of oneDNN, and its arguments, for the arguments of :func:`convolution_int8_op`."""
    *given, dtype, _ = args
    return CONVOLUTION_INT8, (*given, 1.0, 0, dtype, "none", [], "")


def _convolution_int8_meta(*args: Any) -> Tensor:
    x, _scale, _zero, weight, _scales, _zeros, _bias, *given, groups, dtype, channels_last = args
    given += False, [0, 0], groups, channels_last, False
    return _convolution_meta(x.to(dtype), weight.to(dtype), None, *given)


def _run_convolution(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
    plain = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    # the strides that the graph was traced with
    like = _convolution_meta(x.to("meta"), plain, None, *more[1:])
    lay, undo = _views(x, is_line=more[-1])
    op, given = pointwise_convolution(lay(x), weight, *more)
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).copy_(undo(op(*given)))


def _convolution_meta(x: Tensor, weight: Tensor, *more: Any) -> Tensor:
    *given, channels_last, is_line = more
    lay, undo = _views(x, is_line=is_line)
    # that of a transposed one is the other way round once it is packed
    weight = weight.transpose(0, 1) if given[4] else weight
    out = torch.ops.aten.convolution.default(lay(x), weight, *given)
    last = torch.channels_last if out.ndim == 4 else torch.channels_last_3d
    return undo(torch.empty_like(out, memory_format=last if channels_last else torch.contiguous_format))


def _views(x: Tensor, *, is_line: bool) -> list[Callable[[Tensor], Tensor]]:
    """The two of ``LINES`` for a value that is a line; else both give what they are given."""
    return [partial(_viewed, views if is_line else ()) for views in LINES.get(x.ndim, ((), ()))]


def _viewed(views: Sequence[tuple[OpOverload, int]], value: Tensor) -> Tensor:
    for view, dim in views:
        value = view(value, dim)
    return value


@cache_results()
def adds_fp32_bias(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed calls in a 16-bit dtype take a bias in fp32 and do not round it: tried once."""
    if not onednn_packs(dtype):
        return False
    form = Convolution((1, 1, 1, 1), torch.Size((1, 1, 1, 1)), (1, 1), (0, 0), (1, 1), None, 1)
    with _disable_current_modes():
        # the sum is exact in 16 bits, its bias is not
        x, weight, bias = (
            -torch.ones(1, 1, dtype=dtype),
            torch.ones(1, 1, dtype=dtype),
            torch.tensor([1 + 2**-12]),
        )
        image, window = x[..., None, None], _packed(form.packing(dtype), weight[..., None, None])
        try:
            product = LINEAR(
                x, _packed(packing("linear", weight.shape, dtype, 1), weight), bias, "none", [], ""
            )
            sums = product, convolution_op()(image, window, bias, *form.args(channels_last=False))
        except RuntimeError:
            return False
    return all(total.item() == 2**-12 for total in sums)


def _packed(how: Packing | None, weight: Tensor) -> Tensor:
    return weight if how is None else how(weight)
