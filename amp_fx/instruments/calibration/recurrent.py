"""LSTMs written out, with the roundings that their kernel does inside.

oneDNN's kernel, for a CPU in bf16, computes sums, gates and new states in fp32. In each layer and direction it rounds

1. the sum of two biases that were rounded,
2. the hidden state of each step, for the next step, the next layer and the result,
3. the cell state, on its way to the next step; the hidden state is computed before.

A cell state that moves by less than half of the distance between two low numbers stays where it is, step for step.
These errors have one sign, which errors of exact states would not have: states are rounded in every step to find the
errors, and errors of one element are added up over time, each with the gradient there, before the sum is squared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from amp_fx.instruments.calibration.meter import Key, Meter
from amp_fx.instruments.calibration.ranges import CallId
from amp_fx.precision.plans.sensitivity import STATES


def is_written_out(
    x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool, layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> bool:  # fmt: skip
    """Whether :func:`unroll` computes a call of ``aten.lstm.input``: it drops nothing, and projects nothing."""
    return len(weights) == layers * (1 + bidirectional) * (4 if has_biases else 2) and not (train and dropout)


def unroll(
    meter: Meter, call_id: CallId, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], has_biases: bool,
    layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """``aten.lstm.input`` that tells the meter, under the slot ``STATES``, what roundings inside of it do.

    Returns all hidden states of the last layer, and the last hidden and cell states of each layer and direction.
    """
    key, sides = (*call_id, STATES), 1 + bidirectional
    hidden, cells, each = [], [], len(weights) // (layers * sides)
    x = x.transpose(0, 1) if batch_first else x
    for layer in range(layers):
        found = []
        for side in range(sides):
            at = layer * sides + side
            of_input, of_hidden, *biases = weights[at * each : (at + 1) * each]
            gates = linear(x.flip(0) if side else x, of_input)
            if biases:
                gates = gates + _added(meter, key, *biases)
            y, cell = _Layer.apply(gates, of_hidden, states[0][at], states[1][at], meter, key)  # type: ignore[no-untyped-call]
            hidden.append(y[-1])
            cells.append(cell)
            found.append(y.flip(0) if side else y)
        x = torch.cat(found, -1) if bidirectional else found[0]
    return x.transpose(0, 1) if batch_first else x, torch.stack(hidden), torch.stack(cells)


def _added(meter: Meter, key: Key, one: Tensor, other: Tensor) -> Tensor:
    """Case 1. Each of the two is rounded elsewhere."""
    total = one + other
    rounded = [each.detach().to(meter.low).to(each.dtype) for each in (one, other)]
    meter.weigh(total, meter.values, key, *meter.rounding(rounded[0] + rounded[1]))
    return total


def _step(gates: Tensor, of_hidden: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The states after a step, and its gates: input, forget, cell, output."""
    i, f, g, o = torch.addmm(gates, h, of_hidden.mT).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    c = f * c + i * g
    return o * c.tanh(), c, torch.stack((i, f, g, o))


class _Layer(torch.autograd.Function):
    """All steps of a layer in one direction; its backward has the gradient of every state, for cases 2 and 3.

    Reads what each step adds to the gates, ``[time, batch, 4 * size]``, the weight of the hidden state and the two
    first states; returns the hidden states, ``[time, batch, size]``, and the last cell state.
    """

    @staticmethod
    def forward(
        ctx: Any, gates: Tensor, of_hidden: Tensor, h: Tensor, c: Tensor, meter: Meter, key: Key
    ) -> tuple[Tensor, Tensor]:
        low_h, low_c = h, c
        hidden, cells, steps, errors = [h], [c], [], []
        for given in gates:
            h, c, step = _step(given, of_hidden, h, c)
            hidden.append(h)
            cells.append(c)
            steps.append(step)
            exact = _step(given, of_hidden, low_h, low_c)[:2]
            low_h, low_c = (each.to(meter.low).to(each.dtype) for each in exact)
            errors.append(torch.stack([low_h - exact[0], low_c - exact[1]]).to(torch.bfloat16))
        ctx.save_for_backward(of_hidden, *map(torch.stack, (hidden, cells, steps, errors)))
        ctx.meter, ctx.key = meter, key
        return torch.stack(hidden[1:]), c

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        of_hidden, hidden, cells, steps, errors = ctx.saved_tensors
        of_results, of_c = gradients
        of_h, changes, of_gates = torch.zeros_like(of_c), torch.zeros_like(errors[0]).float(), []
        for at in reversed(range(len(steps))):
            i, f, g, o = steps[at]
            of_h = of_h + of_results[at]
            changes += torch.stack([of_h, of_c]) * errors[at]
            curved = cells[at + 1].tanh()
            of_c = of_c + of_h * o * (1 - curved.square())
            parts = of_c * g * i * (1 - i), of_c * cells[at] * f * (1 - f)
            parts += of_c * i * (1 - g.square()), of_h * curved * o * (1 - o)
            of_gates.append(torch.cat(parts, -1))
            of_h, of_c = of_gates[-1] @ of_hidden, of_c * f
        if ctx.meter.phase == 2:
            whole = changes.flatten()
            ctx.meter.add(ctx.meter.values, ctx.key, whole, torch.ones_like(whole), 1)
        by_step = torch.stack(of_gates[::-1])
        of_weight = by_step.flatten(0, 1).mT @ hidden[:-1].flatten(0, 1)
        return by_step, of_weight, of_h, of_c, None, None
