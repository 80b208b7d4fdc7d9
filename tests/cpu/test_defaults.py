"""Each feature with no option but its own: no ``profile="off"``, no ``strict``, as it is met first.

What options do together is ``test_combinations.py``'s. A fallback is a warning, and so an error here.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import amp_fx
from combinations import AXES, Row
from combined_models import Model, make
from combined_runs import check

DEFAULTS: Row = {axis: next(iter(values)) for axis, values in AXES.items()}

#: feature -> the row of its only option: on a model that gains by default, on convolutions with a classifier in fp32,
#: on an embedding whose weight is the head's
FEATURES: dict[str, Row] = {
    "training": {"model": "large"},
    "training with policy fast": {"model": "large", "policy": "fast"},
    "training with rules": {"model": "large", "policy": "autocast, rules"},
    "training in fp16 with a scaler": {"model": "large", "dtype": "float16", "scaler": "default"},
    "training by a plan": {"model": "large", "plan": "replayed"},
    "training with eager numerics": {"model": "large", "numerics": "eager"},
    "training in fp8": {"model": "large", "policy": "fp8"},
    "weights cast in each call": {"model": "tied", "gradients": "no_grad"},
    "weights kept": {"model": "convolutions", "gradients": "no_grad", "weights": "cache"},
    "weights frozen": {"model": "convolutions", "gradients": "no_grad", "weights": "freeze"},
    "inference mode": {"model": "tied", "gradients": "inference_mode"},
    "inference in fp8": {"model": "tied", "gradients": "no_grad", "policy": "fp8"},
}


#: what these decide is in the graph; there is no need to generate code
IN_GRAPHS = {"training with rules", "training by a plan", "training with eager numerics"}


@pytest.mark.parametrize(
    "feature",
    # what trains shares its kernels
    [
        pytest.param(name, marks=pytest.mark.xdist_group("defaults-training")) if "training" in name else name
        for name in FEATURES
    ],
)
def test_a_feature_by_itself(feature: str, tmp_path: Path) -> None:
    check({**DEFAULTS, **FEATURES[feature]}, tmp_path, generate=feature not in IN_GRAPHS)


@pytest.fixture(params=["tied", "convolutions"])
def model(request: pytest.FixtureRequest) -> Model:
    return make(request.param)


def test_explain(model: Model) -> None:
    batch = model.batch(4, 0)
    report = amp_fx.explain(model, batch)
    assert [plan.fallback for plan in report.plans] == [""] * len(report.plans)
    assert {plan.phase for plan in report.plans} == {"forward", "backward"}
    assert "casts" in str(report)


def test_export(model: Model) -> None:
    batch = model.eval().batch(4, 0)
    found = amp_fx.export(model, (batch,)).module()(batch)
    wanted = model.double()(batch.double() if batch.is_floating_point() else batch)
    assert found.dtype is torch.float32
    assert (found - wanted).norm() <= 1e-2 * wanted.norm()


def test_histogram(model: Model) -> None:
    found = amp_fx.histogram(model, model.batch(4, 0), lambda outputs: outputs.square().mean())
    assert "gradient" in str(found)


def test_calibrate() -> None:
    model = make("large")
    found = amp_fx.calibrate(model, model.batch(4, 0), lambda outputs: outputs.square().mean())
    plan = found.plan(budget=0.5)
    assert plan.point.error <= 0.5 * found.autocast_error
    assert plan.measured is not None
