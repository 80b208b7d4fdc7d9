"""Compile caches that are shared, missed or broken; a missing compiler; memory over many calls."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

import amp_fx
import amp_fx.compiler.compiling
from amp_fx import GradScaler, record
from amp_fx.compiler.settings import Options
from amp_fx.passes.forward import classify
from support.checks import option_pairs
from support.checks.held_memory import run_python
from support.checks.option_pairs import Row
from support.checks.option_runs import STEPS
from support.torch_versions import UP_TO_2_14
from support.tracing.captured_graphs import DEFAULTS, without_inductor

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


def test_the_same_options_share_an_entry_and_different_decisions_never_do() -> None:
    missed, hit = (0, 1), (1, 0)
    policy = {"base": "autocast", "rules": [{"op": "tanh", "precision": "fp32"}]}
    known = classify.lookup
    # which does not know matmul
    other = mock.patch.object(classify, "lookup", lambda op, d: None if "matmul" in str(op) else known(op, d))
    with fresh_cache():
        assert cache_events() == missed
        assert cache_events() == hit
        assert cache_events(policy=policy) == missed
        assert cache_events(dtype="float16") == missed
        with other:
            assert cache_events() == missed
        assert cache_events() == hit


def test_a_fallback_takes_no_kernels_that_stock_torch_compile_has_left_in_a_cache() -> None:
    # before torch 2.14 those do not wait before they read what they have written
    def alone(gm: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        return amp_fx.compiler.compiling.lower_as_it_is(gm, inputs, Options.parse(None, {}))

    found = []
    with fresh_cache():
        for backend in ("inductor", "inductor", alone, alone):
            torch._dynamo.reset()
            counters.clear()
            torch.compile(program, backend=backend)(torch.ones(8, 8), torch.ones(8, 8))
            found.append(counters["aot_autograd"]["autograd_cache_hit"])
            found.append(counters["inductor"]["fxgraph_cache_hit"])
    assert found == [0, 0, 1, 1, 0, 0, 1, 1]


@pytest.mark.quick_rows("stored low")
@pytest.mark.parametrize("how", ["bf16", "int8", "stored low", "convolutions"])
def test_what_is_packed_is_compiled_once_for_all_processes(how: str) -> None:
    layers: tuple[nn.Module, ...] = nn.Linear(96, 160), nn.GELU(), nn.Linear(160, 96)  # sizes of this test
    x, policy = torch.randn(32, 96), "int8" if how == "int8" else "autocast"
    if how == "convolutions":
        layers = nn.Conv2d(6, 10, 3), nn.BatchNorm2d(10), nn.ReLU(), nn.ConvTranspose2d(10, 6, 3)
        x = torch.randn(2, 6, 9, 9)
    net: Any = nn.Sequential(*layers).eval()
    net.to(memory_format=torch.channels_last)
    if how == "stored low":
        amp_fx.store_low(net, x)
    results = []
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        with torch.inference_mode():
            results.append(torch.compile(net, backend="amp_fx", options={**DEFAULTS, "policy": policy})(x))
    assert counters["aot_autograd"]["autograd_cache_hit"] == counters["inductor"]["fxgraph_cache_hit"] == 1
    assert torch.equal(*results)
    assert results[0].stride() == net(x).stride()
    torch.testing.assert_close(results[0], net(x), rtol=0.05, atol=0.05)


@pytest.mark.skipif(UP_TO_2_14, reason="Inductor takes each weight of such a call for a packed one")
def test_other_programs_may_have_weights_that_are_not_packed() -> None:
    x, weight, once, none = torch.randn(2, 6, 8, 8), torch.randn(6, 10, 3, 3), [1, 1], [0, 0]
    layer = nn.ConvTranspose2d(6, 10, 3).eval()

    def direct(x: Tensor, weight: Tensor) -> Tensor:
        call = torch.ops.mkldnn._convolution_transpose_pointwise
        result: Tensor = call(x, weight, None, none, none, once, once, 1, "none", [], "")
        return result

    torch._dynamo.reset()
    with torch.inference_mode(), fresh_cache():
        torch.compile(layer, backend="amp_fx", options={**DEFAULTS})(x)
        torch.testing.assert_close(
            torch.compile(direct)(x, weight), nn.functional.conv_transpose2d(x, weight)
        )


#: rows of the table of combined options (``option_pairs.py``), which two processes run
TRAINED: Row = {**option_pairs.DEFAULTS, "model": "large"}
FP8: Row = {**TRAINED, "profile": "with fp8", "policy": "fp8"}
EVALUATED: Row = {**option_pairs.DEFAULTS, "model": "tied", "gradients": "no_grad"}
FEATURES = {
    "training": TRAINED,
    "fp16 with a scaler": {**TRAINED, "dtype": "float16", "scaler": "default"},
    "a plan": {**TRAINED, "plan": "replayed", "policy": "autocast, rules"},
    "fp8": FP8,
    "fp8 without gradients": {**FP8, "gradients": "no_grad", "weights": "cache"},
    "weights kept": {**EVALUATED, "weights": "cache"},
    "weights frozen": {**EVALUATED, "weights": "freeze"},
    "inference mode": {**EVALUATED, "gradients": "inference_mode"},
}

#: what the second process runs as well: graphs that the first one has compiled with other decisions
OTHERS = {"fp8 with a rule": {**FP8, "policy": "fp8, rules"}, "fp8 by rows": {**FP8, "fp8": "rowwise"}}

#: runs rows, and saves results of their calls and what the caches counted
FEATURES_SCRIPT = """
import sys, warnings
from pathlib import Path
import torch
from torch._dynamo.utils import counters
import amp_fx
from support.checks.option_runs import check_accuracy, compiled, with_files

