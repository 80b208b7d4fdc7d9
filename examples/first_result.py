"""Seconds until a process has the first result of a compiled model: with empty caches, and with those of another.

    python -m examples.first_result

BERT of 6 layers x 768 and a ResNet-18 under ``torch.inference_mode``, each row in processes of its own. Imports and the
making of the model do not count, what compiling imports does.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
from torch import nn

#: what compiles -> options of amp_fx; None is torch.compile under torch.autocast
WAYS: dict[str, dict[str, Any] | None] = {
    "autocast": None,
    "amp_fx": {},
    "int8": {"policy": "int8"},
    # the file of a plan by measured scales is beside the caches
    "measured": {"plan": None},
    "stored low": {},
}


def model(name: str) -> tuple[nn.Module, torch.Tensor]:
    """A model at random weights, and a batch."""
    from transformers import BertConfig, BertModel, ResNetConfig, ResNetModel

    if name == "bert":
        return BertModel(BertConfig(num_hidden_layers=6)).eval(), torch.arange(128).reshape(1, 128)
    config = ResNetConfig(
        depths=[2] * 4, hidden_sizes=[64, 128, 256, 512], layer_type="basic", embedding_size=64
    )
    return ResNetModel(config).eval(), torch.randn(4, 3, 160, 160)


def first_result(name: str, way: str) -> float:
    """Seconds of one process."""
    program, batch = model(name)
    options, around, kwargs = WAYS[way], contextlib.nullcontext(), dict[str, Any]()
    if options is None:
        around = torch.autocast("cpu", torch.bfloat16)
    else:
        import amp_fx

        if "plan" in options:
            options = {"plan": os.path.join(os.environ["TORCHINDUCTOR_CACHE_DIR"], "plan.json")}
        kwargs = {"backend": "amp_fx", "options": options}
        if way == "stored low":
            amp_fx.store_low(program, batch)
    start = time.perf_counter()
    with torch.inference_mode(), around:
        torch.compile(program, **kwargs)(batch)
    return time.perf_counter() - start


def save_plan(name: str, path: str) -> None:
    """Everything in int8 by measured scales, whatever the error."""
    import amp_fx

    program, batch = model(name)
    amp_fx.calibrate(program, batch, of="outputs", policy="int8").plan(budget=100, verify=False).save(path)


def main() -> None:
    """Runs every row twice, each time in a process of its own."""
    for name in ("bert", "resnet18"):
        for way in WAYS:
            with tempfile.TemporaryDirectory() as cache:
                environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
                if way == "measured":
                    save_plan(name, os.path.join(cache, "plan.json"))
                command = [sys.executable, "-W", "ignore", "-m", "examples.first_result", name, way]
                seconds = [subprocess.check_output(command, env=environment, text=True) for _ in range(2)]
            print(f"{name}, {way}: cold {float(seconds[0]):.1f}, warm {float(seconds[1]):.1f}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(first_result(*sys.argv[1:]))
    else:
        main()
