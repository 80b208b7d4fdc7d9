"""What int8 costs and gains on held-out text: a small GPT trained in bf16, from bf16 to all linears in int8.

    OMP_NUM_THREADS=1 python -m benchmarks.held_out [--steps 1000] [--rounds 15] [--json FILE]

Each arm is compiled under ``torch.inference_mode``, called on all held-out text, and timed in turn with the others.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amp_fx
from benchmarks.learning import Text
from benchmarks.results import arguments, describe, read, write
from benchmarks.worker import seconds
from examples.gpt import GPT, GPTConfig

__all__ = ["Row", "draw", "measure", "read_rows"]

#: tokens of a sequence, and sequences of a batch in training and of a call
_CONTEXT, _TRAINED, _CALLED = 64, 16, 8

#: errors that are allowed, times torch.autocast's
_BUDGETS = (1.05, 1.1, 1.2, 1.4)

_ALL_LINEARS = {"base": "int8", "rules": [{"module": ".*", "precision": "int8"}]}


@dataclass(frozen=True)
class Row:
    """One arm.

    Attributes:
        loss: mean over the held-out text, in nats per byte.
        divergence: Kullback-Leibler, of what fp32 predicts from what the arm does: mean over that text, likewise.
        time: of a call, times that of bf16: the median of rounds.
        in_int8: its linears that run in int8.
    """

    arm: str
    loss: float
    divergence: float
    time: float
    in_int8: int


class Logits(nn.Module):
    """What is served: takes tokens (batch, length), returns logits (batch, length, vocab)."""

    def __init__(self, model: GPT) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        return self.model.logits(tokens)


def trained(text: Text, steps: int) -> GPT:
    """Trained by AdamW, compiled with amp_fx in bf16."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=256, context=_CONTEXT, layers=4, heads=8, width=512))
    step = torch.compile(model, backend="amp_fx", options={"profile": "off"})
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    for number in range(steps):
        step(*text.batch(number, 0)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def measure(steps: int, rounds: int) -> list[Row]:
    """Trains, calibrates on text that was trained on, compiles every arm, and measures them in turn."""
    text = Text(_CONTEXT, _TRAINED)
    served = Logits(trained(text, steps)).eval()
    batches = [text.batch(number, 1)[0][:_CALLED] for number in range(2)]
    cal = amp_fx.calibrate(served, batches, of="outputs", policy="int8")
    arms: dict[str, Any] = {
        "bf16": {},
        **{f"{budget:g}": {"plan": cal.plan(budget, verify=False)} for budget in _BUDGETS},
        "int8": {"policy": "int8"},
        "all linears": {"policy": _ALL_LINEARS},
    }
    calls: dict[str, Callable[[Tensor], Tensor]] = {}
    found: dict[str, tuple[float, float, int]] = {}
    times: dict[str, list[float]] = {arm: [] for arm in arms}
    # all arms compile one function
    with torch.inference_mode(), torch._dynamo.config.patch(recompile_limit=len(arms)):
        for arm, options in arms.items():
            calls[arm] = call = torch.compile(served, backend="amp_fx", options=options)
            with amp_fx.record() as recording:
                loss = text.loss(_loss_of(call), _CALLED)
            nodes = [node for plan in recording.plans for node in plan.nodes]
            divergence = text.loss(_divergence_of(call, served), _CALLED)
            found[arm] = loss, divergence, sum(bool(node.levels_below) for node in nodes)
        # a tensor of inference mode, as those of the text are
        batch = batches[0].clone()
        for _ in range(rounds):
            for arm, call in calls.items():
                times[arm].append(median(seconds(lambda call=call: call(batch), "cpu", 5, "cpu")))
    return [
        Row(arm, loss, divergence, median(map(truediv, times[arm], times["bf16"])), in_int8)
        for arm, (loss, divergence, in_int8) in found.items()
    ]


def _loss_of(call: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda tokens, targets: F.cross_entropy(call(tokens).float().flatten(0, 1), targets.flatten())


def _divergence_of(call: Callable[[Tensor], Tensor], exact: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    def divergence(tokens: Tensor, _: Tensor) -> Tensor:
        found, wanted = (each(tokens).double().log_softmax(-1).flatten(0, 1) for each in (call, exact))
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
        True: ("o", "#0072B2", "budget, times autocast's error (linears in int8)"),
        False: ("s", "#D55E00", "policy (linears in int8)"),
    }
    for is_budget, (mark, colour, label) in styles.items():
        shown = [row for row in rows if row.arm[0].isdigit() == is_budget]
        times = [row.time for row in shown]
        above.plot(times, [row.loss for row in shown], mark, color=colour, label=label)
        below.plot(times, [row.divergence for row in shown], mark, color=colour)
        for row in shown:
            text = f"{row.arm} ({row.in_int8})"
            below.annotate(text, (row.time, row.divergence), (6, 3), textcoords="offset points", fontsize=8)
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
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args(argv)
    rows = measure(args.steps, args.rounds)
    for row in rows:
        print(
            f"{row.arm:12}{row.in_int8:4} in int8  loss {row.loss:.5f}  divergence {row.divergence:.1e}  "
            f"time {row.time:.3f}"
        )
    if args.json:
        write(args.json, {**describe("cpu"), "steps": args.steps}, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
