"""What it costs to cast a convolution's weight channels last, and its gradient back, per weight.

    python -m benchmarks.layout [--rounds N]

Three ways: ``generated``, what Inductor makes of the cast, and for the gradient also the copy by which autograd lays
it out as its parameter lies; ``amp_fx``, :mod:`amp_fx.placement.layout`; ``plain``, casts of parameters that are
channels last, where nothing has to be laid out. The ways take turns. Weights are many enough not to stay in a cache.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from amp_fx.placement.layout import CONVERT, channels_last_strides
from benchmarks.results import describe

#: shapes of weights
_SHAPES = ((64, 64, 3, 3), (256, 256, 3, 3), (512, 512, 3, 3))
#: elements of all weights of a shape together
_ELEMENTS = 2**23

Way = tuple[Callable[[Tensor], Tensor], list[Tensor]]


def ways(shape: tuple[int, ...]) -> dict[str, dict[str, Way]]:
    """Direction -> way -> (conversion, what it converts)."""
    count = max(2, _ELEMENTS // torch.Size(shape).numel())
    weights = [torch.randn(shape) for _ in range(count)]
    laid_out = [weight.to(memory_format=torch.channels_last) for weight in weights]
    gradients = [weight.bfloat16() for weight in laid_out]
    narrow = torch.compile(lambda w: w.to(torch.bfloat16, memory_format=torch.channels_last), dynamic=False)
    cast = torch.compile(lambda w: w.to(torch.bfloat16), dynamic=False)
    widen = torch.compile(lambda g: g.to(torch.float32), dynamic=False)
    there, back = channels_last_strides(shape), list(weights[0].stride())
    return {
        "weight": {
            "generated": (narrow, weights),
            "amp_fx": (lambda w: CONVERT(w, torch.bfloat16, there), weights),
            "plain": (cast, laid_out),
        },
        "gradient": {
            "generated": (lambda g: widen(g).contiguous(), gradients),
            "amp_fx": (lambda g: CONVERT(g, torch.float32, back), gradients),
            "plain": (widen, gradients),
        },
    }


def nanoseconds(table: dict[str, Way], rounds: int) -> dict[str, float]:
    """Median time per element, way by way."""
    times: dict[str, list[float]] = {name: [] for name in table}
    for _ in range(rounds + 1):
        for name, (convert, values) in table.items():
            start = time.perf_counter()
            # a step keeps all of them, too
            kept = [convert(value) for value in values]
            times[name].append((time.perf_counter() - start) / sum(value.numel() for value in values))
            del kept
    # the first round compiles
    return {name: 1e9 * statistics.median(values[1:]) for name, values in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.layout", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=15, help="default: %(default)s")
    args = parser.parse_args(argv)
    print(", ".join(f"{key} {value}" for key, value in describe("cpu").items()))
    print(f"{'ns per weight':24}{'generated':>12}{'amp_fx':>12}{'plain':>12}")
    for shape in _SHAPES:
        for direction, table in ways(shape).items():
            found = nanoseconds(table, args.rounds)
            name = f"{'x'.join(map(str, shape))} {direction}"
            print(f"{name:24}" + "".join(f"{found[way]:12.2f}" for way in ("generated", "amp_fx", "plain")))
    return 0


if __name__ == "__main__":
    sys.exit(main())
