"""Trains small models on real data for thousands of steps, in each precision.

    OMP_NUM_THREADS=1 python -m benchmarks.long_runs [--tasks NAME ...] [--steps 2000] [--seeds 0 1 2]
                                                     [--json FILE]

All arms start from the same weights and see the same batches. What a model has learned is measured in fp32.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch

import amp_fx
from benchmarks.arms import ARMS, Arm
from benchmarks.learning import TASKS, Task
from benchmarks.results import arguments, describe, read, write

#: arm -> label, and its line: colour and dashes; a device that gains nothing goes low, too
SHOWN = {
    "fp32": ("fp32", "#000000", "-"),
    "autocast": ("autocast bf16", "#D55E00", "--"),
    "off": ("amp_fx bf16", "#0072B2", "-."),
    "saved_int8": ("amp_fx bf16, activations in 8 bits", "#CC79A7", "-"),
    "amp_fx_scaler": ("amp_fx fp16 + scaler", "#009E73", ":"),
}

#: steps whose losses are one point of a curve
_POINT = 20


@dataclass(frozen=True)
class Run:
    """One training: mean losses of :data:`_POINT` steps each, what was learned, and steps that the scaler skipped."""

    task: str
    arm: str
    seed: int
    measured: str
    curve: tuple[float, ...]
    result: float
    skipped: int


def train(name: str, task: Task, arm: Arm, seeds: Sequence[int], steps: int) -> list[Run]:
    """Trains a task's model once for each seed. It is compiled once."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = task.make()
    scaler = amp_fx.GradScaler("cpu") if arm.scaler else None
    options = None if arm.options is None else dict(arm.options)
    step_of = model if arm.backend is None else torch.compile(model, backend=arm.backend, options=options)
    runs = []
    for seed in seeds:
        torch.manual_seed(seed)
        model.load_state_dict(task.make().state_dict())
        optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate)
        losses, skipped = [], 0
        for step in range(steps):
            with torch.autocast("cpu", arm.dtype, enabled=arm.autocast):
                loss = step_of(*task.batch(step, seed))
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                before = scaler.get_scale()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                skipped += scaler.get_scale() < before
            optimizer.zero_grad()
            losses.append(loss.item())
        curve = tuple(fmean(losses[at : at + _POINT]) for at in range(0, steps, _POINT))
        runs.append(Run(name, arm.name, seed, task.measured, curve, task.measure(model), skipped))
    return runs


def read_runs(path: Path) -> list[Run]:
    """What is in a results file."""
    return [Run(**{**row, "curve": tuple(row["curve"])}) for row in read(path)[1]]


def table(runs: Sequence[Run]) -> str:
    """As Markdown: what was learned, mean over the seeds and the range."""
    lines = ["| task | measured | " + " | ".join(label for label, *_ in SHOWN.values()) + " |"]
    lines.append("|---" * (2 + len(SHOWN)) + "|")
    for task in dict.fromkeys(run.task for run in runs):
        cells = []
        for arm in SHOWN:
            found = [run for run in runs if (run.task, run.arm) == (task, arm)]
            results = [run.result for run in found]
            if not results:
                cells.append("-")
                continue
            cell = f"{fmean(results):.4f} ({min(results):.4f}-{max(results):.4f})"
            skipped = sum(run.skipped for run in found)
            cells.append(f"{cell}, {skipped} skipped" if skipped else cell)
        measured = next(run.measured for run in runs if run.task == task)
        lines.append(f"| {task} | {measured} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw(runs: Sequence[Run], path: Path) -> None:
    """Training losses by step: a line for the mean of an arm's seeds, and between the lowest and highest a band."""
    from matplotlib.figure import Figure

    tasks = list(dict.fromkeys(run.task for run in runs))
    figure = Figure(figsize=(4.6 * len(tasks), 3.6), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        for arm, (label, colour, dashes) in SHOWN.items():
            curves = [run.curve for run in runs if (run.task, run.arm) == (task, arm)]
            if not curves:
                continue
            points = list(zip(*curves, strict=True))
            at = [_POINT * (i + 1) for i in range(len(points))]
            axes.fill_between(
                at, [*map(min, points)], [*map(max, points)], color=colour, alpha=0.12, linewidth=0
            )
            axes.plot(at, [*map(fmean, points)], dashes, color=colour, label=label, linewidth=1.4)
        axes.set(title=task, xlabel="step", yscale="log")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("training loss")
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments("benchmarks.long_runs", __doc__, device=False)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args(argv)
    runs: list[Run] = []
    header = {**describe("cpu"), "steps": args.steps}
    for name in args.tasks:
        task = TASKS[name]()
        for arm in SHOWN:
            print(f"{name} {arm}", file=sys.stderr, flush=True)
            runs += train(name, task, ARMS[arm], args.seeds, args.steps)
            if args.json:
                write(args.json, header, runs)
    print(table(runs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
