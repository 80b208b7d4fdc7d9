"""What attention rounds inside: sensitivity beside gradients computed by hand with those roundings, in fp64."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from amp_fx.calibration.meter import Meter
from amp_fx.calibration.operands import attend
from amp_fx.plans.sensitivity import INSIDE, PROBABILITIES, RESULT, SCORES, as_number
from small_models import Parts

ROWS, HEADS, LENGTH, SIZE = 4, 2, 16, 8
WIDTH = HEADS * SIZE


def low(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).to(x.dtype)


class FusedAttention(torch.autograd.Function):
    """Causal attention as fused kernels compute it, with one kind of rounding."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rounded: str) -> Tensor:
        hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
        p = (q @ k.mT / math.sqrt(SIZE)).masked_fill(hidden, -math.inf).softmax(-1)
        read = low(p) if rounded == PROBABILITIES else p
        result = read @ v
        ctx.rounded = rounded
        ctx.save_for_backward(q, k, v, p, read, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (gradient,) = gradients
        q, k, v, p, read, result = ctx.saved_tensors
        stored = low(result) if ctx.rounded == RESULT else result
        scores = p * (gradient @ v.mT - (gradient * stored).sum(-1, keepdim=True))
        if ctx.rounded == SCORES:
            scores = low(scores)
        scores = scores / math.sqrt(SIZE)
        return scores @ k, scores.mT @ q, read.mT @ gradient, None


class Attention(nn.Module):
    """Attention between linears; ``rounded`` names what is rounded in it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 1)
        self.rounded: str | None = None
        nn.init.normal_(self.qkv.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).view(ROWS, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        if self.rounded is None:
            a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            a: Any = FusedAttention.apply(q, k, v, self.rounded)
        return self.out(a.transpose(1, 2).reshape(ROWS, LENGTH, WIDTH)).tanh().square().mean()


def error(model: Attention, x: Tensor, rounded: str) -> float:
    """Relative error of the gradient of all parameters."""
    found: list[Tensor] = []
    for kind in ("", rounded):
        wide = copy.deepcopy(model).double()
        wide.rounded = kind
        wide(x.double()).backward()
        found.append(torch.cat([p.grad.flatten() for p in wide.parameters() if p.grad is not None]))
    return ((found[1] - found[0]).norm() / found[0].norm()).item()


@pytest.mark.parametrize("slot", [PROBABILITIES, SCORES, RESULT])
def test_the_sensitivity_of_roundings_inside_attention_is_that_of_a_kernel_that_does_them(slot: str) -> None:
    torch.manual_seed(0)
    model, batches = Attention(), [torch.randn(ROWS, LENGTH, WIDTH) for _ in range(4)]
    cal = amp_fx.calibrate(model, batches, profile="off", probes=4)
    (graph,) = cal.sensitivity.graphs
    row = next(row for row in graph.calls if "scaled_dot_product" in row.name)
    sensitivity = as_number(row.reads[slot].value) + as_number(row.reads[slot].gradient)
    true = math.sqrt(sum(error(model, x, slot) ** 2 for x in batches) / len(batches))
    assert true > 1e-5
    assert 0.75 <= math.sqrt(sensitivity) / true <= 1.33


KEEP = torch.ones(5, 7, dtype=torch.bool).tril()


@pytest.mark.parametrize(
    "settings",
    [
        {"is_causal": True},
        {"attn_mask": KEEP},
        {"attn_mask": KEEP & (torch.arange(5)[:, None] > 0)},
        {"attn_mask": torch.randn(2, 1, 5, 7)},
        {"scale": 0.3},
    ],
    ids=["causal", "boolean mask", "a row without anything", "additive mask", "scale"],
)
@pytest.mark.parametrize("heads", [4, 2])
def test_values_and_gradients_are_those_of_the_op(settings: dict[str, Any], heads: int) -> None:
    q, k, v = (torch.randn(2, h, n, 4, requires_grad=True) for h, n in ((4, 5), (heads, 7), (heads, 7)))
    shared = {**settings, "enable_gqa": heads < 4}
    meter = Meter(torch.bfloat16, 1.0)
    ours, theirs = (
        attend(meter, (0, "a"), q, k, v, **shared),
        F.scaled_dot_product_attention(q, k, v, **shared),
    )
    torch.testing.assert_close(ours, theirs)
    found, true = (torch.autograd.grad(each.sin().sum(), [q, k, v]) for each in (ours, theirs))
    torch.testing.assert_close(found, true)


def test_with_dropout_on_a_cpu_scores_and_the_gradient_of_probabilities_are_rounded_instead() -> None:
    def slots(dropout: float) -> dict[str, tuple[bool, bool]]:
        def program(m: Any, x: Tensor) -> Tensor:
            q, k, v = m.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).tanh().square().mean()

        cal = amp_fx.calibrate(Parts(program, qkv=nn.Linear(8, 24)), torch.randn(2, 5, 8), profile="off")
        (graph,) = cal.sensitivity.graphs
        row = next(row for row in graph.calls if "scaled_dot_product" in row.name)
        return {
            slot: (bool(row.reads[slot].value), bool(row.reads[slot].gradient))
            for slot in row.reads
            if slot in INSIDE
        }

    assert slots(0.0) == {PROBABILITIES: (True, False), SCORES: (False, True), RESULT: (True, False)}
    assert slots(0.2) == {PROBABILITIES: (True, True), SCORES: (True, True)}
