"""What amp_fx keeps in a process stands in one list, and is forgotten by one call."""

from __future__ import annotations

import re
from pathlib import Path

import amp_fx
from amp_fx import notices, state
from amp_fx.policy import table

ROOT = Path(__file__).parents[2]

#: these cache what is not forgotten, or say what is said once in another way
LEFT = {"state.py", "layout.py"}


def test_results_are_cached_in_one_way() -> None:
    files = list((ROOT / "amp_fx").rglob("*.py"))
    found = {
        path.name
        for path in files
        if re.search(r"\b(lru_cache|functools\.cache)\b", path.read_text(encoding="utf-8"))
    }
    assert len(files) > 100
    assert found <= LEFT


def test_what_is_kept_is_forgotten() -> None:
    notices._told.add("something")
    rows = table._table("cpu")
    assert table._table("cpu") is rows
    amp_fx.reset()
    assert not notices._told
    assert table._table("cpu") is not rows


def test_everything_is_registered_under_a_name_of_its_own() -> None:
    names = state.registered()
    assert "tensors derived from weights" in names
    assert "results of amp_fx.policy.table._table" in names
