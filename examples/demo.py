"""What amp_fx is for, in three acts on a CPU: a run that autocast spoils, inference, and a plan for a GPU.

Takes about 80 seconds on two idle cores, compiling included; downloads nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import logging
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import config as inductor

import amp_fx
from gpt import large
from kelvin import Station, batch, train

#: so small a model would stay in fp32 otherwise: casts cost it more than bf16 saves
SMALL = amp_fx.options(profile="off")

GPU = "cuda:h100"
WIDTH, LAYERS = 2048, 4
ROUNDS, STEPS = 15, 10


def heal() -> None:
    """Act 1."""
    print("1. A model that mixed precision spoils: sensors in kelvin, 300 steps, one seed for all")
    exact = Station()
    fp32 = train(exact)
    print(f"   fp32                        loss {fp32:.3f}")
    low = Station()
    spoilt = train(low, torch.compile(low, backend="amp_fx", options=SMALL))
    print(f"   bf16 by autocast's op lists loss {spoilt:.3f}")
    cal = amp_fx.calibrate(exact, [batch(number) for number in range(4)], profile="off")
    plan = cal.plan(budget=0.1, verify=False)
    kept = [row for each in plan.plans for row in each.nodes if row.flops and row.dtype is torch.float32]
    print(
        f"   amp_fx.calibrate keeps {len(kept)} of 3 matmuls in fp32: {', '.join(row.module_path for row in kept)}"
    )
    healed = Station()
    loss = train(
        healed, torch.compile(healed, backend="amp_fx", options=amp_fx.options(profile="off", plan=plan))
    )
    print(f"   bf16 with that plan         loss {loss:.3f}\n")


def serve() -> None:
    """Act 2."""
    torch.set_num_threads(1)
    print(
        f"2. Inference on this CPU: {LAYERS} x Linear({WIDTH}) with ReLU, one row, processor time of one thread"
    )
    x = torch.randn(1, WIDTH)
    with torch.inference_mode():
        hows: dict[str, dict[str, Any]] = {
            "autocast": {"autocast": True},
            "autocast, frozen": {"autocast": True, "freezing": True},
            "amp_fx": {"backend": "amp_fx"},
            "amp_fx, int8": {"backend": "amp_fx", "options": {"policy": "int8"}},
        }
        arms = {name: compiled(name, x, **how) for name, how in hows.items()}
        times: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(ROUNDS * len(arms)):
            name = list(arms)[turn % len(arms)]
            times[name].append(milliseconds(arms[name]))
    spread = {name: statistics.quantiles(found, n=4) for name, found in times.items()}
    for name, (low, median, high) in spread.items():
        print(f"   {name:18}{median:6.2f} ms ({low:.2f} to {high:.2f})")
    if spread["amp_fx"][2] < spread["autocast"][0]:
        ratio = spread["amp_fx"][1] / spread["autocast"][1]
        print(f"   amp_fx takes {ratio:.2f} of autocast's time, and its weights may change\n")
    else:
        print("   the times differ by less than they scatter: no verdict\n")


def compiled(
    name: str, x: Tensor, *, autocast: bool = False, freezing: bool = False, **how: Any
) -> Callable[[], Tensor]:
    """A call of the model, compiled."""
    torch.manual_seed(0)
    # Dynamo shares what it compiles between models whose forward is one code object
    forward = nn.Sequential.forward
    own = FunctionType(forward.__code__.replace(co_name=name), forward.__globals__)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    program = torch.compile(type("Model", (nn.Sequential,), {"forward": own})(*layers).eval(), **how)

    def call() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            return program(x)

    with inductor.patch(freezing=freezing):
        call()
    return call


def milliseconds(call: Callable[[], Tensor]) -> float:
    call()
    start = time.process_time()
    for _ in range(STEPS):
        call()
    return (time.process_time() - start) / STEPS * 1e3


def plan(folder: Path) -> None:
    """Act 3."""
    print(f"3. A training step of a GPT-2, 8 x 1024 tokens, planned for {GPU} without one")
    if importlib.util.find_spec("triton") is None:
        print('   takes Triton: pip install "amp_fx[targets]"')
        return
    model, tokens = large()
    report = amp_fx.explain(model, *tokens, target=GPU)
    ours, theirs = report.costs["amp_fx"], report.costs["torch.autocast"]
    print(f"   {'autocast':10}{(theirs.moved or 0) / 1e9:8.2f} GB moved, {theirs.kernels} kernels only cast")
    print(f"   {'amp_fx':10}{(ours.moved or 0) / 1e9:8.2f} GB moved, {ours.kernels} kernels only cast")
    folder.mkdir(parents=True, exist_ok=True)
    print(f"   where the casts are, a page for the browser: {report.save(folder / 'gpt2_on_h100.html')}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder of the picture (default: %(default)s)"
    )
    parser.add_argument("--acts", type=int, nargs="+", choices=(1, 2, 3), default=(1, 2, 3))
    arguments = parser.parse_args()
    logging.getLogger("amp_fx").setLevel(logging.ERROR)
    acts: dict[int, Callable[[], None]] = {1: heal, 2: serve, 3: lambda: plan(arguments.out)}
    for number in arguments.acts:
        acts[number]()


if __name__ == "__main__":
    main()
