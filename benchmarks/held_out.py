"""What int8 costs and gains on held-out data: a small GPT and a small CNN, trained in bf16, from bf16 to all in int8.

    OMP_NUM_THREADS=1 python -m benchmarks.held_out [--task digits] [--steps 1000] [--rounds 15] [--json FILE]

Each arm is compiled under ``torch.inference_mode``, called on all held-out data, and timed in turn with the others.
NNCF quantises for OpenVINO on the same batches, where both are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from benchmarks import engines
from benchmarks.arms import arms_for
from benchmarks.learning import ConvNet, Digits, Text
from benchmarks.results import arguments, describe, read, write
from benchmarks.worker import seconds
from examples.gpt import GPT, GPTConfig

#: tokens of a sequence, and sequences of a batch in training and of a call
_CONTEXT, _TRAINED, _CALLED = 64, 16, 8

#: a function of inputs and targets
Measure = Callable[[Tensor, Tensor], Tensor]

#: errors that are allowed, times torch.autocast's
BUDGETS = (1.05, 1.1, 1.2, 1.4)

_ALL = {"base": "int8", "rules": [{"module": ".*", "precision": "int8"}]}


@dataclass(frozen=True)
class Row:
    """One arm.

    Attributes:
        loss: mean over the held-out data, in nats for each byte or image.
        divergence: Kullback-Leibler, of what fp32 predicts from what the arm does: mean over that data, likewise.
        time: of a call, times that of bf16: the median of rounds.
        in_int8: its calls that run in int8, where amp_fx says so.
    """

    arm: str
    loss: float
    divergence: float
    time: float
    in_int8: int


@dataclass(frozen=True)
class Task:
    """What is served.

    Attributes:
        served: takes one tensor, ``inputs``, and returns logits (..., classes).
        batches: of the data that it was trained on, of the size of a call.
        mean: of what a function gives for held-out inputs and targets.
        more: arms beside those of all tasks.
    """

    served: nn.Module
    batches: Sequence[Tensor]
    mean: Callable[[Measure], float]
    more: Mapping[str, Any]


class Logits(nn.Module):
    """A model that is served."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.model.logits(inputs)  # type: ignore[operator]  # a method
        return logits


