"""The mean that rounding a weight moves is taken back by the bias that a folded norm leaves: it costs nothing.

A weight ``W`` that is rounded to ``Q`` moves the mean of each result by ``(Q - W) @ E[x]``, and behind a relu ``E[x]``
is not zero. The norm before says what it is, without any data: its results have its shift as mean and its scale as
standard deviation, if its statistics are those of the data; of these, the activation between makes others. Nagel et
al., Data-Free Quantization Through Weight Equalization and Bias Correction, https://arxiv.org/abs/1906.04721.

Before, where ``norm`` follows a convolution of ``relu(norm_0(...))``::

    shift = bias - mean * factor

After::

    moments = activation_moments(norm_moments(scale_0, shift_0, mean_0, variance_0), aten.relu.default)
    shift = bias - mean * factor + moved_mean(weight, weight_bf16, moments, groups)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor

from amp_fx.graphs.calls import args_of, argument_value, is_cast
from amp_fx.graphs.values import is_eligible, storage_of
from amp_fx.runtime.weights.lift import Lift

aten = torch.ops.aten

#: of one value, so that moments of the result follow from moments of the argument: each op, in place or not, and the
#: op that writes to nothing
_ACTIVATIONS = {
    getattr(aten, name + written).default: getattr(aten, name).default
    for name in (
        "relu", "relu6", "hardtanh", "clamp", "silu", "hardswish", "leaky_relu", "elu", "gelu", "mish", "tanh",
        "sigmoid",
    )
    for written in ("", "_")
    if hasattr(aten, name + written)
}  # fmt: skip
#: the borders are a small part of an image
_PADS = frozenset((aten.pad.default, aten.constant_pad_nd.default))
_ADDS = frozenset((aten.add.Tensor, aten.add_.Tensor))
#: standard deviations on each side, and points, of sums in place of integrals over a Gaussian
_REACH, _POINTS = 6.0, 241


def norm_moments(scale: Tensor | None, shift: Tensor | None, mean: Tensor, variance: Tensor) -> Tensor:
    """Mean and standard deviation of each channel behind a norm, ``[2, channels]``.

    NaN where its statistics are those of a new module: nobody has measured them.
    """
    middle = torch.zeros_like(mean) if shift is None else shift
    width = torch.ones_like(mean) if scale is None else scale.abs()
    is_new = (mean == 0).all() & (variance == 1).all()
    return torch.where(is_new, torch.nan, torch.stack([middle, width]).float())


def activation_moments(moments: Tensor, activation: Callable[..., Tensor], *more: Any) -> Tensor:
    """Moments, ``[2, channels]``, of an activation of values that are taken for Gaussian."""
    z = torch.linspace(-_REACH, _REACH, _POINTS, device=moments.device)
    weight = (-z.square() / 2).exp()
    weight /= weight.sum()
    values = activation(moments[0, :, None] + moments[1, :, None] * z, *more)
    mean = values @ weight
    return torch.stack([mean, ((values - mean[:, None]).square() @ weight).sqrt()])


def sum_moments(first: Tensor, second: Tensor) -> Tensor:
    """Moments, ``[2, channels]``, of the sum of two values that are taken for independent."""
    return torch.stack([first[0] + second[0], torch.hypot(first[1], second[1])])


def moved_mean(weight: Tensor, rounded: Tensor, moments: Tensor, groups: int) -> Tensor:
    """The part of each result's mean that rounding takes away, ``[results]``, fp32; zero where nothing is known.

    Args:
        weight: ``[results, channels / groups, *window]``, fp32.
        rounded: the weight in the low dtype.
        moments: ``[2, channels]``, of the values that the weight multiplies.
        groups: of the convolution; 1 for a product.
    """
    apart = weight - rounded.float()
    if apart.ndim > 2:
        apart = apart.sum([*range(2, apart.ndim)])
    mean = moments[0].view(groups, -1).repeat_interleave(weight.shape[0] // groups, 0)
    moved = (apart * mean).sum(1)
    return torch.where(moved.isfinite(), moved, 0.0)


class Moments:
    """Moments of values, by the norms that they come from.

    Args:
        lift: the graph.
    """

    def __init__(self, lift: Lift) -> None:
        self._lift = lift
        self._folded: dict[fx.Node, tuple[tuple[Any, ...], int | None]] = {}
        self._found: dict[fx.Node, fx.Node | None] = {}

    def fold(self, norm: fx.Node, result: fx.Node) -> None:
        """A norm is gone, and ``result`` is in its place."""
        self._folded[result] = args_of(norm)[1:5], storage_of(norm)

    def of(self, node: Any, at: fx.Node) -> fx.Node | None:
        """The moments of a value as a node reads it, a call on weights alone; None where they are not known."""
        if not isinstance(node, fx.Node):
            return None
        norm, place = self._folded.get(node, (None, storage_of(node)))
        if any(node < each < at for each in self._lift.writers.get(place, ()) if each is not node):
            return None
        if node not in self._found:
            self._found[node] = self._of(node, norm)
        return self._found[node]

    def _of(self, node: fx.Node, norm: tuple[Any, ...] | None) -> fx.Node | None:
        if node.target is aten.batch_norm.default and not argument_value(node, "training"):
            norm = args_of(node)[1:5]
        if norm is not None:
            is_known = (
                all(value is None or value in self._lift.derived for value in norm) and norm[2] is not None
            )
            return self._lift.call(norm_moments, *norm) if is_known else None
        if node.op != "call_function" or not node.args:
            return None
        value, before = node.meta.get("val"), self.of(node.args[0], node)
        if before is None or not is_eligible(value) or value.shape[1] != before.meta["val"].shape[1]:
            return None
        if is_cast(node) or (node.target in _PADS and _is_at_borders(node)):
            return before
        if (op := _ACTIVATIONS.get(node.target)) is not None and not node.kwargs:
            return self._lift.call(activation_moments, before, op, *node.args[1:])
        if node.target not in _ADDS or node.kwargs or (other := self.of(node.args[1], node)) is None:
            return None
        # a value that is broadcast has other channels
        shapes = [each.meta["val"].shape for each in node.all_input_nodes]
        return (
            self._lift.call(sum_moments, before, other)
            if all(each == value.shape for each in shapes)
            else None
        )


def _is_at_borders(pad: fx.Node) -> bool:
    """True where a pad puts zeros, or elements of the value, around each channel."""
    shape, (_, sizes, *how) = pad.meta["val"].shape, args_of(pad)
    return len(sizes) <= 2 * (len(shape) - 2) and all(isinstance(each, str) or not each for each in how)
