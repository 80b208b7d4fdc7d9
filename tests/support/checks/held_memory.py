"""What is held in memory, by weights' copies and by torch's allocator at once; compiles; and processes of their own."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amp_fx.compiler.compiling
from amp_fx import weights


class Compiles:
    """Counts how often Inductor is asked for a graph."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        original = amp_fx.compiler.compiling.compile_with_inductor

        def count(*args: Any) -> Any:
            self.count += 1
            return original(*args)

        monkeypatch.setattr(amp_fx.compiler.compiling, "compile_with_inductor", count)


class Held:
    """Bytes that the models of one test make the process hold."""

    def __init__(self) -> None:
        # models of other tests that are garbage
        gc.collect()
        self._before = weights.held_bytes()

    def bytes(self) -> int:
        return weights.held_bytes() - self._before


def double(model: nn.Module) -> None:
    """As no version tells, such as weights that a trainer sends."""
    for p in model.parameters():
        p.data.mul_(2.0)


def served(model: nn.Module, x: Tensor, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    """A model, compiled and called often enough that copies of its weights are there."""
    torch._dynamo.reset()
    compiled: Any = torch.compile(model, backend="amp_fx", options=options)
    for _ in range(3):
        compiled(x)
    return compiled


@torch.inference_mode()
def renewed(model: nn.Module, x: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Results before weights on a GPU change, and after: compiled, without a wait of the host, and in fp64."""
    compiled = served(model, x, options)
    before = compiled(x)
    double(model)
    try:
        torch.cuda.set_sync_debug_mode("error")
        after = compiled(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return before, after, copy.deepcopy(model).double()(x.double())


def run_python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own, which imports what this one does and must succeed."""
    path = os.pathsep.join(filter(None, sys.path))
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,  # what hangs, hangs forever
    )
    assert done.returncode == 0, done.stderr
    return done
