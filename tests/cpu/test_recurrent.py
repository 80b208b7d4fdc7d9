"""A tagger with an LSTM, by generated code."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import amp_fx
from support.models.small import Parts
from support.tracing.captured_graphs import plans


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_a_tagger_is_one_graph_for_sentences_of_all_lengths(mode: type[torch.no_grad]) -> None:
    model = Parts(
        lambda m, words: m.head(m.rnn(m.embed(words))[0]),
        embed=nn.Embedding(50, 16),
        rnn=nn.LSTM(16, 24, num_layers=2, bidirectional=True, batch_first=True, dropout=0.3),
        head=nn.Linear(48, 7),
    ).eval()
    compiled = torch.compile(model, backend="amp_fx", fullgraph=True)
    with amp_fx.record() as recording, mode():
        for length in (9, 4, 40):
            words = torch.randint(0, 50, (3, length))
            exact = copy.deepcopy(model).double()(words)
            error = (compiled(words) - exact).norm() / exact.norm()
            assert error < (1e-6 if not recording.plans[-1].casts else 1e-2)
    assert [len(plans(plan, "lstm")) for plan in recording.plans] == [1, 1]