warnings.simplefilter("error", amp_fx.FallbackWarning)
rows, folder, found = torch.load(sys.argv[1]), Path(sys.argv[2]), {}
for name, row in rows.items():
    options = with_files(row, folder)
    counters.clear()
    seen = compiled(row, options)
    found[name] = [call.outputs + call.gradients for call in seen], dict(counters["aot_autograd"])
    check_accuracy(row, seen)
torch.save(found, sys.argv[3])
"""


def run(rows: dict[str, Row], folder: Path) -> dict[str, Any]:
    """Runs rows in a process of their own, which imports torch once for all."""
    given, result = folder / "rows.pt", folder / "result.pt"
    torch.save(rows, given)
    files = map(str, (given, folder, result))
    run_python("-c", FEATURES_SCRIPT, *files, TORCHINDUCTOR_CACHE_DIR=str(folder / "cache"))
    return torch.load(result)


@pytest.mark.slow
def test_a_process_finds_what_another_one_has_compiled_with_the_same_bits_and_no_more(tmp_path: Path) -> None:
    cold, warm = run(FEATURES, tmp_path), run({**FEATURES, **OTHERS}, tmp_path)
    for feature in FEATURES:
        (first, before), (second, after) = cold[feature], warm[feature]
        assert not before.get("autograd_cache_bypass"), feature
        # what differs in the options alone may be one graph
        assert before.get("autograd_cache_saved", 0) + before.get("autograd_cache_hit", 0) > 0, feature
        assert after["autograd_cache_hit"] == after["total"], feature
        assert not after.get("autograd_cache_saved"), feature
        for step, found, wanted in zip(STEPS, second, first, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (feature, step)
    for feature in OTHERS:
        _, counts = warm[feature]
        assert not counts.get("autograd_cache_hit"), feature
        assert counts["autograd_cache_saved"] > 0, feature


# ---- faults ----

#: compiles three times, and prints why it cannot; the caches are in the folder that is named
FAULTS = """
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


@pytest.mark.slow
def test_a_missing_compiler_a_blocked_cache_and_a_full_disk_are_named(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    cache = str(tmp_path / "cache")
    done = run_python("-c", FAULTS, str(tmp_path), CXX="no-such-compiler", TORCHINDUCTOR_CACHE_DIR=cache)
    compiler, blocked, full = done.stdout.splitlines()
    assert "InvalidCxxCompiler" in compiler
    assert str(tmp_path / "blocked") in blocked
    assert "File too large" in full
    assert "FallbackWarning" not in done.stderr


# ---- memory ----


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


needs_proc = pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc, as on Linux")


@pytest.mark.slow
@needs_proc
def test_100_recompiles_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(4, 4), torch.randn(4, 4)
    made: list[weakref.ref[fx.GraphModule]] = []

    def run_eagerly(gm: fx.GraphModule, *_: Any) -> Callable[..., Any]:
        made.append(weakref.ref(gm))
        return gm.forward

    def recompile(times: int) -> int:
        for _ in range(times):
            torch._dynamo.reset()
            torch.compile(program, backend="amp_fx", options=dict(DEFAULTS))(x, w)
        torch._dynamo.reset()
        gc.collect()
        return resident()

    monkeypatch.setattr(amp_fx.compiler.compiling, "compile_with_inductor", run_eagerly)
    # pytest keeps what is logged
    monkeypatch.setattr("_pytest.logging.LogCaptureHandler.emit", lambda *_: None)
    before = recompile(100)
    assert recompile(100) - before < 4e6
    assert len(made) == 200
    assert sum(graph() is not None for graph in made) <= 2


@pytest.mark.slow
@needs_proc
def test_10_000_inference_calls_do_not_grow_the_process() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)), torch.randn(2, 8)
    own = torch.compile(model, backend="amp_fx", options=dict(DEFAULTS))
    with torch.inference_mode(), record() as recording:
        sizes = []
        for calls in (500, 10_000):
            for _ in range(calls):
                own(x)
            gc.collect()
            sizes.append(resident())
        assert sizes[1] - sizes[0] < 4e6
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
