"""The most memory that a training step holds, beside torch.autocast: counted by torch's allocator, the same each time.

    OMP_NUM_THREADS=1 python -m benchmarks peaks [--only NAME ...] [--arms NAME ...] [--json FILE]

A step is forward and backward, from no gradients to all of them; parameters and inputs are there before it. Each arm
compiles and runs two steps, half a minute for each model with one thread.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import workloads
from benchmarks.arms import ARMS, Arm, prepare
from benchmarks.memory import allocated_peak
from benchmarks.results import arguments, describe, write
from benchmarks.workloads import Batch, Workload, build_workload
from examples import hugging_face

_TEXT = {"batch": 4, "length": 256, "layers": 4, "width": 256, "vocab": 1024}


def _decoder(make: Callable[..., nn.Module], **sizes: int) -> tuple[nn.Module, Batch]:
    """A decoder of transformers as wide and deep as the others."""
    model = make(layers=4, width=256, heads=4, vocab=1024, length=256, **sizes)
    tokens = torch.randint(1024, (4, 256))
    return model, {"input_ids": tokens, "labels": tokens}


#: name -> how it is built, and of which sizes
MODELS: dict[str, tuple[Callable[..., tuple[nn.Module, Batch]], dict[str, Any]]] = {
    "gpt2": (workloads.gpt2, _TEXT),
    "bert": (workloads.bert, _TEXT),
    "vit": (workloads.vit, {"batch": 8, "image": 128, "patch": 16, "layers": 4, "width": 256}),
    "mistral": (functools.partial(_decoder, hugging_face.mistral), {"kv_heads": 2, "hidden": 704}),
    "opt": (functools.partial(_decoder, hugging_face.opt), {"hidden": 1024}),
    "resnet": (workloads.resnet, {"batch": 8, "image": 96, "width": 32, "stages": 4}),
    "t5": (workloads.t5, {**_TEXT, "layers": 2}),
}
_DEFAULT = ("autocast", "amp_fx", "activations_int8")


@dataclass(frozen=True)
class Row:
    """Bytes that a training step of a model holds at its peak, beyond what is held before it."""

    model: str
    arm: str
    peak_bytes: int


def build(name: str) -> Workload:
    """Builds a model of :data:`MODELS`; the same weights each time."""
    make, sizes = MODELS[name]
    return build_workload(name, make, **sizes)


def peak(workload: Workload, arm: Arm) -> int:
    """Bytes that a training step holds at its peak on a CPU, beyond what is held before it."""
    prepared = prepare(workload, arm, "training")

    def step() -> None:
        prepared.forward().backward()

    # compiles, and makes what is kept across steps
    step()
    prepared.model.zero_grad()
    return allocated_peak(step)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("benchmarks peaks", __doc__, device=False)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=_DEFAULT, metavar="NAME")
    args = parser.parse_args(argv)
    header = describe("cpu")
    print(", ".join(f"{key} {value}" for key, value in header.items()))
    print(f"{'peak of a step, MB':20}" + "".join(f"{name:>24}" for name in args.arms), flush=True)
    rows: list[Row] = []
    for name in args.only:
        workload = build(name)
        found = [Row(name, arm, peak(workload, ARMS[arm])) for arm in args.arms]
        base = found[0].peak_bytes
        cells = [f"{row.peak_bytes / 1e6:.2f} {row.peak_bytes / base:.3f}" for row in found]
        print(f"{name:20}" + "".join(f"{cell:>24}" for cell in cells), flush=True)
        rows += found
    if args.json:
        write(args.json, header, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
