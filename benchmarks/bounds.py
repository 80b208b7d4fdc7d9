"""What amp_fx costs besides the kernels, each beside the bound that it is held to; in one run, arms in turn.

    OMP_NUM_THREADS=1 python -m benchmarks.bounds
    OMP_NUM_THREADS=1 python -m benchmarks.bounds --only capture

Ratios are medians over pairs of neighbouring rounds, then of the fastest rounds: other work on the machine only slows
rounds down. Models are small, so that the cost beside the kernels is seen.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.fx as fx
from torch import Tensor, nn

import amp_fx
from amp_fx import weights
from amp_fx._torch import stock_inductor
from amp_fx.graphs.regions import ambient_regions
from amp_fx.options import Options
from amp_fx.rewriting import rewrite
from amp_fx.scaling.unscaled import expect_scaler
from benchmarks import many_nodes, workloads

__all__ = ["BOUNDS", "Measured", "rounds"]

#: rounds, and calls in each
_ROUNDS, _CALLS = 300, 5

_LOW: dict[str, Any] = {"profile": "off"}


@dataclass(frozen=True)
class Measured:
    """One number.

    Attributes:
        what: in words.
        median: of all rounds.
        best: of the fastest rounds.
        bound: neither should be above it.
        unit: of the three.
    """

    what: str
    median: float
    best: float
    bound: float
    unit: str = ""

    def __str__(self) -> str:
        numbers = (f"{self.median:.2f}", f"{self.best:.2f}", f"{self.bound:g}")
        return f"| {self.what} | " + " | ".join(f"{number} {self.unit}".strip() for number in numbers) + " |"


def rounds(
    arms: Mapping[str, Callable[[], object]], count: int = _ROUNDS, calls: int = _CALLS
) -> dict[str, list[float]]:
    """Seconds of a call of each arm, round by round, in turn; warm."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for name, arm in arms.items():
        for _ in range(20):
            arm()
        found[name] = []
    for _ in range(count):
        for name, arm in arms.items():
            start = time.perf_counter()
            for _ in range(calls):
                arm()
            found[name].append((time.perf_counter() - start) / calls)
    return found


def _ratio(what: str, above: list[float], below: list[float], bound: float) -> Measured:
    pairs = [a / b for a, b in zip(above, below, strict=True)]
    return Measured(what, statistics.median(pairs), min(above) / min(below), bound)


def _linears(width: int, layers: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))


def _ours(model: nn.Module, **options: Any) -> Callable[..., Tensor]:
    return torch.compile(model, backend="amp_fx", options={**_LOW, **options})


def _inference(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], object]:
    def call() -> Tensor:
        with torch.inference_mode():
            return run(x)

    return call


def calls() -> list[Measured]:
    """A call of two small layers, beside stock torch.compile inside autocast."""
    model, x = _linears(64, 2), torch.randn(8, 64)
    stock = torch.compile(model, backend=stock_inductor)

    def under_autocast() -> Tensor:
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            return stock(x)

    arms = {"stock": under_autocast}
    arms |= {w: _inference(_ours(_copy(model), weights=w), x) for w in ("auto", "cast", "cache", "freeze")}
    found = rounds(arms)
    return [
        _ratio(
            f"a call of 2 x Linear(64), weights={way!r}, of stock inside autocast", times, found["stock"], 1.0
        )
        for way, times in found.items()
        if way != "stock"
    ]


def _copy(model: nn.Sequential) -> nn.Sequential:
    """The same shapes in modules of their own: compiled code belongs to a module."""
    return _linears(model[0].in_features, len(model))  # pyright: ignore[reportArgumentType]  # a Linear


