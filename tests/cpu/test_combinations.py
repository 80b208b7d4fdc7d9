"""Options together, each pair of their values in some row of a table, on eight small models; and each by itself.

Rows run as programs do (``combined_runs.py``). A sample of the table is fast enough for every day, most of it op by op;
all of it, down to code, is slow. By itself, a feature has no other option: no ``profile="off"``, no ``strict``.
A fallback is a warning, and so an error here.
"""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import amp_fx
from amp_fx import OptionsError
from amp_fx.settings import Options
from combinations import (
    AXES,
    EXCLUDED,
    Excluded,
    Row,
    allowed_pairs,
    covering_rows,
    is_allowed,
    options_of,
    pairs_of,
    sample,
    words,
)
from combined_models import MODELS, Model, make
from combined_runs import check, distances, session

DEFAULTS: Row = {axis: next(iter(values)) for axis, values in AXES.items()}
ROWS = covering_rows()
EVERY_DAY = sample(ROWS, 12)
#: of these, code is generated every day
GENERATED = EVERY_DAY[:2]


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=words(row), marks=() if row in GENERATED else pytest.mark.slow) for row in ROWS],
)
def test_options_together_give_what_each_promises(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


@pytest.mark.parametrize("row", EVERY_DAY[len(GENERATED) :], ids=words)
def test_options_together_give_what_each_promises_op_by_op(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path, generate=False)


def test_every_pair_of_values_that_may_stand_together_is_in_a_row() -> None:
    assert set[Any]().union(*map(pairs_of, ROWS)) == allowed_pairs()
    assert all(map(is_allowed, ROWS))
    assert len(ROWS) < 70


def test_no_pair_is_left_out_but_what_the_table_says_and_what_follows_from_it() -> None:
    left_out = {
        frozenset({(one, a), (other, b)})
        for one, other in itertools.combinations(AXES, 2)
        for a, b in itertools.product(AXES[one], AXES[other])
    } - allowed_pairs()
    # the recipe needs policy fp8, which those numerics cannot have
    assert [pair for pair in left_out if is_allowed(dict(pair))] == [
        frozenset({("fp8", "rowwise"), ("numerics", "eager")})
    ]


def test_the_rows_are_the_same_each_time() -> None:
    assert covering_rows() == ROWS
    assert covering_rows(seed=1) != ROWS


def test_the_rows_of_every_day_have_every_value() -> None:
    values = {(axis, name) for row in EVERY_DAY for axis, name in row.items()}
    assert values == {(axis, name) for axis, names in AXES.items() for name in names}


@pytest.mark.parametrize("excluded", EXCLUDED, ids=lambda excluded: excluded.reason)
def test_what_is_excluded_names_values_of_the_table(excluded: Excluded) -> None:
    assert all(set(names) <= AXES[axis].keys() for axis, names in excluded.values.items())


@pytest.mark.parametrize(
    "excluded", [each for each in EXCLUDED if each.is_error], ids=lambda excluded: excluded.reason
)
def test_what_contradicts_itself_is_refused(excluded: Excluded) -> None:
    for names in itertools.product(*excluded.values.values()):
        row = {**DEFAULTS, **dict(zip(excluded.values, names, strict=True))}
        with pytest.raises(OptionsError):
            Options.parse(None, options_of(row))


@pytest.mark.parametrize("gradients", ["train", "no_grad"])
@pytest.mark.parametrize("model", MODELS)
def test_changed_weights_show_in_results(model: str, gradients: str) -> None:
    row = {**DEFAULTS, "model": model, "gradients": gradients}
    first, changed, _ = session(row, lambda m: m, dtype=torch.float64)
    assert distances(changed, first)["outputs"] > 0.1


def test_weights_that_are_not_followed_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: copy.deepcopy(model))
    with pytest.raises(AssertionError, match="after weights have changed: outputs"):
        check({**DEFAULTS, "gradients": "no_grad"}, tmp_path)


# ---- each feature by itself ----

#: feature -> the row of its only option: on a model that gains by default, on convolutions with a classifier in fp32,
#: on an embedding whose weight is the head's; and whether code is generated. What others decide is in the graph
ALONE: dict[str, tuple[Row, bool]] = {
    "training": ({"model": "large"}, True),
    "training with policy fast": ({"model": "large", "policy": "fast"}, False),
    "training with rules": ({"model": "large", "policy": "autocast, rules"}, False),
    "training in fp16 with a scaler": ({"model": "large", "dtype": "float16", "scaler": "default"}, True),
    "training by a plan": ({"model": "large", "plan": "replayed"}, False),
    "training with eager numerics": ({"model": "large", "numerics": "eager"}, False),
    "training in fp8": ({"model": "large", "policy": "fp8"}, False),
    "weights cast in each call": ({"model": "tied", "gradients": "no_grad"}, False),
    "weights kept": ({"model": "convolutions", "gradients": "no_grad", "weights": "cache"}, True),
    "weights frozen": ({"model": "convolutions", "gradients": "no_grad", "weights": "freeze"}, False),
    "inference mode": ({"model": "tied", "gradients": "inference_mode"}, True),
    "inference in fp8": ({"model": "tied", "gradients": "no_grad", "policy": "fp8"}, False),
}


@pytest.mark.parametrize(("row", "generate"), ALONE.values(), ids=ALONE)
def test_a_feature_by_itself(row: Row, generate: bool, tmp_path: Path) -> None:
    check({**DEFAULTS, **row}, tmp_path, generate=generate)


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