def _trained(model: nn.Module, batch: Callable[[int, int], tuple[Tensor, Tensor]], steps: int) -> nn.Module:
    """By AdamW, compiled with amp_fx in bf16; served."""
    step = torch.compile(model, backend="amp_fx", options={"profile": "off"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for number in range(steps):
        step(*batch(number, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return Logits(model).eval()


def text(steps: int) -> Task:
    """A GPT on source code."""
    torch.manual_seed(0)
    data = Text(_CONTEXT, _TRAINED)
    model = GPT(GPTConfig(vocab=256, context=_CONTEXT, layers=4, heads=8, width=512))
    served = _trained(model, data.batch, steps)
    batches = [data.batch(number, 1)[0][:_CALLED] for number in range(2)]
    cal = amp_fx.calibrate(served, batches, of="outputs", policy="int8")
    budgets = {f"{budget:g}": {"plan": cal.plan(budget, verify=False)} for budget in BUDGETS}
    return Task(served, batches, lambda measure: data.loss(measure, _CALLED), budgets)


def digits(steps: int) -> Task:
    """Three convolutions with BatchNorm on handwritten digits."""
    torch.manual_seed(0)
    data = Digits()
    served = _trained(ConvNet(), data.batch, steps)
    held_out = data.images[data.is_held_out], data.labels[data.is_held_out]
    known = data.images[~data.is_held_out]

    def mean(measure: Measure) -> float:
        # made in inference mode, as what is timed: for others everything would be compiled once more
        return float(measure(*(each.clone() for each in held_out)))

    return Task(served, known.split(len(held_out[0]))[:2], mean, {})


TASKS = {"text": text, "digits": digits}


def measure(task: Task, rounds: int) -> list[Row]:
    """Compiles every arm, and measures them in turn."""
    served, batches = task.served, task.batches
    cal = amp_fx.calibrate(served, [*batches], of="outputs", policy=_ALL)
    arms: dict[str, Any] = {
        "bf16": {},
        **task.more,
        "int8": {"policy": "int8"},
        "all": {"policy": _ALL},
        "measured": {"plan": cal.plan(100, verify=False)},
    }
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        arm: torch.compile(served, backend="amp_fx", options=options) for arm, options in arms.items()
    }
    if "openvino_int8" in arms_for("inference", "cpu"):
        run = engines.openvino_int8(served, *({"inputs": batch} for batch in batches))
        calls["NNCF"] = lambda inputs: run({"inputs": inputs})
    found: dict[str, tuple[float, float, int]] = {}
    times: dict[str, list[float]] = {arm: [] for arm in calls}
    # all arms compile one function
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=len(arms)):
        for arm, call in calls.items():
            with amp_fx.record() as recording:
                loss = task.mean(_loss_of(call))
            nodes = [node for plan in recording.plans for node in plan.nodes]
            divergence = task.mean(_divergence_of(call, served))
            found[arm] = loss, divergence, sum(bool(node.levels_below) for node in nodes)
        # a tensor of inference mode, as those of the data are
        batch = batches[0].clone()
        for _ in range(rounds):
            for arm, call in calls.items():
                times[arm].append(median(seconds(lambda call=call: call(batch), "cpu", 5, "cpu")))
    return [
        Row(arm, loss, divergence, median(map(truediv, times[arm], times["bf16"])), in_int8)
        for arm, (loss, divergence, in_int8) in found.items()
    ]


def _loss_of(call: Callable[[Tensor], Tensor]) -> Measure:
    return lambda inputs, targets: F.cross_entropy(call(inputs).float().flatten(0, -2), targets.flatten())


def _divergence_of(call: Callable[[Tensor], Tensor], exact: nn.Module) -> Measure:
    def divergence(inputs: Tensor, _: Tensor) -> Tensor:
        found, wanted = (each(inputs).double().log_softmax(-1).flatten(0, -2) for each in (call, exact))
        return F.kl_div(found, wanted, reduction="batchmean", log_target=True)

    return divergence


def read_rows(path: Path) -> list[Row]:
    """What is in a results file."""
    return [Row(**row) for row in read(path)[1]]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Over time, the loss within one percent of that of bf16, and how far predictions are from those of fp32."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    styles = {
        True: ("o", "#0072B2", "budget, times autocast's error (calls in int8)"),
        False: ("s", "#D55E00", "policy, all calls, NNCF (calls in int8)"),
    }
    for is_budget, (mark, colour, label) in styles.items():
        shown = [row for row in rows if row.arm[0].isdigit() == is_budget]
        times = [row.time for row in shown]
        above.plot(times, [row.loss for row in shown], mark, color=colour, label=label)
        below.plot(times, [row.divergence for row in shown], mark, color=colour)
    # arms that do the same lie side by side, and share a label
    alike: dict[str, dict[str, Row]] = {}
    for row in sorted(rows, key=lambda row: row.time):
        text = f"{row.arm} ({row.in_int8})" if row.in_int8 else row.arm
        alike.setdefault(f"{row.divergence:.1e}", {})[text] = row
    for found in alike.values():
        at = [*found.values()][-1]
        label = ", ".join(found)
        below.annotate(label, (at.time, at.divergence), (6, 3), textcoords="offset points", fontsize=8)
    above.legend(frameon=False)
    above.margins(x=0.15)
    base = next(row.loss for row in rows if row.arm == "bf16")
    above.set(ylabel="held-out loss, nats per byte", ylim=(0.99 * base, 1.01 * base))
    below.set(ylabel="divergence from fp32,\nnats per byte", xlabel="time of a call, bf16 = 1")
    below.set_ylim(0, 1.15 * max(row.divergence for row in rows))
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("benchmarks.held_out", __doc__, device=False)
    parser.add_argument("--task", choices=TASKS, default="text", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)
    rows = measure(TASKS[args.task](args.steps), args.rounds)
    for row in rows:
        print(
            f"{row.arm:12}{row.in_int8:4} in int8  loss {row.loss:.5f}  divergence {row.divergence:.1e}  "
            f"time {row.time:.3f}"
        )
    if args.json:
        write(args.json, {**describe("cpu"), "task": args.task, "steps": args.steps}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
