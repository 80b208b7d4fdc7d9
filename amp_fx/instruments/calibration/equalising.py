"""The powers of two by which channels of a value are divided, and the weights that it multiplies are multiplied.

In int8 a row of a value shares one scale, or the whole value does: where one channel is ten times the others, these
have three digits less. Dividing the channel by a power of two, and multiplying the weight's by it, changes no product,
and rounds nothing. With ``value`` and ``weight`` the largest magnitudes of a channel, its factor is ``value ** alpha /
weight ** (1 - alpha)``: SmoothQuant, https://arxiv.org/abs/2211.10438. The best ``alpha`` differs by value; here it is
the one of least predicted error in the first batch that has the value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from amp_fx.instruments.calibration.ranges import CallId
from amp_fx.precision.plans.sensitivity import INPUT, MEASURED, WEIGHT
from amp_fx.precision.policy.forms import MOST_EXPONENT, powers_of_two
from amp_fx.precision.policy.scaled import run

#: shares of the value in a channel's factor that are tried
_ALPHAS = (0.3, 0.5, 0.65, 0.8, 0.95)
#: of the squared error without equalisation: less than this is worth a multiplication of the value
_WORTH = 0.8
#: of a value's largest channel: a smaller one counts as that, as its factor has no end
_LEAST_CHANNEL = 1e-5

#: how a value is read where scales are found in each call, and where they were measured
_KINDS = INPUT, MEASURED


@dataclass(frozen=True)
class Way:
    """One way to read the value of a call.

    Attributes:
        exponents: of each channel, or none.
        scale: scale and zero point, if such are measured.
    """

    exponents: tuple[int, ...] = ()
    scale: tuple[float, int] | None = None


#: graph, call, operand, position of the way -> predicted squared error
Tried = Mapping[tuple[int, str, str, int], float]
#: kind of reading, :data:`INPUT` or :data:`MEASURED` -> the way
Chosen = dict[str, Way]


@dataclass
class Channels:
    """A value that products read, over all batches, and its readers.

    Attributes:
        lowest: of each channel, zero or less.
        highest: of each channel, zero or more.
        weights: of each call that reads it, the largest magnitude of each channel of its weight.
    """

    lowest: Tensor
    highest: Tensor
    weights: dict[CallId, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, value: Tensor) -> Channels:
        """No batch yet of a value of such channels."""
        zeros = value.new_zeros(value.shape[-1], dtype=torch.float32)
        return cls(zeros, zeros)

    def observe(self, call_id: CallId, value: Tensor, weight: Tensor) -> None:
        """Adds the value ``[..., channels]`` and the weight ``[columns, channels]`` of a call in one batch."""
        if call_id not in self.weights:
            self.weights[call_id] = weight.detach().abs().amax(0).float()
        matrix = value.reshape(-1, value.shape[-1]).float()
        self.lowest = torch.minimum(self.lowest, matrix.amin(0))
        self.highest = torch.maximum(self.highest, matrix.amax(0))

    def exponents(self) -> list[tuple[int, ...]]:
        """The exponents to try; none for a value or weights that are zero or not finite."""
        value = torch.maximum(-self.lowest, self.highest)
        weight = torch.stack([*self.weights.values()]).amax(0)
        if not all(0 < float(each.max()) < float("inf") for each in (value, weight)):
            return []
        value, weight = (each.clamp_min(_LEAST_CHANNEL * each.max()).log2() for each in (value, weight))
        found = [_settled(alpha * value - (1 - alpha) * weight) for alpha in _ALPHAS]
        return [each for each in dict.fromkeys(found) if any(each)]

    def scale(self, exponents: tuple[int, ...]) -> tuple[float, int]:
        """Scale and zero point of the whole range, once it is divided.

        Nothing in it saturates: of a channel that was divided, the weight multiplies that again.
        """
        factors = divisors(exponents, self.lowest)
        low, high = (self.lowest * factors).min().item(), (self.highest * factors).max().item()
        scale = (high - low) / 255
        return scale, round(-low / scale)


class Products:
    """The values that products read, each with all calls that read it: these divide it alike."""

    def __init__(self) -> None:
        self._values: dict[CallId, Channels] = {}

    def observe(self, call_id: CallId, source: str, value: Tensor, weight: Tensor) -> None:
        """Adds what a call reads in one batch; ``source`` is the name of the value in its graph."""
        if value.numel():
            key = call_id[0], source
            self._values.setdefault(key, Channels.of(value)).observe(call_id, value, weight)

    def ways(self, scales: Mapping[CallId, tuple[float, int]]) -> dict[CallId, list[Way]]:
        """The ways to try for each call: first as it is, with a scale where that was measured."""
        found = {call: [Way(scale=scale)] for call, scale in scales.items()}
        for channels in self._values.values():
            tried = channels.exponents()
            for call in channels.weights:
                has_scale = call in scales
                equalised = [Way(each, channels.scale(each) if has_scale else None) for each in tried]
                found[call] = [*found.get(call, [Way()]), *equalised]
        return found

    def chosen(self, ways: Mapping[CallId, Sequence[Way]], tried: Tried) -> dict[CallId, Chosen]:
        """The way of least predicted error for each call, by scales of each call and by measured ones.

        Calls are left out where a batch says nothing: what did not run, or changes nothing that is judged.
        """
        ran = {(number, name) for number, name, *_ in tried}
        found: dict[CallId, Chosen] = {
            call: dict.fromkeys(_KINDS, each[0]) for call, each in ways.items() if call in ran
        }
        for channels in self._values.values():
            calls = [call for call in channels.weights if call in ran]
            count = len(ways[calls[0]]) if calls else 0
            # where no scale was measured, there is one kind of reading
            is_measured = bool(calls) and ways[calls[0]][0].scale is not None
            for kind in _KINDS if is_measured else (INPUT,):
                errors = [
                    sum(tried.get((*call, operand, at), 0.0) for call in calls for operand in (kind, WEIGHT))
                    for at in range(count)
                ]
                best = min(range(count), key=errors.__getitem__, default=0)
                for call in calls:
                    if not errors[0]:
                        found.pop(call, None)
                    elif errors[best] < _WORTH * errors[0] and call in found:
                        found[call][kind] = ways[call][best]
        return found


def divisors(exponents: tuple[int, ...], like: Tensor) -> Tensor:
    """The numbers that a value is multiplied by to be divided: one for each channel, or one for all that are not."""
    return powers_of_two([-each for each in exponents] or [0], like, run)


def first_ways(ways: Mapping[CallId, Sequence[Way]]) -> dict[CallId, Chosen]:
    """The way to read each call as it is."""
    return {call: dict.fromkeys(_KINDS, each[0]) for call, each in ways.items()}


def narrowed(chosen: Chosen) -> list[Way]:
    """The ways that are left of a call, each once."""
    return [*dict.fromkeys(chosen.values())]


def _settled(exponents: Tensor) -> tuple[int, ...]:
    """Whole exponents around zero."""
    rounded = (exponents - exponents.median()).round().clamp(-MOST_EXPONENT, MOST_EXPONENT)
    return tuple(int(each) for each in rounded.tolist())
