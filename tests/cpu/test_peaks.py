"""What a training step and a comparison hold at their peak, by the allocator's count."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import amp_fx
from benchmarks.memory import allocated_peak
from support.models.small import GPT, tokens
from support.models.spoiled_by_low_dtypes import OFF

pytestmark = pytest.mark.slow


def test_a_step_with_attention_by_products_in_blocks_holds_little_more_than_with_the_kernel() -> None:
    torch.manual_seed(0)
    net, ids = GPT(layers=2, width=128, heads=4, vocab=128, length=256), torch.randint(128, (4, 257))
    peaks: list[int] = []
    for how in ("products", "flash"):
        rule = {"op": "scaled_dot_product_attention", "precision": "low", "implementation": how}
        options: Any = {"policy": {"rules": [rule]}, "profile": "off"}
        compiled: Any = torch.compile(net, backend="amp_fx", options=options, dynamic=False)

        def step(model: Any = compiled) -> None:
            model(ids[:, :-1], ids[:, 1:]).backward()

        step()
        peaks.append(allocated_peak(step))
    # a block of heads has three values of each score; Inductor has several blocks at once. In one block it is 1.7
    assert peaks[0] <= 1.4 * peaks[1]


def test_it_holds_at_most_half_as_much_again_as_a_training_step_in_fp32(without_inductor: None) -> None:
    model, batch = GPT(layers=2, width=128, heads=4, length=128), tokens(0, 8, 128)
    amp_fx.compare(model, *batch, loss=None, options=OFF)
    ours = allocated_peak(lambda: amp_fx.compare(model, *batch, loss=None, options=OFF))
    theirs = allocated_peak(lambda: model(*batch).backward())
    # a compiled step in bf16 holds two thirds of that
    assert ours <= 1.5 * theirs
