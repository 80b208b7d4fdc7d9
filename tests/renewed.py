"""A program for Triton's interpreter, which tests run where there is no GPU: copies are renewed; prints JSON.

    TRITON_INTERPRET=1 python renewed.py

The interpreter truncates to bfloat16, so the copies are float16.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from amp_fx.weights import touch
from amp_fx.weights import values as values_of_graphs
from amp_fx.weights.device_copies import CHUNK, PERIOD, DeviceCopies
from amp_fx.weights.elements import is_dense
from amp_fx.weights.kept import Kept, Made
from amp_fx.weights.recipes import Cast, Scaled
from amp_fx.weights.values import Input, Values

LOW = torch.float16


def values() -> list[Tensor]:
    """Several chunks; less than a sample; other orders of memory; nearly all zeros; a scalar; other dtypes."""
    torch.manual_seed(0)
    zeros = torch.zeros(100, 400)
    zeros[57, 3] = 2.0
    some = [torch.randn(300, 200), torch.randn(7), torch.randn(64, 32).t(), zeros, torch.randn(())]
    return [*some, torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last), torch.randn(40).bfloat16()]


def current(copies: Sequence[Tensor], originals: Sequence[Tensor]) -> bool:
    return all(torch.equal(c, w.to(c.dtype)) for c, w in zip(copies, originals, strict=True))


def casts(weights: Sequence[Tensor], copies: Sequence[Tensor]) -> DeviceCopies:
    return DeviceCopies(weights, [(copy,) for copy in copies], [Cast(LOW)] * len(weights))


def kept_casts(count: int) -> Kept[list[Tensor]]:
    return Kept(Values([(Cast(LOW), (at,)) for at in range(count)], [*map(Input, range(count))]).make)


def made_by(low: Kept[list[Tensor]]) -> Made[list[Tensor]]:
    [(_, made)] = low._entries.values()
    return made


def every_write_is_copied() -> list[bool]:
    originals = values()
    copies = [torch.empty_like(w, dtype=LOW) for w in originals]
    renewed = casts(originals, copies)
    renewed.make()
    found = [current(copies, originals)]
    for weight in originals:
        weight.mul_(3.0)
        stale = current(copies, originals)
        renewed.renew()
        found.append(not stale and current(copies, originals))
    return found


def chunks_made_again() -> int:
    """How many of four are, after a write to one."""
    weight = torch.randn(4 * CHUNK)
    copy = torch.empty_like(weight, dtype=LOW)
    renewed = casts([weight], [copy])
    renewed.make()
    weight[CHUNK : 2 * CHUNK].add_(1.0)
    copy.fill_(float("nan"))
    renewed.renew()
    return int(copy.view(4, CHUNK).isfinite().all(1).sum())


def copies_are_renewed_in_place() -> list[bool]:
    parameters: list[Tensor] = [*map(nn.Parameter, (*values(), torch.randn(64, 64)[::2]))]
    low = kept_casts(len(parameters))
    first = low.of(parameters)
    found = [current(first, parameters)]
    for parameter in parameters[:-1]:
        parameter.data.mul_(2.0)
        found.append(low.of(parameters) is first and current(first, parameters))
    # not one piece of memory: the host looks at it
    parameters[-1].data.mul_(2.0)
    found.append(current(low.of(parameters), parameters))
    parameters[0].data = torch.randn_like(parameters[0]).t().contiguous().t()
    found.append(current(low.of(parameters), parameters))
    return found


def large_writes_are_copied_at_once() -> list[bool]:
    """A contiguous 1/16, wherever it is, and each slice along each short dimension, in whatever order of memory."""
    torch.manual_seed(0)
    weights = [
        torch.randn(8, 64, 64),
        torch.randn(64, 96),
        torch.randn(96, 64).t(),
        torch.randn(2 * CHUNK + 77),
        # of a transposed convolution, and what ends just behind a chunk
        torch.randn(24, 50, 4, 4),
    ]
    found = []
    for weight in weights:
        copy = torch.empty_like(weight, dtype=LOW)
        renewed = casts([weight], [copy])
        renewed.make()
        flat = weight.as_strided((weight.numel(),), (1,))
        size = -(-len(flat) // 16)
        pieces = [flat[at : at + size] for at in range(0, len(flat) - size + 1, max(1, len(flat) // 7))]
        slices = [
            weight.select(at, i) for at, n in enumerate(weight.shape) if n <= 64 for i in range(0, n, 7)
        ]
        for piece in (*pieces, *slices):
            piece.mul_(1.5)
            renewed.renew()
            found.append(current([copy], [weight]))
    return [all(found)]


def a_write_to_one_element_is_copied_within_the_period() -> list[bool]:
    weight = torch.randn(CHUNK + 100)
    copy = torch.empty_like(weight, dtype=LOW)
    renewed = casts([weight], [copy])
    renewed.make()
    found = []
    for at in (5, CHUNK + 98):
        weight[at] += 1.0
        renewed.renew()
        found.append(not current([copy], [weight]))
        for _ in range(PERIOD - 1):
            renewed.renew()
        found.append(current([copy], [weight]))
    return found


def after_touch() -> list[bool]:
    """All copies of what was touched are made again, by the same launches as before."""
    parameters: list[Tensor] = [*map(nn.Parameter, values())]
    low = kept_casts(len(parameters))
    low.of(parameters)
    before = made_by(low).renewed
    # no sample has it
    parameters[0].data.view(-1)[-2] += 1.0
    found = [not current(low.of(parameters), parameters)]
    touch(parameters[0])
    found.append(current(low.of(parameters), parameters))
    after = made_by(low).renewed
    parameters[0].data = torch.randn_like(parameters[0])
    found += [after is before, current(low.of(parameters), parameters)]
    return [*found, made_by(low).renewed is not after]


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
    found = []
    for weight, in_rows in cases:
        parameter, recipe = nn.Parameter(weight), Scaled("rowwise", in_rows)
        low = Kept(Values([(recipe, (0,))], [Input(0, part) for part in range(2)]).make)
        first = low.of([parameter])
        short = [at for at, size in enumerate(parameter.shape) if size <= 64]
        slices = [parameter.data.select(at, -1) for at in short]
        for piece in (
            parameter.data[:0],
            parameter.data[:, : -(-parameter.shape[1] // 16)],
            parameter.data[:1],
            *slices,
        ):
            piece.mul_(3.0)
            now = low.of([parameter])
            found.append(all(map(same, now, recipe.made(parameter.detach()))))
            found.append(all(ours is theirs for ours, theirs in zip(now, first, strict=True)))
    # several matrices by one launch
    parameters: list[Tensor] = [nn.Parameter(weight) for weight, _ in cases[:3]]
    recipes = [Scaled("rowwise", in_rows) for _, in_rows in cases[:3]]
    inputs = [Input(at, part) for at in range(3) for part in range(2)]
    low = Kept(Values([(recipe, (at,)) for at, recipe in enumerate(recipes)], inputs).make)
    low.of(parameters)
    parameters[0].data[7, 9] = float("nan")
    parameters[2].data.mul_(3.0)
    touch(parameters[0])
    _, factors, *others = low.of(parameters)
    made = [recipe.made(p.detach()) for p, recipe in zip(parameters, recipes, strict=True)]
    found.append(all(map(same, others, [tensor for tensors in made[1:] for tensor in tensors])))
    # what is not finite is in the factor, and so in every product
    return [all(found), bool(factors[7].isnan().all() and factors[:7].isfinite().all())]


def same(ours: Tensor, theirs: Tensor) -> bool:
    """Equal, but for what the interpreter rounds wrongly in fp8: ties, subnormals, and up to a power of two."""
    if ours.dtype is torch.float32:
        return torch.equal(ours, theirs)
    ours, theirs = ours.float(), theirs.float()
    one_step = (theirs.abs() / 8).clamp_min(2.0**-9)
    half_of_a_power = (theirs.frexp().mantissa.abs() == 0.5) & (ours * 2 == theirs)
    wrong = ours != theirs
    return (
        bool((((ours - theirs).abs() <= one_step) | half_of_a_power).all())
        and float(wrong.float().mean()) < 0.2
    )


if __name__ == "__main__":
    # as if these were on a GPU
    values_of_graphs.is_renewed_on_device = lambda weight, recipe: is_dense(weight)
    print(
        json.dumps(
            {
                "every write is copied": every_write_is_copied(),
                "chunks made again": chunks_made_again(),
                "copies are renewed in place": copies_are_renewed_in_place(),
                "large writes are copied at once": large_writes_are_copied_at_once(),
                "a write to one element": a_write_to_one_element_is_copied_within_the_period(),
                "after touch": after_touch(),
                "matrices in fp8": matrices_in_fp8_are_renewed(),
            }
        )
    )
