"""``generate`` of transformers on a model that is compiled in place: tokens, graphs, low copies."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amp_fx
from examples import hugging_face


@pytest.mark.slow
def test_generation_is_low_and_the_second_call_compiles_nothing() -> None:
    model: Any = hugging_face.llama(
        layers=1, width=32, heads=2, kv_heads=1, hidden=32, vocab=32, length=32
    ).eval()
    tokens = torch.tensor([[1, 2, 3, 4]])
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "use_cache": True}
    settings["pad_token_id"] = 0
    eager = model.generate(tokens, **settings)
    model.compile(backend="amp_fx", options={"profile": "off", "dtype": "bfloat16"})
    with amp_fx.record() as recording:
        compiled = model.generate(tokens, **settings)
        plans = len(recording.plans)
        again = model.generate(tokens, **settings)
    assert compiled.shape == eager.shape == (1, 10)
    assert torch.equal(compiled, again)
    assert torch.bfloat16 in {node.dtype for plan in recording.plans for node in plan.nodes}
    # prefill, the first decode step, and one for all lengths
    assert plans <= 3
    assert len(recording.plans) == plans
