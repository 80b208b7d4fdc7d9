"""Peak memory of a process that serves GPT-2 of published size on a CPU, with its weights in fp32 and stored low.

    python -m examples.stored_low

Each row is a fresh process that loads the weights from a file, compiles and calls the model. Weights are random.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import amp_fx

TOKENS = torch.arange(64).reshape(1, 64)

#: what a process loads, and the option "weights" of the backend
ROWS = [("fp32", "auto"), ("low", "auto"), ("fp32", "cast"), ("low", "cast")]


def build(device: str) -> Any:
    """GPT-2 as published: 124M parameters."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.device(device):
        return GPT2LMHeadModel(GPT2Config(use_cache=False)).eval()


def save(folder: Path) -> None:
    """Writes the weights in fp32, and as :func:`amp_fx.store_low` leaves them."""
    model = build("cpu")
    torch.save(model.state_dict(), folder / "fp32.pt")
    print(amp_fx.store_low(model, TOKENS), flush=True)
    torch.save(model.state_dict(), folder / "low.pt")


def serve(file: Path, weights: str) -> None:
    """Calls the model, and prints the most megabytes that the process had in memory."""
    model = build("meta")
    model.load_state_dict(torch.load(file), assign=True)
    model.tie_weights()
    amp_fx.store_low(model)
    run = torch.compile(model, backend="amp_fx", options={"weights": weights})
    with torch.inference_mode():
        for _ in range(3):
            run(TOKENS)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6)


def main() -> None:
    """Runs every row in a process of its own."""

    def run(*args: object, **kwargs: Any) -> Any:
        command = [sys.executable, "-m", "examples.stored_low", *map(str, args)]
        return subprocess.run(command, check=True, text=True, **kwargs)

    with tempfile.TemporaryDirectory() as folder:
        run(folder)
        for file, weights in ROWS:
            peak = float(
                run(Path(folder, f"{file}.pt"), weights, stdout=subprocess.PIPE).stdout.splitlines()[-1]
            )
            print(f"{file:5} weights={weights!r}: peak {peak:.0f} MB", flush=True)


if __name__ == "__main__":
    match sys.argv[1:]:
        case [folder]:
            save(Path(folder))
        case [file, weights]:
            serve(Path(file), weights)
        case _:
            main()
