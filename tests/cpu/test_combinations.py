"""Options together, each pair of their values in some row of a table, on eight small models; and each by itself.

Rows run as programs do (``option_runs.py``). A sample of the table is fast enough for every day, most of it op by op;
all of it, down to code, is slow. ``COMBINATIONS=1`` in the environment, or another seed, makes other rows. By itself, a
feature has no other option: no ``profile="off"``, no ``strict``. A fallback is a warning, and so an error here.
"""

from __future__ import annotations

import copy
import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from amp_fx import OptionsError
from amp_fx.compiler.settings import Options
from support.checks import option_pairs
from support.checks.option_pairs import AXES, DEFAULTS, EXCLUDED, Row, covering_rows, words
from support.checks.option_runs import check, distances, session
from support.models.for_options import MODELS

SEED = int(os.environ.get("COMBINATIONS", "0"))
ROWS = covering_rows(SEED)
EVERY_DAY = option_pairs.sample(ROWS, 14)
#: of these, code is generated every day
GENERATED = EVERY_DAY[1:2]


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, id=words(row), marks=() if row in GENERATED else pytest.mark.slow) for row in ROWS],
)
def test_options_together_give_what_each_promises(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path)


@pytest.mark.parametrize("row", [row for row in EVERY_DAY if row not in GENERATED], ids=words)
def test_options_together_give_what_each_promises_op_by_op(row: Row, tmp_path: Path) -> None:
    check(row, tmp_path, generate=False)


def test_every_pair_that_may_stand_together_is_in_a_row_and_every_value_in_one_of_every_day() -> None:
    assert set[Any]().union(*map(option_pairs.pairs_of, ROWS)) == option_pairs.allowed_pairs()
    assert all(map(option_pairs.is_allowed, ROWS))
    assert len(ROWS) < 70
    assert covering_rows(SEED) == ROWS, "the rows are the same each time"
    assert covering_rows(SEED + 1) != ROWS
    values = {(axis, name) for row in EVERY_DAY for axis, name in row.items()}
    assert values == {(axis, name) for axis, names in AXES.items() for name in names}


def test_no_pair_is_left_out_but_what_the_table_says_and_what_follows_from_it() -> None:
    left_out = {*option_pairs.all_pairs()} - option_pairs.allowed_pairs()
    # the recipe needs policy fp8, and measured scales int8: there is one policy, and those numerics have neither
    three = ("fp8", "rowwise"), ("numerics", "eager"), ("plan", "measured")
    unnamed = {frozenset(pair) for pair in itertools.combinations(three, 2)}
    assert {pair for pair in left_out if option_pairs.is_allowed(dict(pair))} == unnamed
    for excluded in EXCLUDED:
        assert all(set(names) <= AXES[axis].keys() for axis, names in excluded.values.items())


REFUSED = {each.reason: each for each in EXCLUDED if each.is_error}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_contradicts_itself_is_refused(reason: str) -> None:
    excluded = REFUSED[reason].values
    for names in itertools.product(*excluded.values()):
        row = {**DEFAULTS, **dict(zip(excluded, names, strict=True))}
        with pytest.raises(OptionsError):
            Options.parse(None, option_pairs.options_of(row))


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


@pytest.mark.quick_rows("training", "inference mode")
@pytest.mark.parametrize(("row", "generate"), ALONE.values(), ids=ALONE)
def test_a_feature_by_itself(row: Row, generate: bool, tmp_path: Path) -> None:
    check({**DEFAULTS, **row}, tmp_path, generate=generate)
