"""Trains a small GPT on made sums through ``backend="amp_fx"``, beside fp32 and ``torch.autocast``.

The three runs start from the same weights, see the same batches and take turns at every step, so that their
losses and their times can be compared. Takes less than 90 seconds on two idle cores, compiling included.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import shutil
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

import amp_fx
from gpt import GPT, GPTConfig, get_batch, make_corpus


@dataclass
class Run:
    """One of the runs: a compiled model, its optimizer, and what was measured."""

    name: str
    backend: str
    autocast: bool
    model: GPT
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.compiled = torch.compile(self.model, backend=self.backend)

    def step(self, tokens: Tensor, targets: Tensor) -> None:
        start = time.perf_counter()
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            loss = self.compiled(tokens, targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())
        self.seconds.append(time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument(
        "--seconds",
        type=float,
        default=70,
        help="stop training so long after the start (default: %(default)s)",
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the pictures (default: %(default)s)"
    )
    arguments = parser.parse_args()

    deadline = time.monotonic() + arguments.seconds
    torch.manual_seed(0)
    config = GPTConfig()
    model = GPT(config)
    runs = [
        Run("fp32 + compile", "inductor", False, copy.deepcopy(model)),
        Run("autocast + compile", "inductor", True, copy.deepcopy(model)),
        Run("amp_fx", "amp_fx", False, copy.deepcopy(model)),
    ]
    size = sum(parameter.numel() for parameter in model.parameters())
    tokens = f"{arguments.batch} x {config.context} tokens a step"
    print(f"Training a GPT three times from the same weights: {', '.join(run.name for run in runs)}")
    print(f"{size / 1e6:.1f}M parameters, {config.layers} layers, {tokens}; made data, nothing is downloaded")

    corpus = make_corpus()
    first = get_batch(corpus, 0, arguments.batch, config.context)
    total = len(runs) + arguments.steps - 1
    # no estimate of what remains: a step that compiles says nothing of one that trains
    look = "{l_bar}{bar}| {n_fmt}/{total_fmt} steps [{elapsed}]"
    with tqdm(total=total, bar_format=look, dynamic_ncols=True) as bar, ticking(bar):
        for number, run in enumerate(runs, 1):
            bar.set_description(f"compiling {number} of {len(runs)}, {run.name}")
            run.step(*first)
            bar.write(f"compiled {run.name:<20} in {run.seconds.pop():5.1f} s")
            bar.update()
        bar.set_description("training")
        for step in range(1, arguments.steps):
            batch = get_batch(corpus, step, arguments.batch, config.context)
            for turn in range(len(runs)):
                runs[(turn + step) % len(runs)].step(*batch)
            bar.set_postfix_str(
                ", ".join(f"{run.name.split()[0]} {run.losses[-1]:.3f}" for run in runs), refresh=False
            )
            bar.update()
            if time.monotonic() > deadline:
                break

    print_losses(runs)
    print_speed(runs)
    print("\nWhat amp_fx decided, and what it costs (graphs only, a few seconds):", flush=True)
    report = amp_fx.explain(runs[-1].compiled, *first)
    print(f"\n{report}\n\n{report.table()}")
    write_pictures(arguments.out, runs, report)
    print(f"\n{gain(runs)}")


@contextlib.contextmanager
def ticking(bar: tqdm) -> Iterator[None]:
    """Redraws the bar twice a second, so that its clock runs while Inductor compiles."""
    done = threading.Event()

    def redraw() -> None:
        while not done.wait(0.5):
            bar.refresh()

    thread = threading.Thread(target=redraw, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def gain(runs: list[Run]) -> str:
    """What was gained, in one line."""
    fp32, autocast, ours = (statistics.median(run.seconds) for run in runs)
    loss = runs[2].losses[-1] / runs[0].losses[-1] - 1
    return (
        f"amp_fx took {ours / fp32:.2f} of fp32's time a step and {ours / autocast:.2f} of autocast's on this machine; "
        f"its last loss differs from fp32's by {loss:+.2%}."
    )


def print_losses(runs: list[Run], rows: int = 8, window: int = 10) -> None:
    print(
        f"\nLoss, mean of {window} steps\n  step"
        + "".join(f"{run.name:>20}" for run in runs)
        + "   amp_fx / fp32"
    )
    steps = len(runs[0].losses)
    for end in sorted({max(1, steps * row // rows) for row in range(1, rows + 1)}):
        means = [statistics.fmean(run.losses[max(0, end - window) : end]) for run in runs]
        print(
            f"{end:>6}" + "".join(f"{mean:>20.4f}" for mean in means) + f"{means[-1] / means[0] - 1:>+15.2%}"
        )


def print_speed(runs: list[Run]) -> None:
    print("\nSpeed, taking turns (forward, backward, optimizer)")
    medians = [statistics.median(run.seconds) for run in runs]
    for run, median in zip(runs, medians, strict=True):
        print(f"  {run.name:<20}{median * 1e3:8.1f} ms a step (median), {medians[0] / median:5.2f}x fp32")


def write_pictures(folder: Path, runs: list[Run], report: amp_fx.Report) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    curves = folder / "train_gpt.svg"
    curves.write_text(loss_curves(runs))
    print(f"\nloss curves: {curves}")
    print(f"where the casts are: {report.save(folder / 'train_gpt_casts.html')}")
    # Graphviz draws the same without a browser, where it is installed
    if shutil.which("dot"):
        print(f"the same, drawn by Graphviz: {report.save(folder / 'train_gpt_casts.svg')}")


def loss_curves(runs: list[Run], width: int = 720, height: int = 360, margin: int = 48) -> str:
    """The losses as an SVG picture, with no plotting library to install."""
    colors = ("#888888", "#dd8452", "#4c72b0")
    low, high = 0.0, max(max(run.losses) for run in runs)
    last = max(len(runs[0].losses) - 1, 1)

    def point(step: int, loss: float) -> str:
        x = margin + step / last * (width - 2 * margin)
        y = height - margin - (loss - low) / (high - low) * (height - 2 * margin)
        return f"{x:.1f},{y:.1f}"

    (x0, y0), (x1, y1) = (margin, height - margin), (width - margin, margin)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"',
        ' font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<path d="M{x0},{y1} V{y0} H{x1}" fill="none" stroke="black"/>',
        f'<text x="{x1}" y="{y0 + 20}" text-anchor="end">step {last}</text>',
        f'<text x="{x0 - 6}" y="{y1 + 4}" text-anchor="end">{high:.2f}</text>',
        f'<text x="{x0 - 6}" y="{y0 + 4}" text-anchor="end">{low:.0f}</text>',
    ]
    for row, (run, color) in enumerate(zip(runs, colors, strict=True)):
        points = " ".join(point(step, loss) for step, loss in enumerate(run.losses))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        parts.append(
            f'<text x="{x1}" y="{y1 + 16 * row}" text-anchor="end" fill="{color}">{escape(run.name)}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