def teacher() -> list[Measured]:
    """A teacher that is called between a student's training steps."""
    teaching, x = _inference(_ours(_linears(256, 24)), torch.randn(8, 256)), torch.randn(8, 64)
    student = _linears(64, 2)
    run, optimizer = _ours(student), torch.optim.SGD(student.parameters(), lr=1e-6)

    def step() -> None:
        run(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def both() -> None:
        teaching()
        step()

    found = rounds({"teacher": teaching, "student": step, "both": both})
    alone = [a + b for a, b in zip(found["teacher"], found["student"], strict=True)]
    return [_ratio("teacher (24 x 256) and student in turns, of the sum", found["both"], alone, 1.15)]


def backbone() -> list[Measured]:
    """Two models that share their first layer."""
    first = nn.Linear(64, 64)
    x = torch.randn(8, 64)
    one, two = (_inference(_ours(nn.Sequential(first, nn.Linear(64, 64))), x) for _ in range(2))

    def both() -> None:
        one()
        two()

    found = rounds({"one": one, "two": two, "both": both})
    alone = [a + b for a, b in zip(found["one"], found["two"], strict=True)]
    return [
        _ratio("two models that share their first weight in turns, of the sum", found["both"], alone, 1.1)
    ]


def scaler() -> list[Measured]:
    """A whole fp16 step of a small model, beside torch's scaler outside the graph."""
    arms, keep = {}, []
    x = torch.randn(8, 8)
    for kind in ("torch", "amp_fx"):
        model = _linears(8, 3)
        scale = (
            torch.amp.GradScaler("cpu", init_scale=128.0)
            if kind == "torch"
            else amp_fx.GradScaler("cpu", init_scale=128.0, name="bounds")
        )
        named = {} if kind == "torch" else {"scaler": "bounds"}
        run = _ours(model, dtype="float16", **named)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

        def step(
            scale: torch.amp.GradScaler = scale,
            run: Callable[..., Tensor] = run,
            optimizer: torch.optim.Optimizer = optimizer,
        ) -> None:
            scale.scale(run(x).square().mean()).backward()
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()

        keep.append(scale)
        arms[kind] = step
    found = rounds(arms)
    return [
        _ratio(
            "an fp16 step of 3 x Linear(8), of torch.amp.GradScaler's", found["amp_fx"], found["torch"], 1.0
        )
    ]


def objects() -> list[Measured]:
    """Asking whether anything scales, in a process with 2.5 million objects."""
    held = [[number] for number in range(2_500_000)]
    plan = SimpleNamespace(nodes=[SimpleNamespace(dtype=torch.float16)])
    times = []
    for _ in range(20):
        model = nn.Linear(4, 4)
        start = time.perf_counter()
        expect_scaler(plan, list(model.parameters()))  # pyright: ignore[reportArgumentType]  # all that it reads
        times.append(1e3 * (time.perf_counter() - start))
    what = f"looking for a loss scaler among {len(gc.get_objects()) / 1e6:.1f} million objects"
    del held
    return [Measured(what, statistics.median(times), min(times), 50, "ms")]


def capture() -> list[Measured]:
    """Capture and passes, per node of Dynamo's graph: processor time of this process."""
    found = []
    for name in ("gpt2", "bert", "llama", "t5", "vit", "resnet", *many_nodes.MODELS):
        if name in many_nodes.MODELS:
            model, batch = many_nodes.MODELS[name]()
        else:
            work = workloads.make(name)
            model, batch = work.model, work.batch
        graphs: list[fx.GraphModule] = []
        torch._dynamo.reset()

        def keep(
            gm: fx.GraphModule, inputs: object, graphs: list[fx.GraphModule] = graphs
        ) -> Callable[..., object]:
            graphs.append(gm)
            return gm.forward

        torch.compile(model, backend=keep)(**batch)
        nodes = sum(len(gm.graph.nodes) for gm in graphs)
        regions, times = ambient_regions({"cpu": torch.bfloat16}), []
        for _ in range(5):
            start = time.process_time()
            for gm in graphs:
                rewrite(gm, regions, Options(profile="off"), training=True)
            times.append(1e3 * (time.process_time() - start) / nodes)
        found.append(
            Measured(
                f"capture and passes of {name}, {nodes} nodes",
                statistics.median(times),
                min(times),
                1.5,
                "ms a node",
            )
        )
    return found


def memory() -> list[Measured]:
    """What low weights take under ``inference_mode``, of one low copy of every parameter."""
    found = []
    for name in ("gpt2", "bert", "llama", "t5", "vit", "resnet"):
        torch._dynamo.reset()
        work = workloads.make(name)
        model = work.model.eval()
        before = weights.held_bytes()
        with torch.inference_mode():
            torch.compile(model, backend="amp_fx", options=_LOW)(**work.batch)
        held = weights.held_bytes() - before
        ratio = held / sum(2 * p.numel() for p in model.parameters())
        found.append(Measured(f"low weights of {name}, of one low copy of each", ratio, ratio, 1.1))
    return found


BOUNDS: dict[str, Callable[[], list[Measured]]] = {
    measure.__name__: measure for measure in (calls, teacher, backbone, scaler, objects, capture, memory)
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=BOUNDS, default=list(BOUNDS), metavar="NAME")
    names = parser.parse_args().only
    print("| what | median | fastest | bound |\n|---|---|---|---|")
    for name in names:
        for row in BOUNDS[name]():
            print(row, flush=True)


if __name__ == "__main__":
    main()
