"""Memory of a process that serves GPT-2 of published size on a CPU, with its weights in fp32, bf16 and int8.

    python -m examples.stored_low

Each row is a fresh process that makes the model, stores its weights low, compiles and calls it. What is told is the
most that was resident from the compilation on, torch's own memory and the compiler's included. Linux only.
"""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import amp_fx

TOKENS = torch.arange(64).reshape(1, 64)

#: how weights are stored -> policy
POLICIES = {"fp32": "autocast", "bf16": "autocast", "int8": "int8"}


def serve(stored: str, weights: str) -> None:
    """Calls the model, and prints the most megabytes that the process had in memory."""
    from transformers import GPT2Config, GPT2LMHeadModel

    options: dict[str, Any] = {"policy": POLICIES[stored], "weights": weights}
    model = GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()
    told = "" if stored == "fp32" else f"; {amp_fx.store_low(model, TOKENS, options=options)}"
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    # the peak so far is forgotten
    Path("/proc/self/clear_refs").write_text("5")
    run = torch.compile(model, backend="amp_fx", options=options)
    with torch.inference_mode():
        for _ in range(3):
            run(TOKENS)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    peak = int(status["VmHWM"].split()[0]) * 1024 / 1e6
    print(f"{stored} weights={weights!r}: peak {peak:.0f} MB{told}", flush=True)


def main() -> None:
    """Runs every row in a process of its own."""
    for weights in ("auto", "cast"):
        for stored in POLICIES:
            subprocess.run([sys.executable, "-m", "examples.stored_low", stored, weights], check=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        serve(*sys.argv[1:])
    else:
        main()
