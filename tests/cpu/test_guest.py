"""A program that imports amp_fx, or uses it for one model, computes and compiles the rest as without amp_fx."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import guest
import pytest

# one worker starts the processes
pytestmark = pytest.mark.xdist_group("guest")

PROGRAM = Path(__file__).parents[1] / "guest.py"
NAMES = [program.__name__ for program in guest.PROGRAMS]

#: seconds; what hangs, hangs forever
PATIENCE = 600


def start(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(PROGRAM), *arguments],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    return json.loads(out)


@pytest.fixture(scope="module")
def said() -> dict[str, dict[str, Any]]:
    """What the same programs say in three processes, side by side; nothing of them is cached."""
    processes = {kind: start(kind) for kind in ("alone", "imported", "used")}
    return {kind: end(process) for kind, process in processes.items()}


@pytest.mark.parametrize("program", NAMES)
def test_importing_changes_nothing_for_a_program(said: dict[str, dict[str, Any]], program: str) -> None:
    alone, imported = said["alone"][program], said["imported"][program]
    if program == "compiled_autograd":
        # it looks at whatever runs in a backward, imports too: what was imported before is not among it
        del alone["frames"], imported["frames"]
    assert imported == alone


@pytest.mark.parametrize("program", NAMES)
def test_a_model_of_amp_fx_changes_nothing_for_the_others(
    said: dict[str, dict[str, Any]], program: str
) -> None:
    alone, used = said["alone"][program], said["used"][program]
    assert (used["values"], used["graphs"]) == (alone["values"], alone["graphs"])


def test_importing_imports_no_library(said: dict[str, dict[str, Any]]) -> None:
    assert said["imported"]["libraries"] == []


def test_importing_hooks_nothing_in_and_use_hooks_in_once(said: dict[str, dict[str, Any]]) -> None:
    free = {"dynamo": [0, 0], "optimizers": [0, 0], "skipped": False}
    assert said["alone"]["hooked"] == said["imported"]["hooked"] == free
    assert said["used"]["hooked"] == {"dynamo": [1, 0], "optimizers": [1, 1], "skipped": True}


def test_dynamo_looks_at_nothing_of_amp_fx_in_a_step_with_the_backward_and_a_scaler_inside(
    said: dict[str, dict[str, Any]],
) -> None:
    assert said["used"]["looked at"] == []


@pytest.mark.slow
def test_a_backward_in_a_step_of_inductor_compiles_with_cold_caches() -> None:
    environment = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    alone, imported = (start(kind, "inductor", **environment) for kind in ("alone", "imported"))
    assert end(alone) == end(imported)
