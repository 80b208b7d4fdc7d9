"""Static int8 in one call."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_fx
from support.tracing.captured_graphs import without_inductor


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, 8)).eval()


BATCHES = [torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) for seed in range(2)]


def test_one_call_is_the_three_calls_of_the_documentation(model: nn.Module, tmp_path: Path) -> None:
    with without_inductor():
        fast = amp_fx.quantize(
            model, BATCHES, budget=8, verify=False, profile="off", save=tmp_path / "int8.json"
        )
        with amp_fx.record() as recording:
            # in the grad mode of a server that forgets it
            found = fast(BATCHES[0])
    assert found.is_inference()
    (plan,) = recording.plans
    assert any(row.levels_below for row in plan.matmuls)
    known = amp_fx.calibrate(model, BATCHES, of="outputs", policy="int8", profile="off")
    wanted = known.plan(budget=8, verify=False)
    assert amp_fx.Plan.load(tmp_path / "int8.json") == wanted.plans[0]
    found_plan: Any = fast.amp_fx_plan
    assert found_plan.plans == wanted.plans
    assert not hasattr(model, "amp_fx_plan")
    with torch.no_grad():
        exact = model.double()(BATCHES[0].double())
    error = ((found.double() - exact).norm() / exact.norm()).item()
    assert 0 < error < 2 * 8 * known.autocast_error


@pytest.mark.parametrize(
    ("budget", "advice"), [(2.0, "None would at any budget"), (1e-3, "policy='int8'), which has no budget")]
)
def test_where_nothing_gains_by_int8_the_log_says_so_and_what_would(
    model: nn.Module, caplog: pytest.LogCaptureFixture, budget: float, advice: str
) -> None:
    given = model if budget < 1 else nn.Linear(64, 4).eval()
    with without_inductor():
        fast = amp_fx.quantize(given, BATCHES, budget=budget, verify=False, profile="off")
        fast(BATCHES[0])
    texts = [row.getMessage() for row in caplog.records if row.levelno == logging.WARNING]
    (text,) = (text for text in texts if text.startswith("quantize: no matmul runs in int8"))
    assert advice in text
    # once more for the graph, when it is compiled
    (text,) = (text for text in texts if text.startswith("no matmul of graph"))
    assert ("policy='int8' without a plan" in text) == (budget < 1)


@pytest.mark.parametrize(
    ("options", "kind", "named"),
    [
        ({"policy": "fp8"}, amp_fx.OptionsError, "policy"),
        ({"plan": "p.json"}, amp_fx.OptionsError, "plan"),
        ({"budget": -1.0}, amp_fx.OptionsError, "budget"),
        ({"weights": "thaw"}, amp_fx.OptionsError, "thaw"),
    ],
)
def test_mistakes_are_told_by_name(model: nn.Module, options: Any, kind: type[Exception], named: str) -> None:
    given: dict[str, Any] = {"profile": "off", **options}
    with pytest.raises(kind, match=named):
        amp_fx.quantize(model, BATCHES, verify=False, **given)


def test_a_model_in_training_mode_is_refused(model: nn.Module) -> None:
    with pytest.raises(amp_fx.InputError, match=r"model\.eval\(\)"):
        amp_fx.quantize(model.train(), BATCHES)
