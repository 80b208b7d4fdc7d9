"""What mixed precision costs in accuracy: loss and gradients of one training step against fp64.

    python -m benchmarks.errors [--only NAME ...] [--arms NAME ...] [--device cuda] [--json FILE]

Every arm starts from the same fp32 weights and compiles the same step, as in ``benchmarks.counts``. The error
of the gradients is the relative L2 distance over all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amp_fx.instruments.step import zeroed
from benchmarks.arms import ARMS, Arm, prepare
from benchmarks.results import arguments, describe, write
from benchmarks.workloads import WORKLOADS, Workload, make

#: the large rows say nothing here that the small ones do not, and take minutes in fp64
_DEFAULT = ("bert", "gpt2", "llama", "vit", "resnet", "rms_norm")


@dataclass(frozen=True)
class Row:
    """The relative error of the loss, and the relative L2 error over all gradients."""

    workload: str
    arm: str
    loss: float
    gradient: float


#: what the others are compared with
EXACT = Arm("fp64", None, whole=True, dtype=torch.float64)


def measure(workload: Workload, arms: Sequence[Arm], device: str = "cpu") -> list[Row]:
    exact_loss, exact = _step(workload, EXACT, device)
    rows = []
    for arm in arms:
        loss, gradients = _step(workload, arm, device)
        # too small a share of all gradients to be seen in their error
        if lost := zeroed(gradients, exact):
            raise AssertionError(f"{workload.name}, {arm.name}: gradients are zero: {', '.join(lost)}")
        error = distance([gradients[name] for name in exact], list(exact.values()))
        rows.append(Row(workload.name, arm.name, distance([loss], [exact_loss]), error))
    return rows


def distance(values: Sequence[Tensor], references: Sequence[Tensor]) -> float:
    """Relative L2, over all."""
    squares = sum((v - r).square().sum().item() for v, r in zip(values, references, strict=True))
    return (squares / sum(r.square().sum().item() for r in references)) ** 0.5


def _step(workload: Workload, arm: Arm, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss, and the gradients by name."""
    prepared = prepare(workload, arm, "training", device)
    loss = prepared.forward()
    loss.backward()
    gradients = {n: p.grad.double() for n, p in prepared.model.named_parameters() if p.grad is not None}
    return loss.detach().double(), gradients


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("benchmarks.errors", __doc__)
    parser.add_argument("--only", nargs="+", choices=WORKLOADS, default=list(_DEFAULT), metavar="NAME")
    arms = ["fp32", "autocast", "bf16", "off", "fast"]
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=arms, metavar="NAME")
    args = parser.parse_args(argv)
    header = describe(args.device)
    print(", ".join(f"{key} {value}" for key, value in header.items()))
    print(f"{'':<18}{'':<10}{'loss':>10}{'gradients':>12}")
    rows: list[Row] = []
    for name in args.only:
        for row in measure(make(name), [ARMS[arm] for arm in args.arms], args.device):
            print(f"{row.workload:<18}{row.arm:<10}{row.loss:>10.1e}{row.gradient:>12.1e}", flush=True)
            rows.append(row)
    if args.json:
        write(args.json, header, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
