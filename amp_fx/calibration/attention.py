"""Attention with an eye on what its low kernels round inside, where no graph shows it.

Fused kernels, FlashAttention and PyTorch's own for CPU, keep scores and sums in fp32, but feed low operands to the
matmuls inside:

1. the probabilities, to that with the values, forward and backward.
2. the gradient of the scores, to those with queries and keys.
3. Their backward takes the sum of a row of ``gradient of probability * probability`` from what it is equal to, the sum
   of ``gradient of result * result``, and reads the result as it was stored.

With dropout there is no such kernel for CPU. Then each matmul inside is one of its own:

4. it rounds the scores, and the gradient of the probabilities.
"""

from __future__ import annotations

import math

import torch
import torch.fx as fx
from torch import Tensor

from amp_fx.calibration.meter import Meter
from amp_fx.plans.sensitivity import PROBABILITIES, RESULT, SCORES

__all__ = ["attend", "is_attention"]


def is_attention(node: fx.Node) -> bool:
    """True for the attention that :func:`attend` computes."""
    return node.target is torch.ops.aten.scaled_dot_product_attention.default


def attend(
    meter: Meter,
    call: tuple[int, str],
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
    """``aten.scaled_dot_product_attention`` that can be differentiated twice.

    Args:
        meter: of the step.
        call: number of the graph, name of the call.
        query: (..., heads, queries, size).
        key: (..., heads, keys, size).
        value: (..., heads, keys, size of a result).
        attn_mask: of the scores' shape or one that broadcasts; True where a key is read, or added to the scores.
        dropout_p: share of the probabilities that are dropped.
        is_causal: a query reads no later key.
        scale: of the scores; None: ``1 / sqrt(size)``.
        enable_gqa: several heads of queries share a head of keys.
    """
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    # the smaller factor is scaled: whatever has the size of the scores is kept several times for two derivatives
    scaled = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        shape = query.shape[-2], key.shape[-2]
        attn_mask = torch.ones(shape, dtype=torch.bool, device=query.device).tril()
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        hidden = torch.zeros(attn_mask.shape, dtype=query.dtype, device=query.device)
        attn_mask = hidden.masked_fill_(attn_mask.logical_not(), -math.inf)
    scores = scaled @ key.transpose(-2, -1)
    if attn_mask is not None:
        scores = scores + attn_mask
    if not scores.requires_grad:
        return torch.dropout(_softmax(scores), dropout_p, True) @ value
    scores = scores.view_as(scores)
    probabilities = _softmax(scores)
    read = torch.dropout(probabilities, dropout_p, True)
    read = read.view_as(read)
    result = read @ value
    meter.watch_value(read, (*call, PROBABILITIES))
    meter.watch_gradient(scores, (*call, SCORES))
    if dropout_p and scores.device.type == "cpu":
        meter.watch_gradient(read, (*call, PROBABILITIES))
        meter.watch_value(scores, (*call, SCORES))
    else:
        _watch_stored(meter, (*call, RESULT), scores, probabilities.detach(), result)
    return result


def _softmax(scores: Tensor) -> Tensor:
    """Zero, as in the fused kernels, in rows where everything is masked."""
    return torch.ops.aten._safe_softmax.default(scores, -1)


def _watch_stored(
    meter: Meter, key: tuple[int, str, str], scores: Tensor, probabilities: Tensor, result: Tensor
) -> None:
    """Case 3: an error d of the result changes the gradient of the scores by ``-probability * sum(gradient * d)``."""
    error, stride = meter.rounding(result)
    gradients: list[Tensor] = []

    def keep(gradient: Tensor) -> None:
        if meter.phase == 1:
            gradients.append(gradient.detach())

    def watch(gradient: Tensor) -> Tensor | None:
        if meter.phase != 1 or not gradient.requires_grad:
            return None
        alias = gradient.view_as(gradient)
        alias.register_hook(add)
        return alias

    def add(second: Tensor) -> None:
        row = (second.detach() * probabilities).sum(-1, keepdim=True)
        meter.add(meter.values, key, row * gradients[0], error, stride)

    result.register_hook(keep)
    scores.register_hook(watch)
