"""A program that imports amp_fx, or uses it for one model, computes and compiles the rest as without amp_fx."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from support.checks.held_memory import run_python
from support.programs import torch_alone

# one worker starts the processes
pytestmark = pytest.mark.xdist_group("guest")

KINDS = ("alone", "imported", "used")
Said = dict[str, dict[str, Any]]


def say(*arguments: str, **environment: str) -> dict[str, Any]:
    return json.loads(run_python(torch_alone.__file__, *arguments, **environment).stdout)


@pytest.fixture(scope="module")
def said() -> Said:
    """What the same programs say in three processes, side by side; nothing of them is cached."""
    with ThreadPoolExecutor() as threads:
        return dict(zip(KINDS, threads.map(say, KINDS), strict=True))


@pytest.mark.parametrize("program", [program.__name__ for program in torch_alone.PROGRAMS])
def test_importing_or_a_model_of_amp_fx_changes_nothing_for_others(said: Said, program: str) -> None:
    alone, imported, used = (said[kind][program] for kind in KINDS)
    assert (used["values"], used["graphs"]) == (alone["values"], alone["graphs"])
    if program == "compiled_autograd":
        # it looks at whatever runs in a backward, imports too: what was imported before is not among it
        del alone["frames"], imported["frames"]
    assert imported == alone


def test_importing_imports_no_library_and_hooks_nothing_in_and_use_hooks_in_once(said: Said) -> None:
    assert said["imported"]["libraries"] == []
    free = {"dynamo": [0, 0], "optimizers": [0, 0], "skipped": False}
    assert said["alone"]["hooked"] == said["imported"]["hooked"] == free
    assert said["used"]["hooked"] == {"dynamo": [1, 0], "optimizers": [1, 1], "skipped": True}
    # in a step with the backward and a scaler inside
    assert said["used"]["looked at"] == [], "Dynamo looks at amp_fx"


@pytest.mark.slow
def test_a_backward_in_a_step_of_inductor_compiles_with_cold_caches() -> None:
    cold = {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
    assert say("alone", "inductor", **cold) == say("imported", "inductor", **cold)
