"""LSTMs: what their kernel rounds inside is in the prediction."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx._torch import onednn_computes
from amp_fx.instruments.calibration.meter import Meter
from amp_fx.instruments.calibration.recurrent import unroll
from support.models.calibrated import wrong
from support.models.small import Parts
from support.tracing.captured_graphs import known

LENGTH, WIDTH = 40, 32


def sounds(seed: int) -> Tensor:
    return torch.randn(12, LENGTH, 8, generator=torch.Generator().manual_seed(seed))


def slow(**settings: Any) -> Any:
    """An LSTM whose cells forget little, so that they move by less than bf16 can show; and a linear.

    Its weights are in bf16 already: there are few of them, and the chance of their errors would decide.
    """
    torch.manual_seed(0)
    rnn = nn.LSTM(8, WIDTH, batch_first=True, **settings)
    with torch.no_grad():
        for name, value in rnn.named_parameters():
            if name.startswith("bias"):
                value.zero_()
                value[WIDTH : 2 * WIDTH] = 2
            value.copy_(value.bfloat16())
    wide = WIDTH * (1 + rnn.bidirectional)
    return Parts(lambda m, x: m.head(m.rnn(x)[0].mean(1)), rnn=rnn, head=nn.Linear(wide, 16)).eval()


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients_are_those_of_the_op(batch_first: bool, bidirectional: bool, bias: bool) -> None:
    rnn = nn.LSTM(3, 5, 2, bias=bias, batch_first=batch_first, bidirectional=bidirectional).double()
    x = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    rows = 2 if batch_first else 4
    states = [torch.randn(4 if bidirectional else 2, rows, 5).double().requires_grad_() for _ in range(2)]
    weights = [*rnn.parameters()]
    settings = bias, 2, 0.0, False, bidirectional, batch_first
    ours = unroll(Meter(torch.bfloat16, 1.0, of_outputs=True), (0, "a"), x, states, weights, *settings)
    theirs = torch.ops.aten.lstm.input(x, states, weights, *settings)
    torch.testing.assert_close(ours, theirs)
    found, true = (
        torch.autograd.grad(torch.cat([*map(torch.ravel, each)]).sin().sum(), [x, *states, *weights])
        for each in (ours, theirs)
    )
    torch.testing.assert_close(found, true)


@pytest.mark.skipif(not onednn_computes(torch.bfloat16), reason="oneDNN has no LSTM in bf16 for this CPU")
@pytest.mark.parametrize("settings", [{"bidirectional": True}, {"num_layers": 2}], ids=str)
def test_the_error_of_a_compiled_lstm_is_the_predicted_one(settings: dict[str, Any]) -> None:
    model, batches = slow(**settings), [sounds(seed) for seed in range(3)]
    cal = amp_fx.calibrate(model, batches, of="outputs", profile="off")
    torch._dynamo.reset()
    run: Any = torch.compile(model, backend="amp_fx", options={"profile": "off", "strict": True})
    with torch.inference_mode():
        found = fmean(wrong(run(x), model, x) ** 2 for x in batches)
    assert 0.8 <= known(cal, "autocast").error / math.sqrt(found) <= 1.25
