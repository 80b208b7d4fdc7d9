"""Every function that runs a user's model takes a batch in one way."""

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.errors import InputError
from amp_fx.instruments.batches import arguments_of, call_of


class Two(nn.Module):
    def forward(self, x, y=2):
        return x * y


class Pair(nn.Module):
    def forward(self, pair):
        return pair[0] + pair[1]


X = torch.ones(2)


@pytest.mark.parametrize(
    ("program", "batch", "args", "kwargs"),
    [
        (Two(), X, (X,), {}),
        (Two(), (X, 3), (X, 3), {}),
        (Two(), [X, 3], (X, 3), {}),
        (Two(), {"x": X, "y": 3}, (), {"x": X, "y": 3}),
        (Pair(), (X, X), ((X, X),), {}),
        (Pair(), {"first": X}, ({"first": X},), {}),
        (torch.sin, (X,), (X,), {}),  # has no signature
    ],
)
def test_a_batch_is_taken_apart_where_the_program_takes_its_parts(program, batch, args, kwargs):
    assert call_of(program, batch) == (args, kwargs)
    assert arguments_of(program, (batch,), {}) == (args, kwargs)
    # what is no batch stays as it is
    assert arguments_of(Two(), (X, 3), {}) == ((X, 3), {})
    assert arguments_of(Two(), (X,), {"y": 3}) == ((X,), {"y": 3})


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, targets):
        return (self.layer(x) - targets).square().mean()


@pytest.mark.parametrize("call", ["explain", "histogram", "calibrate", "export"])
def test_all_say_what_is_wrong_with_a_batch(call):
    for batch in (torch.ones(2, 4), (torch.ones(2, 4), 1, 2), {"x": torch.ones(2, 4), "target": 1}):
        with pytest.raises(InputError, match="targets"):
            getattr(amp_fx, call)(Mean(), batch)


def test_explain_and_export_take_a_batch():
    batch = (torch.ones(2, 4), torch.ones(2, 4))
    whole, taken_apart = amp_fx.explain(Mean(), batch), amp_fx.explain(Mean(), *batch)
    assert [len(plan.nodes) for plan in whole.plans] == [len(plan.nodes) for plan in taken_apart.plans]
    program = amp_fx.export(Mean(), {"x": batch[0], "targets": batch[1]})
    assert program.module()(x=batch[0], targets=batch[1]).dtype is torch.float32
