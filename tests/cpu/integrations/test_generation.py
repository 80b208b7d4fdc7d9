"""``generate`` of transformers on a model that is compiled in place: tokens, graphs, low copies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

import amp_fx
from examples import hugging_face
from holding import Held

LOW: dict[str, Any] = {"profile": "off", "dtype": "bfloat16"}


def llama(layers: int = 1) -> Any:
    # in sizes that oneDNN does not pad
    return hugging_face.llama(
        layers=layers, width=64, heads=4, kv_heads=2, hidden=256, vocab=128, length=64
    ).eval()


def low_bytes(models: Sequence[nn.Module]) -> int:
    """One low copy of every parameter."""
    return sum(2 * p.numel() for model in models for p in model.parameters())


def prompt(length: int) -> torch.Tensor:
    return torch.randint(1, 32, (1, length), generator=torch.Generator().manual_seed(length))


def greedy(new: int, **settings: Any) -> dict[str, Any]:
    return {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0, **settings}


@pytest.mark.slow
def test_generation_is_low_and_the_second_call_compiles_nothing() -> None:
    model, settings = llama(), greedy(6, use_cache=True)
    eager = model.generate(prompt(4), **settings)
    model.compile(backend="amp_fx", options=LOW)
    with amp_fx.record() as recording:
        compiled = model.generate(prompt(4), **settings)
        plans = len(recording.plans)
        again = model.generate(prompt(4), **settings)
    assert compiled.shape == eager.shape == (1, 10)
    assert torch.equal(compiled, again)
    assert torch.bfloat16 in {node.dtype for plan in recording.plans for node in plan.nodes}
    # prefill, the first decode step, and one for all lengths
    assert plans <= 3
    assert len(recording.plans) == plans


@pytest.mark.slow
def test_with_a_static_cache_prefill_and_decoding_of_any_length_share_low_weights() -> None:
    held, model = Held(), llama()
    model.forward = torch.compile(model.forward, backend="amp_fx", options=LOW)
    with torch.inference_mode(), amp_fx.record() as recording:
        for length in (7, 9, 12):
            found = model.generate(prompt(length), **greedy(6, cache_implementation="static", use_cache=True))
            assert found.shape == (1, length + 6)
    # as stock Inductor: prefill and decoding for one length, and both for any
    assert len(recording.plans) <= 4
    assert 0.9 * low_bytes([model]) <= held.bytes() <= 1.1 * low_bytes([model])


@pytest.mark.slow
def test_speculative_decoding_has_low_weights_of_both_models_once() -> None:
    held, model, assistant = Held(), llama(2), llama(1)
    for each in (model, assistant):
        each.forward = torch.compile(each.forward, backend="amp_fx", options=LOW)
    settings = greedy(8, assistant_model=assistant, use_cache=True)
    with torch.inference_mode(), amp_fx.record() as recording:
        found = model.generate(prompt(6), **settings)
        plans = len(recording.plans)
        assert torch.equal(model.generate(prompt(6), **settings), found)
    assert found.shape == (1, 14)
    assert len(recording.plans) == plans
    once = low_bytes([model, assistant])
    assert 0.9 * once <= held.bytes() <= 1.1 * once
