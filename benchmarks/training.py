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
from amp_fx.passes import AccumulateGradients, PassContext, run_in_order
from amp_fx.targets import TARGETS
from benchmarks.arms import ARMS
from benchmarks.counts import Counter, count
from benchmarks.on_target import enter_target
from benchmarks.results import describe, write
from benchmarks.whole_steps import whole_step_bytes
from benchmarks.workloads import Workload, build_workload, make, mlp

__all__ = ["Moved", "measure"]

#: numbers of micro-batches
STEPS = (1, 4, 16)

_ARMS = {name: ARMS[name] for name in ("autocast", "bf16", "off", "fast")}

_MODELS = ("mlp", "gpt_512", "llama_512", "resnet")


@dataclass(frozen=True)
class Moved:
    """Bytes that one model moves in training.

    Attributes:
        forward: of one micro-batch.
        backward: of one micro-batch.
        adding: of a backward that adds to gradients, where there is one.
        added: elements of the gradients that it adds to.
        whole: of forward and backward in one graph.
        parameters: elements.
        element: bytes of one.
    """

    workload: str
    arm: str
    forward: int
    backward: int
    adding: int
    added: int
    whole: int
    parameters: int
    element: int

    def in_one_graph(self) -> float:
        """Bytes per parameter of a step of one micro-batch whose forward and backward are one graph."""
        return self.whole / self.parameters + 7 * self.element

    def per_parameter(self, steps: int, *, in_graph: bool = False) -> float:
        """Bytes per parameter and micro-batch, of a step of so many.

        Args:
            steps: number of micro-batches.
            in_graph: later micro-batches are added by the backward.
        """
        later, left = self.backward, self.parameters
        if in_graph:
            later, left = self.adding, self.parameters - self.added
        moved = steps * self.forward + self.backward + (steps - 1) * (later + 3 * self.element * left)
        return (moved + 7 * self.element * self.parameters) / self.parameters / steps


@dataclass
class _Both(Counter):
    """Counts the backward that adds as well."""

    adding: int = 0
    added: int = 0

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
        return super().inner_compile(gm, example_inputs, **kwargs)


def measure(workload: Workload, arm: str, device: str = "cpu") -> Moved:
    """Counts a training step of a workload; leaves its model as it was."""
    counter = _Both()
    count(workload, _ARMS[arm], "training", device, counter)
    parameters = sum(p.numel() for p in workload.model.parameters())
    return Moved(
        workload.name,
        arm,
        counter.forward.bytes_moved,
        counter.backward.bytes_moved,
        counter.adding,
        counter.added,
        whole_step_bytes(workload, _ARMS[arm], device),
        parameters,
        2 if _ARMS[arm].whole else 4,
    )


def table(rows: Sequence[Moved]) -> str:
    """Markdown: a line per model, number of micro-batches and way, in bytes per parameter and micro-batch."""
    head = ["model", "k", "autocast", "autograd adds", "the graph adds"]
    lines = ["| " + " | ".join([*head, "`fast`, the graph adds", "bf16 model"]) + " |"]
    lines.append("|" + "---|" * 7)
    for name in dict.fromkeys(row.workload for row in rows):
        arms = {row.arm: row for row in rows if row.workload == name}
        for steps in STEPS:
            base = arms["autocast"].per_parameter(steps)
            values = [
                arms["off"].per_parameter(steps),
                arms["off"].per_parameter(steps, in_graph=True),
                arms["fast"].per_parameter(steps, in_graph=True),
                arms["bf16"].per_parameter(steps),
            ]
            cells = [f"{base:.1f}", *(f"{value:.1f} ({value / base:.3f})" for value in values)]
            lines.append(f"| {name} | {steps} | {' | '.join(cells)} |")
    return "\n".join(lines)


def whole_steps_table(rows: Sequence[Moved]) -> str:
    """Markdown: a line per model, for steps of one micro-batch whose forward and backward are one graph."""
    arms = ("autocast", "off", "fast", "bf16")
    lines = ["| model | autocast | amp_fx | `fast` | bf16 model |", "|" + "---|" * 5]
    for name in dict.fromkeys(row.workload for row in rows):
        of = {row.arm: row for row in rows if row.workload == name}
        base = of["autocast"].per_parameter(1)
        cells = [f"{of[arm].in_one_graph():.1f} ({of[arm].in_one_graph() / base:.3f})" for arm in arms]
        lines.append(f"| {name} | {' | '.join(cells)} |")
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
    print("\nforward and backward in one graph, k = 1; ratios to autocast in two\n")
    print(whole_steps_table(rows))
    if args.json:
        write(args.json, describe(device), rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
