"""Attention with dropout, compiled: forward, backward and what is computed again drop the same probabilities."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LENGTH = 64


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)


def twice(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """As it is, and in a checkpoint."""
    again: Any = checkpoint(attend, query, key, value, use_reentrant=False)
    return attend(query, key, value), again


def test_the_backward_drops_what_the_forward_has_dropped_in_a_checkpoint_too() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, weights = (torch.randn(1, 2, LENGTH, LENGTH, generator=generator) for _ in range(3))
    # for values, the identity: the result is what is left of the probabilities
    operands = [
        query.bfloat16().float(),
        key.bfloat16().float(),
        torch.eye(LENGTH).expand(1, 2, -1, -1).clone(),
    ]
    compiled: Any = torch.compile(twice, backend="amp_fx", options={"profile": "off", "strict": True})
    drawn: list[Tensor] = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        leaves = [operand.clone().requires_grad_() for operand in operands]
        results = compiled(*leaves)
        drawn.append(torch.stack(results).detach() != 0)
        for out in results:
            gradients = torch.autograd.grad((out * weights).sum(), leaves, retain_graph=True)
            exact = [operand.double().requires_grad_() for operand in operands]
            probabilities = (exact[0] @ exact[1].mT / math.sqrt(LENGTH)).softmax(-1)
            wanted = probabilities * (out != 0) / 0.7 @ exact[2]
            for got, right in zip(
                (out, *gradients),
                (wanted, *torch.autograd.grad((wanted * weights).sum(), exact)),
                strict=True,
            ):
                assert (got.double() - right).norm() < 6e-3 * right.norm()
    assert abs(drawn[0].float().mean() - 0.7) < 0.02
    assert drawn[0].equal(drawn[1])
    assert not drawn[0].equal(drawn[2])
    assert not drawn[0][0].equal(drawn[0][1])
