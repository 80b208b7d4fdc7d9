"""Models whose weights are stored low compute what they did before, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amp_fx import store_low, weights
from examples import hugging_face
from holding import Held

TOKENS = torch.arange(12).reshape(2, 6)


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return hugging_face.gpt2(layers=1, width=32, heads=2, vocab=48, length=8).eval()


def call(model: nn.Module, mode: Callable[[], Any], **options: Any) -> Tensor:
    torch._dynamo.reset()
    with mode():
        return torch.compile(model, backend="amp_fx", options={"strict": True, **options})(TOKENS).logits.clone()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    ("mode", "options"),
    [(torch.inference_mode, {}), (torch.no_grad, {"weights": "cast"})],
    ids=["weights are packed", "weights are cast"],
)
def test_a_stored_model_computes_what_it_did(
    mode: Callable[[], Any], options: dict[str, Any], dtype: str
) -> None:
    options = {"profile": "off", "dtype": dtype, **options}
    model = gpt()
    wide = copy.deepcopy(model)
    before = call(model, mode, **options)
    found = store_low(model, TOKENS, options=options)
    assert set(found.stored.values()) == {dtype}
    after = call(model, mode, **options)
    assert torch.equal(before, after)
    with torch.no_grad():
        assert not torch.equal(after, wide(TOKENS).logits)


def test_the_report_of_what_is_held_is_smaller_by_what_was_stored() -> None:
    model, held = gpt(), Held()
    found = store_low(model, TOKENS, options={"profile": "off"})
    call(model, torch.no_grad, profile="off")
    assert held.bytes() == 0
    assert sum(value.nbytes for value in model.parameters()) == found.bytes_after
    weights.clear()
