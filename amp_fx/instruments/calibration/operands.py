"""Matmuls of which every operand is observed: inside attention, where no graph shows them, and below 16 bits.

Fused kernels of attention, FlashAttention and PyTorch's own for CPU, keep scores and sums in fp32. What is low:

1. the probabilities, on their way to the matmul with the values, forward and backward,
2. the gradient of the scores, on its way to those with queries and keys,
3. the result as it was stored: the backward takes the sum of a row of ``gradient of probability * probability`` from
   what it is equal to, the sum of ``gradient of result * result``,
4. with dropout, for which CPUs have no such kernel, also the scores and the gradient of the probabilities.

A linear has three matmuls, and below 16 bits each has copies of its own, scaled along what it contracts. So the input
and the weight have an alias each for forward and backward, and the gradient of the result has one for each of the two
matmuls that read it: one double backward gives the sensitivity of all six.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from amp_fx.instruments.calibration.equalising import Way, divisors
from amp_fx.instruments.calibration.meter import Meter
from amp_fx.instruments.calibration.ranges import CallId, requantised, sample_stride, sampled
from amp_fx.precision.plans.sensitivity import MEASURED, PROBABILITIES, RESULT, SCORES
from amp_fx.precision.policy.levels import FORWARD, INPUT, WEIGHT, Level, Scale
from amp_fx.precision.policy.scaled import run, scale_of, scaled

#: an image in colours with opacity has four
_FEW_CHANNELS = 4
#: bytes of all windows
_MOST_WINDOWS = 2**26


def attend(
    meter: Meter,
    call_id: CallId,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``aten.scaled_dot_product_attention`` that can be differentiated twice."""
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    # the smaller factor is scaled: whatever has the size of the scores is kept several times for two derivatives
    query = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        shape = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        hidden = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = hidden.masked_fill_(attn_mask.logical_not(), -math.inf)
    scores = query @ key.transpose(-2, -1)
    if attn_mask is not None:
        scores = scores + attn_mask
    if not scores.requires_grad:
        return torch.dropout(_softmax(scores), dropout_p, True) @ value
    scores = scores.view_as(scores)
    probabilities = _softmax(scores)
    read = torch.dropout(probabilities, dropout_p, True)
    read = read.view_as(read)
    result = read @ value
    meter.observe_value(read, (*call_id, PROBABILITIES))
    meter.observe_gradient(scores, (*call_id, SCORES))
    if dropout_p and scores.device.type == "cpu":
        meter.observe_gradient(read, (*call_id, PROBABILITIES))
        meter.observe_value(scores, (*call_id, SCORES))
    else:
        _observe_stored(meter, call_id, scores, probabilities.detach(), result)
    return result


def _softmax(scores: Tensor) -> Tensor:
    """Zero, as in the fused kernels, in rows where everything is masked."""
    return torch.ops.aten._safe_softmax.default(scores, -1)


def _observe_stored(
    meter: Meter, call_id: CallId, scores: Tensor, probabilities: Tensor, result: Tensor
) -> None:
    """Case 3: an error d of the result changes the gradient of the scores by ``-probability * sum(gradient * d)``."""
    error, stride = meter.rounding(result)
    gradients: list[Tensor] = []

    def keep(gradient: Tensor) -> None:
        if meter.phase == 1:
            gradients.append(gradient.detach())

    def add(second: Tensor) -> None:
        row = (second.detach() * probabilities).sum(-1, keepdim=True)
        meter.add(meter.values, (*call_id, RESULT), row * gradients[0], error, stride)

    result.register_hook(keep)
    meter.with_gradient(scores, lambda alias: alias.register_hook(add))


def multiply(meter: Meter, call_id: CallId, x: Tensor, weight: Tensor, *, by_rows: bool) -> Tensor:
    """``x @ weight.T`` if the rows of the weight are contracted, else ``x @ weight``; can be differentiated twice."""
    if call_id in meter.ways:
        x_here, weight_here = _read_in_ways(meter, call_id, x, weight, by_rows=by_rows)
    else:
        x_here = _observed(meter, call_id, x, FORWARD, "input", in_rows=True)
        weight_here = _observed(meter, call_id, weight, FORWARD, "weight", in_rows=by_rows)
    if meter.of_outputs:
        return x_here @ (weight_here.mT if by_rows else weight_here)
    x_back = _observed(meter, call_id, x, WEIGHT, "input", in_rows=False)
    weight_back = _observed(meter, call_id, weight, INPUT, "weight", in_rows=not by_rows)
    return _Product.apply(x_here, weight_here, x_back, weight_back, (meter, call_id), by_rows)  # type: ignore[no-any-return]


