"""Models whose weights are stored low compute what they did before, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_fx import store_low
from examples import hugging_face

TOKENS = torch.arange(12).reshape(2, 6)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return hugging_face.gpt2(layers=1, width=32, heads=2, vocab=48, length=8).eval()


def call(model: nn.Module, mode: Callable[[], Any], **options: Any) -> Tensor:
    torch._dynamo.reset()
    with mode():
        return torch.compile(model, backend="amp_fx", options={"strict": True, **options})(
            TOKENS
        ).logits.clone()


@pytest.mark.parametrize(
    ("mode", "dtype", "weights"),
    [
        (torch.inference_mode, "bfloat16", "auto"),
        (torch.inference_mode, "float16", "cast"),
        (torch.no_grad, "bfloat16", "cast"),
    ],
    ids=["packed", "in fp16", "cast"],
)
def test_a_stored_model_computes_what_it_did(mode: Callable[[], Any], dtype: str, weights: str) -> None:
    options = {"profile": "off", "dtype": dtype, "weights": weights}
    model = gpt()
    wide = copy.deepcopy(model)
    before = call(model, mode, **options)
    found = store_low(model, TOKENS, options=options)
    assert set(found.stored.values()) == {dtype}
    after = call(model, mode, **options)
    assert torch.equal(before, after)
    with torch.no_grad():
        assert not torch.equal(after, wide(TOKENS).logits)
