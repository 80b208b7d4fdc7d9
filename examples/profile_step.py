"""Profile one training step: which kernels compute, which only cast, and what autograd copies afterwards.

    python examples/profile_step.py [--autocast] [--trace step.json]

The table has a line per kernel; a cast kernel is one whose name has ``_to_copy`` and no other op. docs/profiling.md
says how to read it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from gpt import GPT, GPTConfig


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--autocast", action="store_true", help="torch.autocast and plain Inductor instead of amp_fx"
    )
    parser.add_argument(
        "--trace", metavar="FILE", help="write a trace for chrome://tracing or ui.perfetto.dev"
    )
    args = parser.parse_args(argv)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = GPTConfig(vocab=64, context=64, layers=1, width=128)
    model = GPT(config).to(device)
    tokens = torch.randint(config.vocab, (4, config.context + 1), device=device)
    # CPU kernels are marked only on request; amp_fx hands Inductor's options on
    options: dict[str, Any] = {"cpp.enable_kernel_profile": True}
    if args.autocast:
        compiled = torch.compile(model, options=options)
    else:
        # profile "off": on every machine the listed ops run low, so that there are casts to see
        compiled = torch.compile(model, backend="amp_fx", options={**options, "profile": "off"})

    def step() -> None:
        model.zero_grad()
        with torch.autocast(device, torch.bfloat16, enabled=args.autocast):
            loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()

    for _ in range(3):  # compile and warm up
        step()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as profiled:
        step()
        if device == "cuda":
            torch.cuda.synchronize()
    print(
        profiled.key_averages().table(
            sort_by=f"self_{device}_time_total", row_limit=30, max_name_column_width=80
        )
    )
    if args.trace:
        profiled.export_chrome_trace(args.trace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