def convolve(
    meter: Meter, call_id: CallId, x: Tensor, weight: Tensor, read_by_all: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The operands of a convolution: a value by one scale, a weight by one for each channel of the result.

    ``read_by_all``: the value where others read it, too, as the convolution does.
    """
    x, rows = x.view_as(x), weight.flatten(1)
    read = x if read_by_all is None else read_by_all
    rows = rows.view_as(rows)
    try_measured(meter, call_id, read, 0, meter.ways[call_id][0])
    _try_scaled(meter, call_id, rows, "weight", 0, (), in_rows=True)
    return x, rows.view_as(weight)


def convolve_first(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """``aten.conv2d``; on a CPU of an image in patches, or of a sound, as a product of the weight and all windows.

    Training does not ask for the gradient of such a value. Forward and backward together took 58 ms as a product and
    1281 by oneDNN for 16 sounds of 1,532 samples and 1,024 windows of 512, 24 and 63 for 8 images in patches of 16 x 16
    (fp32, a Xeon with AMX, two threads, torch 2.13); where windows overlap in both directions, oneDNN is faster.
    Windows are kept for the backward: where they take more than 64 MB, the convolution stays.
    """
    steps, pads, gaps = ((each[0], each[-1]) for each in (stride, padding, dilation))
    if x.dim() == 4 and x.device.type == "cpu" and x.requires_grad and groups == 1 and max(steps) > 1:
        window = weight.shape[2], weight.shape[3]
        places = [
            (size + 2 * pad - gap * (kernel - 1) - 1) // step + 1
            for size, kernel, step, pad, gap in zip(x.shape[2:], window, steps, pads, gaps, strict=True)
        ]
        size = len(x) * math.prod(places) * math.prod(weight.shape[1:]) * x.element_size()
        apart = steps[0] >= window[0] and steps[1] >= window[1]
        if (apart or min(window) == 1) and x.shape[1] <= _FEW_CHANNELS and size <= _MOST_WINDOWS:
            windows = torch.nn.functional.unfold(x, window, dilation=gaps, padding=pads, stride=steps)
            result = (weight.flatten(1) @ windows).unflatten(-1, places)
            return result if bias is None else result + bias[:, None, None]
    return torch.ops.aten.conv2d.default(x, weight, bias, stride, padding, dilation, groups)


def _read_in_ways(
    meter: Meter, call_id: CallId, x: Tensor, weight: Tensor, *, by_rows: bool
) -> tuple[Tensor, Tensor]:
    """The operands of a product, and what each way to read them costs."""
    x, weight = x.view_as(x), weight.view_as(weight)
    for at, way in enumerate(meter.ways[call_id]):
        _try_scaled(meter, call_id, x, "input", at, way.exponents, in_rows=True)
        _try_scaled(
            meter, call_id, weight, "weight", at, tuple(-each for each in way.exponents), in_rows=by_rows
        )
        try_measured(meter, call_id, x, at, way)
    return x, weight


def _try_scaled(
    meter: Meter,
    call_id: CallId,
    alias: Tensor,
    operand: str,
    at: int,
    divided: tuple[int, ...],
    *,
    in_rows: bool,
) -> None:
    """Observes what a copy costs by scales that are found in it, once its channels are divided."""
    assert meter.level is not None
    error, stride = scaled_error(alias, meter.level.dtype, meter.level, in_rows=in_rows, divided=divided)
    meter.weigh(alias, meter.tried, (*call_id, operand, at), error, stride)


def try_measured(meter: Meter, call_id: CallId, alias: Tensor, at: int, way: Way) -> None:
    """Observes what a value costs by the scale that was measured for it, once its channels are divided."""
    if way.scale is None:
        return
    (scale, zero), key = way.scale, (*call_id, MEASURED, at)
    value = alias.detach() * divisors(way.exponents, alias)
    read = requantised(value, way.scale)
    error = (read - value) / divisors(way.exponents, alias)
    # few elements saturate, and err by far more than others: each of them counts, and of all others some
    is_beyond = (value < (-zero - 0.5) * scale) | (value > (255.5 - zero) * scale)
    places = is_beyond.flatten().nonzero()[:, 0]
    if len(places):
        meter.weigh(alias, meter.tried, key, error.take(places).to(torch.bfloat16), places)
    stride = sample_stride(alias.shape)
    rounded = sampled(error.masked_fill_(is_beyond, 0.0), stride)
    meter.weigh(alias, meter.tried, key, rounded.to(torch.bfloat16), stride)


class _Product(torch.autograd.Function):
    """The product; its backward reads aliases of its own."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, x_back: Tensor, weight_back: Tensor, of: Any, by_rows: bool
    ) -> Tensor:
        ctx.save_for_backward(x_back, weight_back)
        ctx.of, ctx.by_rows = of, by_rows
        return x @ (weight.mT if by_rows else weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        meter, call = ctx.of
        for_input = for_weight = gradients[0]
        if meter.phase == 1 and gradients[0].requires_grad:
            for_input = _observed(meter, call, gradients[0], INPUT, "gradient", in_rows=True)
            for_weight = _observed(meter, call, gradients[0], WEIGHT, "gradient", in_rows=False)
        rows, outer = x.flatten(0, -2), for_weight.flatten(0, -2)
        of_weight = outer.mT @ rows if ctx.by_rows else rows.mT @ outer
        return for_input @ (weight if ctx.by_rows else weight.mT), of_weight, None, None, None, None


def _observed(
    meter: Meter,
    call_id: CallId,
    value: Tensor,
    role: str,
    operand: str,
    *,
    in_rows: bool,
) -> Tensor:
    """An operand of one matmul, by itself: its gradient tells what a copy of it would cost there."""
    alias, level = value.view_as(value), meter.level
    if level is not None and (role != WEIGHT or level.weight_gradients):
        dtype = level.dtype_of(is_gradient=operand == "gradient")
        error, stride = scaled_error(value, dtype, level, in_rows=in_rows)
        meter.weigh(alias, meter.roles, (*call_id, role, operand), error, stride)
    return alias


def scaled_error(
    value: Tensor, dtype: torch.dtype, level: Level, *, in_rows: bool, divided: tuple[int, ...] = ()
) -> tuple[Tensor, int]:
    """The error of a copy with scales, at elements at equal steps, in bf16; and the size of a step.

    All dimensions but the last are rows. A scale always comes from the whole value. ``in_rows``: rows are contracted,
    which are scaled one by one, or by blocks; else columns. ``divided``: of each contracted channel the exponent of the
    power of two that it is divided by before, or nothing.
    """
    given = value.detach().reshape(-1, value.shape[-1])
    powers = divisors(divided, given)
    matrix = given * (powers if in_rows else powers[:, None]) if divided else given
    stride = sample_stride(value.shape)
    places = torch.arange(0, matrix.numel(), stride, device=matrix.device)
    sample = matrix.reshape(-1)[::stride]
    row, column = places // matrix.shape[1], places % matrix.shape[1]
    if level.scale is Scale.WHOLE:
        largest = matrix.abs().amax().expand(places.shape)
    elif in_rows:
        largest = _largest(matrix, level.block, row, column)
    else:
        largest = _largest(matrix.mT, level.block, column, row)
    # each element beside the largest of those that share its scale: a group of two has the same scale
    pairs = torch.stack([sample, largest], dim=1)
    scale = scale_of(pairs, dtype, [[1]], run, powers=level.powers, is_wide=True)
    data, factors = scaled(pairs, scale, dtype, run)
    error = (data.to(sample.dtype) * factors)[:, 0] - sample
    if divided:
        error = error / powers[column if in_rows else row]
    return error.to(torch.bfloat16), stride


def _largest(matrix: Tensor, block: int | None, row: Tensor, column: Tensor) -> Tensor:
    """The largest magnitude in the row, or in its block, of elements."""
    if block is None:
        return matrix.abs().amax(1)[row]
    # what a block does not divide stays low; its last block is measured as if zeros filled it up
    blocks = torch.nn.functional.pad(matrix, (0, -matrix.shape[1] % block)).unflatten(1, (-1, block))
    return blocks.abs().amax(2)[row, column // block]
