"""Compile caches across processes: one finds them empty, the next one full.

Each process goes through all features, so that each imports torch once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from combinations import AXES, Row
from combined_runs import STEPS

DEFAULTS: Row = {axis: next(iter(values)) for axis, values in AXES.items()}
TRAINED: Row = {**DEFAULTS, "model": "large"}
FP8: Row = {**TRAINED, "profile": "with fp8", "policy": "fp8"}
EVALUATED: Row = {**DEFAULTS, "model": "tied", "gradients": "no_grad"}

#: what both processes run
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
OTHERS = {
    "fp8 with a rule": {**FP8, "policy": "fp8, rules"},
    "fp8 by rows": {**FP8, "fp8": "rowwise"},
}

_SCRIPT = """
import sys, warnings
from pathlib import Path
import torch
from torch._dynamo.utils import counters
import amp_fx
from combined_runs import check_accuracy, compiled, with_files

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
    """Runs rows in a process of their own; results of their calls, and what the caches counted."""
    given, result = folder / "rows.pt", folder / "result.pt"
    torch.save(rows, given)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
    }
    command = [sys.executable, "-c", _SCRIPT, str(given), str(folder), str(result)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return torch.load(result)


@pytest.fixture(scope="module")
def cold_and_warm(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    folder = tmp_path_factory.mktemp("caches")
    return run(FEATURES, folder), run({**FEATURES, **OTHERS}, folder)


@pytest.mark.slow
@pytest.mark.xdist_group("cold-and-warm")
def test_a_process_finds_what_another_one_has_compiled(
    cold_and_warm: tuple[dict[str, Any], dict[str, Any]],
) -> None:
    cold, warm = cold_and_warm
    for feature in FEATURES:
        (_, before), (_, after) = cold[feature], warm[feature]
        assert not before.get("autograd_cache_bypass"), feature
        # what differs in the options alone may be one graph
        assert before.get("autograd_cache_saved", 0) + before.get("autograd_cache_hit", 0) > 0, feature
        assert after["autograd_cache_hit"] == after["total"], feature
        assert not after.get("autograd_cache_saved"), feature


@pytest.mark.slow
@pytest.mark.xdist_group("cold-and-warm")
@pytest.mark.parametrize("feature", FEATURES)
def test_results_from_a_warm_cache_have_the_same_bits(
    cold_and_warm: tuple[dict[str, Any], dict[str, Any]], feature: str
) -> None:
    (before, _), (after, _) = (side[feature] for side in cold_and_warm)
    for step, found, wanted in zip(STEPS, after, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), step


@pytest.mark.slow
@pytest.mark.xdist_group("cold-and-warm")
@pytest.mark.parametrize("feature", OTHERS)
def test_other_decisions_on_the_same_graph_are_not_found(
    cold_and_warm: tuple[dict[str, Any], dict[str, Any]], feature: str
) -> None:
    _, counts = cold_and_warm[1][feature]
    assert not counts.get("autograd_cache_hit")
    assert counts["autograd_cache_saved"] > 0
