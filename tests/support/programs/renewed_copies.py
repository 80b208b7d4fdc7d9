"""A program for Triton's interpreter, which tests run where there is no GPU: copies are renewed; prints JSON.

    TRITON_INTERPRET=1 python renewed_copies.py

The interpreter truncates to bfloat16, so the copies are float16.
"""

from __future__ import annotations

import functools
import json

import torch
from torch import Tensor, nn

from amp_fx.precision.policy.forms import ScaledRows
from amp_fx.runtime.weights import cache, touch
from amp_fx.runtime.weights.cache import CacheEntry, WeightCache, keep
from amp_fx.runtime.weights.renewal import CHUNK, Renewal
from support.checks.weight_writes import WRITES, are_current, copies_for, copies_in, new_layer

LOW = torch.float16


def values() -> list[Tensor]:
    """Several chunks; less than a sample; other orders of memory; zeros; a scalar; other dtypes."""
    torch.manual_seed(0)
    some = [torch.randn(300, 200), torch.randn(7), torch.randn(64, 32).t(), torch.zeros(100), torch.randn(())]
    return [*some, torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last), torch.randn(40).bfloat16()]


def current(copies: list[Tensor], originals: list[Tensor]) -> list[bool]:
    return [torch.equal(c, w.to(c.dtype)) for c, w in zip(copies, originals, strict=True)]


def entry_of(low: WeightCache[list[Tensor]]) -> CacheEntry[list[Tensor]]:
    [entry] = low.entries.values()
    return entry


def ways_that_break_the_rule() -> list[str]:
    """The rule of all devices."""
    found = []
    for way, (write, is_seen) in WRITES.items():
        layer, low = new_layer(), copies_for(1, LOW)
        are_right = [are_current(low, [layer.weight])]
        write(layer)
        are_right.append(are_current(low, [layer.weight]) == (is_seen or way.startswith("another slice")))
        touch(layer.weight)
        if not all([*are_right, are_current(low, [layer.weight])]):
            found.append(way)
    return found


def only_what_was_written_to_is_made_again() -> list[bool]:
    originals = values()
    copies = [torch.empty_like(w, dtype=LOW) for w in originals]
    renewal = Renewal([(w, (copy,), LOW) for w, copy in zip(originals, copies, strict=True)])
    # what is all zeros looks as nothing does that was never seen: others make the first copies
    copies[3].zero_()
    renewal.launch()
    found = current(copies, originals)
    for written in range(len(originals)):
        originals[written].data.sub_(3.0)
        for copy in copies:
            copy.fill_(float("nan"))
        renewal.launch()
        found.append(current(copies, originals) == [at == written for at in range(len(originals))])
    return found


def copies_stay_where_they_are() -> list[bool]:
    parameters: list[Tensor] = [*map(nn.Parameter, (*values(), torch.randn(64, 64)[::2]))]
    low = copies_for(len(parameters), LOW)
    first = low.of(parameters)
    renewal = entry_of(low).renewal
    found = [are_current(low, parameters), len(entry_of(low).prepared) == len(parameters)]
    for parameter in parameters[:-1]:
        parameter.data.sub_(2.0)
        # the host does not even know
        found.append(low.of(parameters) is first and all(current(first, parameters)[:-1]))
    # not one piece of memory: the host looks at it
    parameters[-1].data.sub_(2.0)
    found.append(are_current(low, parameters))
    touch(*parameters)
    found += [are_current(low, parameters), entry_of(low).renewal is renewal]
    parameters[0].data = torch.randn_like(parameters[0]).t().contiguous().t()
    return [*found, are_current(low, parameters), entry_of(low).renewal is not renewal]


def matrices_in_fp8_are_renewed() -> list[bool]:
    """Of either order of memory, several rows in a chunk or one; zeros; what is not finite."""
    torch.manual_seed(0)
    zeros = torch.randn(16, 48)
    zeros[5] = 0
    cases = [
        (torch.randn(40, 272), True),
        (torch.randn(2, CHUNK + 16) * 1e-3, True),
        (torch.randn(80, 32).t(), True),
        (torch.randn(64, 32), False),
        (torch.randn(32, 64).t().bfloat16(), False),
        (zeros * 1e30, True),
    ]
    forms = [ScaledRows("rowwise", in_rows) for _, in_rows in cases]
    parameters: list[Tensor] = [nn.Parameter(weight) for weight, _ in cases]
    low = WeightCache(functools.partial(keep, copies_in(parameters, *forms)))
    first = low.of(parameters)
    found = []
    for write in (None, *range(len(cases))):
        if write is not None:
            parameters[write].data[:, ::2].mul_(3.0)
        now = low.of(parameters)
        made = [form(p.detach()) for p, form in zip(parameters, forms, strict=True)]
        found.append(all(map(same, now, [tensor for tensors in made for tensor in tensors])))
        found.append(all(ours is theirs for ours, theirs in zip(now, first, strict=True)))
    # what is not finite is in the factor, and so in every product
    parameters[0].data[:, :].neg_()
    parameters[0].data[7, 9] = float("nan")
    factors = low.of(parameters)[1]
    return [*found, bool(factors[7].isnan().all() and factors[:7].isfinite().all())]


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal, but for what the interpreter rounds wrongly in fp8: ties, subnormals, and up to a power of two."""
    if ours.dtype is torch.float32:
        return torch.equal(ours, theirs)
    ours, theirs = ours.float(), theirs.float()
    one_step = (theirs.abs() / 8).clamp_min(2.0**-9)
    half_of_a_power = (theirs.frexp().mantissa.abs() == 0.5) & (ours * 2 == theirs)
    near = ((ours - theirs).abs() <= one_step) | half_of_a_power
    return bool(near.all()) and float((ours != theirs).float().mean()) < 0.2


if __name__ == "__main__":
    # as if this were on a GPU: true for one dense piece of memory
    cache._is_renewed = lambda _, w: w.untyped_storage().nbytes() in (w.nbytes, 3 * w.nbytes)
    found = {
        "ways that break the rule": ways_that_break_the_rule(),
        "only what was written to is made again": only_what_was_written_to_is_made_again(),
        "copies stay where they are": copies_stay_where_they_are(),
        "matrices in fp8": matrices_in_fp8_are_renewed(),
    }
    print(json.dumps(found))
