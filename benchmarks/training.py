"""What a training step moves for its parameters, counted: micro-batches, accumulation, the optimizer.

    python -m benchmarks.training [--only NAME ...] [--target cuda:h100] [--json FILE]

A step of k micro-batches runs k forwards and backwards, adds k - 1 times to the gradients and updates the parameters.
Forward and backward are Inductor's estimates after fusion, as in :mod:`benchmarks.counts`. Autograd's additions and
the optimizer are counted by what they read and write: 12 and 28 bytes per fp32 parameter (AdamW: parameter, gradient
and two states read, all but the gradient written), 6 and 14 in 16 bits.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx as fx

from amp_fx._torch import lower_with_inductor
from amp_fx.graphs.facts import LOW_DTYPES
from amp_fx.passes import AccumulateGradients, PassContext, run_in_order
from amp_fx.reports.kernels import cast_kernels
from amp_fx.targets import TARGETS
from benchmarks.arms import ARMS
from benchmarks.counts import Counter, count
from benchmarks.on_target import enter_target
from benchmarks.results import describe, write
from benchmarks.workloads import Workload, build_workload, make, mlp

__all__ = ["Moved", "measure"]

#: numbers of micro-batches
STEPS = (1, 4, 16)

_ARMS = ("autocast", "bf16", "off", "fast")
_MODELS = ("mlp", "gpt_512", "llama_512", "resnet")


@dataclass(frozen=True)
class Moved:
    """Bytes that one model moves in training.

    Attributes:
        forward: of one micro-batch.
        backward: of one micro-batch.
        adding: of a backward that adds to gradients, where there is one.
        added: elements of the gradients that it adds to.
        weight_casts: of kernels in the forward that narrow a parameter and do nothing else.
        parameters: elements.
        element: bytes of one.
    """

    workload: str
    arm: str
    forward: int
    backward: int
    adding: int
    added: int
    weight_casts: int
    parameters: int
    element: int

    def per_parameter(self, steps: int, *, in_graph: bool = False, cast_once: bool = False) -> float:
        """Bytes per parameter and micro-batch, of a step of so many.

        Args:
            steps: number of micro-batches.
            in_graph: later micro-batches are added by the backward.
            cast_once: low weights live until the optimizer's step.
        """
        later, left = self.backward, self.parameters
        if in_graph:
            later, left = self.adding, self.parameters - self.added
        moved = steps * self.forward + self.backward + (steps - 1) * (later + 3 * self.element * left)
        if cast_once:
            moved -= (steps - 1) * self.weight_casts
        return (moved + 7 * self.element * self.parameters) / self.parameters / steps


@dataclass
class _Both(Counter):
    """Counts the backward that adds as well."""

    adding: int = 0
    added: int = 0
    weight_casts: int = 0

    def inner_compile(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
    ) -> Callable[..., Any]:
        if kwargs.get("is_backward"):
            second = copy.deepcopy(gm)
            gradients: Sequence[Any] = second.graph.output_node().args[0]  # type: ignore[assignment]  # a tuple
            run_in_order(second, [AccumulateGradients(range(len(gradients)))], PassContext())
            inputs = [node.meta["val"] for node in second.graph.find_nodes(op="placeholder")]
            grads = inputs[len(example_inputs) :]
            self.added += sum(value.numel() for value in grads)
            self.adding += lower_with_inductor(second, [*example_inputs, *grads], **kwargs).bytes_moved
        call = super().inner_compile(gm, example_inputs, **kwargs)
        kind, lowered = self.graphs[-1]
        if kind == "forward":
            self.weight_casts += sum(
                size for casts, size in cast_kernels(lowered) if all(map(_narrows_a_parameter, casts))
            )
        return call


def _narrows_a_parameter(cast: fx.Node) -> bool:
    (source,) = cast.all_input_nodes
    return source.op == "placeholder" and cast.meta["val"].dtype in LOW_DTYPES and cast.meta["val"].ndim > 1


def measure(workload: Workload, arm: str, device: str = "cpu") -> Moved:
    """Counts a training step of a workload; leaves its model as it was."""
    counter = _Both()
    count(workload, ARMS[arm], "training", device, counter)
    parameters = sum(p.numel() for p in workload.model.parameters())
    return Moved(
        workload.name,
        arm,
        counter.forward.bytes_moved,
        counter.backward.bytes_moved,
        counter.adding,
        counter.added,
        counter.weight_casts,
        parameters,
        2 if ARMS[arm].whole else 4,
    )


def table(rows: Sequence[Moved]) -> str:
    """Markdown: a line per model, number of micro-batches and way, in bytes per parameter and micro-batch."""
    head = ["model", "k", "autocast", "autograd adds", "the graph adds", "and weights cast once"]
    lines = ["| " + " | ".join([*head, "`fast`, the graph adds", "bf16 model"]) + " |"]
    lines.append("|" + "---|" * 8)
    for name in dict.fromkeys(row.workload for row in rows):
        arms = {row.arm: row for row in rows if row.workload == name}
        for steps in STEPS:
            base = arms["autocast"].per_parameter(steps)
            values = [
                arms["off"].per_parameter(steps),
                arms["off"].per_parameter(steps, in_graph=True),
                arms["off"].per_parameter(steps, in_graph=True, cast_once=True),
                arms["fast"].per_parameter(steps, in_graph=True),
                arms["bf16"].per_parameter(steps),
            ]
            cells = [f"{base:.1f}", *(f"{value:.1f} ({value / base:.3f})" for value in values)]
            lines.append(f"| {name} | {steps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--only", nargs="+", choices=_MODELS, default=list(_MODELS), metavar="NAME")
    parser.add_argument("--json", metavar="FILE", help="write a header line and one line per row")
    parser.add_argument("--target", metavar="NAME", help=f"instead of this CPU: {', '.join(TARGETS)}")
    args = parser.parse_args(argv)
    device = "cpu"
    if args.target:
        device = enter_target(parser, args.target)
    rows = list[Moved]()
    for name in args.only:
        workload = build_workload(name, mlp, batch=256, width=1024) if name == "mlp" else make(name)
        for arm in _ARMS:
            print(f"{name} {arm}", file=sys.stderr)
            rows.append(measure(workload, arm, device))
    print(table(rows))
    if args.json:
        write(args.json, describe(device), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
