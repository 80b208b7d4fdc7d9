"""Calls on weights, rewritten for oneDNN before the graph is split: norms are folded in, weights are packed.

Before, where ``w_bf16`` and ``b_bf16`` are computed from weights alone::

    linear = torch.ops.aten.linear.default(x_16, w_bf16, b_bf16)

After, with an input that takes the packed weight::

    linear = torch.ops.mkldnn._linear_pointwise.default(x_16, w_packed, b_bf16, "none", [], "")

Inductor fuses with such a call what follows it, wherever it comes from. So nothing has to be frozen, and the graph is
one for Inductor's caches.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx as fx

from amp_fx._torch import (
    LINEAR,
    LINEAR_INT8,
    LINES,
    adds_fp32_bias,
    convolution_int8_op,
    convolution_op,
    is_faster_as_convolution,
    onednn_packs,
    packing,
)
from amp_fx.graphs.calls import (
    CONVOLUTIONS,
    args_of,
    argument_value,
    behind,
    convolution_settings,
    convolves,
    is_cast,
    is_channels_last,
)
from amp_fx.graphs.convolutions import is_wrong, packed_form
from amp_fx.graphs.keys import CAST_META
from amp_fx.graphs.rewriter import Rewriter
from amp_fx.graphs.traits import linear_form
from amp_fx.graphs.values import is_fixed, numel
from amp_fx.precision.policy.forms import with_norm
from amp_fx.runtime.weights.bias_correction import Moments, moved_mean
from amp_fx.runtime.weights.lift import Lift
from amp_fx.runtime.weights.products import as_convolution, dequantised, join_linears
from amp_fx.runtime.weights.zeros import take_zeros

aten = torch.ops.aten


def apply_patterns(lift: Lift, *, wide: bool) -> None:
    """Rewrites what a graph does with its weights for oneDNN; ``wide``: linears in fp32 are packed, too."""
    fold_norms(lift)
    work = _Patterns(lift, wide=wide)
    for node in list(lift.graph.nodes):
        if node not in lift.derived:
            work.take_bias(node)
    join_linears(lift.graph, lift.derived, work.packs)
    for node in list(lift.graph.nodes):
        if node in lift.derived:
            continue
        work.pack_int8(node)
        work.pack_linear(node)
        work.pack_convolution(node)


def fold_norms(lift: Lift) -> list[tuple[fx.Node, fx.Node]]:
    """Folds norms by given statistics into the weights before them.

    What is left of a norm is an addition in fp32. Returns the weights, and what is added, once for each norm.
    """
    work = _Patterns(lift, wide=False)
    nodes = [node for node in lift.graph.nodes if node not in lift.derived]
    return [folded for node in nodes if (folded := work.fold_norm(node)) is not None]


class _Patterns:
    """Works on one graph."""

    def __init__(self, lift: Lift, *, wide: bool) -> None:
        self._lift, self._graph, self._wide = lift, lift.graph, wide
        self._moments = Moments(lift)

    # ---- norms

    def fold_norm(self, norm: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """Folds a norm by given statistics into the weight of the convolution or product before it.

        The weight is rounded once, after it was scaled; a bias is not rounded at all.
        """
        if norm.target is not aten.batch_norm.default or argument_value(norm, "training"):
            return None
        x, scale, shift, mean, variance, _, _, eps, *_ = args_of(norm)
        given = [value for value in (scale, shift, mean, variance) if value is not None]
        if None in (mean, variance) or not self._lift.derived.issuperset(given):
            return None
        call, cast = x, None
        if is_cast(call) and len(call.users) == 1:
            call, cast = call.all_input_nodes[0], call
        position = self._channels(call)
        if position is None or len(call.users) > 1 or not self._is_from_weights(call):
            return None
        if self._lift.is_written_between(call, norm):
            return None
        weight, bias = args_of(call)[1], args_of(call)[2] if len(args_of(call)) > 2 else None
        dtype, sizes = weight.meta["val"].dtype, [1] * weight.meta["val"].ndim
        sizes[position] = -1
        add = self._lift.call
        with self._graph.inserting_before(norm):
            wide = None if bias is None else self._lift.in_fp32(bias)
            given = scale, shift, mean, variance, eps
            exact, bias = with_norm(self._lift.in_fp32(weight), wide, given, sizes, add)
            weight = add(aten.to.dtype, exact, dtype)
            moments = None if dtype is torch.float32 else self._moments.of(args_of(call)[0], call)
            if moments is not None and position == 0:
                groups = convolution_settings(call)["groups"] if call.target in CONVOLUTIONS else 1
                bias = add(aten.add.Tensor, bias, add(moved_mean, exact, weight, moments, groups))
            self._lift.shifts.add(bias)
            folded = self._graph.node_copy(call)
            folded.args = (args_of(call)[0], weight, None, *args_of(call)[3:])
            beside = [-1] + [1] * (norm.meta["val"].ndim - 2)
            # no part of what is derived: it is added as it is stored
            shaped = bias if len(beside) == 1 else self._lift.work(aten.view.default, bias, beside)
            casts = Rewriter(self._graph, meta={CAST_META: True})
            total = self._lift.work(aten.add.Tensor, casts.cast(folded, torch.float32), shaped)
            result = casts.cast(total, norm.meta["val"].dtype)
        self._moments.fold(norm, result)
        norm.replace_all_uses_with(result)
        for node in filter(None, (norm, cast, call)):
            self._graph.erase_node(node)
        return weight, bias

    def take_bias(self, call: fx.Node) -> None:
        """An addition to each channel of a convolution or a product becomes its bias.

        In 16 bits only what is left of a norm, as the sum would be rounded where the program adds in fp32, and only
        where the weight is packed: elsewhere the addition stays, in fp32.
        """
        args = args_of(call)
        if self._channels(call) is None or args[2:3] not in ((), (None,)) or len(call.users) != 1:
            return
        read, [total] = call, call.users
        if is_cast(total) and len(total.users) == 1:
            read, [total] = total, total.users
        if (
            total.target is not aten.add.Tensor
            or total.args[:1] != (read,)
            or len(total.args) != 2
            or total.kwargs
        ):
            return
        _, other = total.args
        value, channel = call.meta["val"], 1 - call.meta["val"].ndim
        if not isinstance(other, fx.Node) or (source := behind(other)) not in self._lift.derived:
            return
        is_packed = call.target in (LINEAR, convolution_op())
        if value.dtype is not torch.float32 and not (is_packed and source in self._lift.shifts):
            return
        shape = other.meta["val"].shape
        is_one_each = numel(other.meta["val"]) == value.shape[1] and len(shape) >= -channel
        if not is_one_each or shape[channel] != value.shape[1] or total.meta["val"].shape != value.shape:
            return
        if self._lift.is_written_between(call, total):
            return
        with self._graph.inserting_before(total):
            is_flat = source.meta["val"].ndim == 1
            bias = source if is_flat else self._lift.call(aten.reshape.default, source, [-1])
            is_exact = is_packed and adds_fp32_bias(value.dtype)
            bias = self._lift.call(aten.to.dtype, bias, torch.float32 if is_exact else value.dtype)
            biased = self._graph.node_copy(call)
            biased.args = (*args[:2], bias, *args[3:])
            result = self._lift.work.cast(biased, total.meta["val"].dtype)
        total.replace_all_uses_with(result)
        for node in dict.fromkeys((total, read, call)):
            self._graph.erase_node(node)

    def _channels(self, call: fx.Node) -> int | None:
        """The dimension of the result's columns in the weight of a convolution, or of a linear that gives a matrix."""
        if call.target is convolution_op():
            return 0
        if call.target in (LINEAR, aten.linear.default):
            return 0 if call.meta["val"].ndim == 2 else None
        if (
            call.target not in CONVOLUTIONS
            or call.kwargs
            or args_of(call)[0].meta["val"].ndim != args_of(call)[1].meta["val"].ndim
        ):
            return None
        given = convolution_settings(call)
        if "output_padding" not in given:
            return 0
        return 1 if given["groups"] == 1 else None

    def _is_from_weights(self, call: fx.Node) -> bool:
        dtype = args_of(call)[1].meta["val"].dtype
        return all(
            arg is None or (arg in self._lift.derived and arg.meta["val"].dtype is dtype)
            for arg in args_of(call)[1:3]
        )

    # ---- what oneDNN packs

    def pack_linear(self, node: fx.Node) -> None:
        """A product of values by a matrix of weights."""
        form = linear_form(node)
        if form is None:
            return
        args: dict[int | None, Any] = dict(enumerate(args_of(node)))
        x, weight, bias = args[form.input], args[form.weight], args.get(form.bias)
        value, matrix = x.meta["val"], weight.meta["val"]
        if weight not in self._lift.derived or not self.packs(value, matrix) or not matrix.numel():
            return
        columns, contracted = matrix.shape if form.by_rows else reversed(matrix.shape)
        if bias is not None and (
            not isinstance(bias, fx.Node)
            or bias.meta["val"].shape != (columns,)
            or bias.meta["val"].dtype is not matrix.dtype
        ):
            return
        if not form.by_rows:
            with self._graph.inserting_before(node):
                weight = self._lift.call(aten.t.default, weight)
        sizes = numel(value) // contracted, columns, contracted
        if is_fixed(x) and is_faster_as_convolution(sizes, matrix.dtype, torch.get_num_threads()):
            with self._graph.inserting_before(node):
                kernel = self._lift.call(aten.view.default, weight, [columns, contracted, 1, 1])
            self.pack_convolution(as_convolution(node, x, kernel, bias))
            return
        # in bf16 oneDNN lays out otherwise for one row with AMX, which gains nothing: decoding and prefill share a copy
        how = packing("linear", torch.Size((columns, contracted)), matrix.dtype, max(2, sizes[0]))
        node.target = LINEAR
        bias = self._in_one_piece(bias, node)
        node.args, node.kwargs = (x, self._lift.take(weight, how), bias, "none", [], ""), {}
        self.take_bias(node)

    def pack_int8(self, node: fx.Node) -> None:
        """A product or convolution of uint8 and a weight in int8, as ``amp_fx.precision.policy.scaled`` writes it."""
        is_convolution = node.target is aten.conv2d.default
        if not (is_convolution or node.target is aten.linear.default) or not onednn_packs(torch.float32):
            return
        first, second, bias, *_ = (*args_of(node), None)
        value, weight = dequantised(first, "tensor"), dequantised(second, "channel")
        if value is None or weight is None:
            return
        x, scale, zero, *_ = args_of(value)
        data, scales, zeros, *_ = args_of(weight)
        if not self._lift.derived.issuperset((data, scales, zeros)):
            return
        dtype, kernel = node.meta["val"].dtype, weight.meta["val"].shape
        with self._graph.inserting_before(node):
            # as oneDNN reads them: Inductor converts constants of a package, and warns
            zeros = self._lift.call(aten.to.dtype, zeros, torch.int32)
        if bias in self._lift.derived:
            # oneDNN wants it in fp32, and would convert it in each call
            with self._graph.inserting_before(node):
                bias = self._lift.in_fp32(bias)
        bias = self._in_one_piece(bias, node)
        if is_convolution and is_wrong(node, torch.int8):
            return
        if is_convolution:
            given = convolution_settings(node)
            window = [given[name] for name in ("stride", "padding", "dilation", "groups")]
            # where sizes are not known, oneDNN packs for any
            sizes = tuple(x.meta["val"].shape) if is_fixed(x) else None
            how = packing("convolution_int8", kernel, torch.int8, scale, zero, *window, sizes)
            node.target, after = convolution_int8_op(), (*window, dtype, is_channels_last(node))
        else:
            rows = max(1, numel(value.meta["val"]) // kernel[1])
            how = packing("linear_int8", kernel, torch.int8, (rows, kernel[1]))
            node.target, after = LINEAR_INT8, (1.0, 0, dtype, "none", [], "")
        packed = self._lift.take(data, how)
        factors = map(self._lift.take, (scales, zeros))
        node.args = (x, scale, zero, packed, *factors, bias, *after)

    def pack_convolution(self, node: fx.Node) -> None:
        """A convolution; one over a line is packed as one over a row."""
        if not convolves(node) or node.kwargs or not self._is_from_weights(node):
            return
        value, kernel = (arg.meta["val"] for arg in args_of(node)[:2])
        if value.ndim != kernel.ndim or not self.packs(value, kernel):
            return
        take_zeros(self._lift, node)
        x, weight, bias, *_ = (*args_of(node), None)
        form, channels_last = packed_form(node), is_channels_last(node)
        if not form.is_packed:
            return
        if form.is_line:
            with self._graph.inserting_before(node):
                for view, dim in LINES[value.ndim][0]:
                    weight = self._lift.call(view, weight, dim)
        packed = self._lift.take(weight, form.packing(kernel.dtype))
        node.target, bias = convolution_op(), self._in_one_piece(bias, node)
        node.args = (x, packed, bias, *form.args(channels_last=channels_last))
        self.take_bias(node)

    def _in_one_piece(self, bias: fx.Node | None, reader: fx.Node) -> fx.Node | None:
        """A bias as oneDNN reads it, whatever its strides."""
        if bias is None or bias.meta["val"].is_contiguous():
            return bias
        add = self._lift.call if bias in self._lift.derived else self._lift.work
        with self._graph.inserting_before(reader):
            return add(aten.clone.default, bias)

    def packs(self, value: torch.Tensor, weight: torch.Tensor) -> bool:
        """Whether oneDNN packs a weight that multiplies a value."""
        if weight.dtype is torch.float32 and weight.ndim == 2:
            # with one thread it takes less time for one row
            by_mkl = numel(value) == value.shape[-1] and torch.get_num_threads() == 1
            if not self._wide or (by_mkl and torch.backends.mkl.is_available()):
                return False
        return (
            value.device.type == "cpu"
            and value.dtype is weight.dtype
            and onednn_packs(weight.dtype)
            and numel(value) > 0
        )
