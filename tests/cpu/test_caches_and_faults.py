"""Compile caches that are shared, missed or broken; a compiler that is missing; memory over many calls."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import amp_fx
import amp_fx.compiling
from amp_fx import GradScaler, record
from amp_fx.passes.forward import classify
from graphs import DEFAULTS, without_inductor

# ---- caches ----


def program(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh() @ w


def cache_events(**options: Any) -> tuple[int, int]:
    """Hits and misses of AOTAutograd's cache, which holds Inductor's, while the program is compiled."""
    torch._dynamo.reset()
    counters.clear()
    x, w = torch.ones(8, 8), torch.ones(8, 8)
    torch.compile(program, backend="amp_fx", options={**DEFAULTS, **options})(x, w)
    found = counters["aot_autograd"]
    return found["autograd_cache_hit"], found["autograd_cache_miss"]


def test_the_same_options_share_an_entry_and_different_decisions_never_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missed, hit = (0, 1), (1, 0)
    policy = {"base": "autocast", "rules": [{"op": "tanh", "precision": "fp32"}]}
    lookup = classify.lookup
    with fresh_cache():
        assert cache_events() == missed
        assert cache_events() == hit
        assert cache_events(policy=policy) == missed
        assert cache_events(dtype="float16") == missed
        with monkeypatch.context() as patch:
            # an op list that does not know matmul
            patch.setattr(classify, "lookup", lambda op, d: None if "matmul" in str(op) else lookup(op, d))
            assert cache_events() == missed
        assert cache_events() == hit


# ---- faults ----

#: compiles three times, and prints why it cannot; the caches are in the folder that is named
_SCRIPT = """
import os, resource, sys, torch

def attempt():
    torch._dynamo.reset()
    options = {"profile": "off"}
    try:
        torch.compile(lambda x: (x @ x).tanh(), backend="amp_fx", options=options)(torch.ones(8, 8))
    except Exception as error:
        print(repr(str(error)))

attempt()
torch._inductor.config.cpp.cxx = (None, "g++")
# a file where the directory should be: permissions do not stop root
open(sys.argv[1] + "/blocked", "w").close()
os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1] + "/blocked/cache"
attempt()
# no file can grow beyond 100 bytes: a write fails half-way
os.environ["TORCHINDUCTOR_CACHE_DIR"] = sys.argv[1] + "/full"
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
attempt()
"""


def test_a_missing_compiler_a_blocked_cache_and_a_full_disk_are_named(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    environment = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", _SCRIPT, str(tmp_path)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    compiler, blocked, full = done.stdout.splitlines()
    assert "InvalidCxxCompiler" in compiler
    assert str(tmp_path / "blocked") in blocked
    assert "File too large" in full
    assert "FallbackWarning" not in done.stderr


# ---- memory ----


def resident() -> int:
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, as on Linux")


@pytest.fixture
def graphs_made(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[fx.GraphModule]]:
    """Weak references to every graph that reaches the compiler; it runs them op by op."""
    made: list[weakref.ref[fx.GraphModule]] = []

    def run_eagerly(gm: fx.GraphModule, inputs: Any, config_patches: Any) -> Callable[..., Any]:
        made.append(weakref.ref(gm))
        return gm.forward

    monkeypatch.setattr(amp_fx.compiling, "compile_with_inductor", run_eagerly)
    return made


@needs_proc
def test_100_recompiles_leave_nothing_behind(graphs_made: list[weakref.ref[fx.GraphModule]]) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)

    def recompile(times: int) -> None:
        for _ in range(times):
            torch._dynamo.reset()
            torch.compile(program, backend="amp_fx", options=dict(DEFAULTS))(x, w)

    recompile(20)
    gc.collect()
    before = resident()
    recompile(80)
    torch._dynamo.reset()
    gc.collect()
    assert len(graphs_made) == 100
    assert sum(graph() is not None for graph in graphs_made) <= 2
    assert resident() - before < 12e6


@needs_proc
def test_10_000_inference_calls_do_not_grow_the_process() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 8)
    own = torch.compile(model, backend="amp_fx", options=dict(DEFAULTS))
    with torch.inference_mode(), record() as recording:
        for _ in range(500):
            own(x)
        gc.collect()
        before = resident()
        for _ in range(10_000):
            own(x)
        gc.collect()
        assert resident() - before < 4e6
    assert len(recording.plans) == 1


@pytest.mark.parametrize("scaled", [False, True], ids=["bf16", "fp16 with a scaler"])
def test_a_dropped_model_is_freed(scaled: bool) -> None:
    model = nn.Linear(4, 4)
    scaler = GradScaler("cpu") if scaled else torch.amp.GradScaler("cpu", enabled=False)
    options = {"dtype": "float16", "scaler": "default"} if scaled else {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with without_inductor(), record() as recording:
        own = torch.compile(model, backend="amp_fx", options={**DEFAULTS, **options})
        loss = own(torch.randn(2, 4)).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    gone = [weakref.ref(value) for value in (model, model.weight)]
    del model, own, loss, optimizer
    torch._dynamo.reset()
    gc.collect()
    # the scaler and the plans outlive the model, and do not hold it
    assert [value() for value in gone] == [None, None]
    assert len(recording.plans) == 1
    assert scaler.get_scale() > 0
