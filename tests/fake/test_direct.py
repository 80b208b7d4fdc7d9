"""``amp_fx.options(...)`` and ``amp_fx.compile(...)``: keywords, checked where they are written."""

from __future__ import annotations

from typing import get_type_hints

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.direct import OptionNames
from amp_fx.errors import OptionsError
from amp_fx.settings import LEVEL_OPTIONS, NUMERICS, WEIGHTS


def test_options_are_what_torch_compile_takes():
    assert amp_fx.options() == {}
    found = amp_fx.options(dtype="float16", weights="freeze", inductor={"max_autotune": False})
    assert found == {"dtype": "float16", "weights": "freeze", "max_autotune": False}


@pytest.mark.parametrize(
    "given",
    [
        {"weihgts": "freeze"},
        {"weights": "frozen"},
        {"policy": {"base": "autocast", "rules": [{"op": "softmaxx", "precision": "fp32"}]}},
        {"dtype": "bfloat16", "scaler": "default"},
        {"inductor": {"max_autotun": True}},
        {"inductor": {"weights": "freeze"}},
        {"inductor": 3},
    ],
    ids=str,
)
def test_errors_come_where_options_are_written(given):
    with pytest.raises(OptionsError):
        amp_fx.options(**given)
    with pytest.raises(OptionsError):
        amp_fx.compile(nn.Linear(2, 2), **given)


def test_an_unknown_mode_is_an_error_at_once():
    with pytest.raises(OptionsError, match="fastest"):
        amp_fx.compile(nn.Linear(2, 2), mode="fastest")


def test_the_keywords_name_the_values_that_are_valid():
    hints = get_type_hints(OptionNames)
    for name, valid in {"numerics": NUMERICS, "weights": WEIGHTS, **LEVEL_OPTIONS}.items():
        assert set(hints[name].__args__) == set(valid)


def test_compile_is_torch_compile_with_the_backend(monkeypatch):
    seen = {}
    monkeypatch.setattr(torch, "compile", lambda model, **given: seen.update(given) or model)
    own = {"coordinate_descent_tuning": False}
    mode = "max-autotune-no-cudagraphs"
    amp_fx.compile(nn.Linear(2, 2), policy="fast", mode=mode, inductor=own, dynamic=False)
    assert seen["backend"] == "amp_fx"
    assert seen["options"]["policy"] == "fast"
    assert seen["options"]["max_autotune"]
    assert not seen["options"]["coordinate_descent_tuning"]
    assert (seen["dynamic"], seen["fullgraph"]) == (False, False)
