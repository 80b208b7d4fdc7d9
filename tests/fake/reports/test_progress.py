"""A line on the terminal while something takes long, and nothing elsewhere."""

from __future__ import annotations

import sys
import threading
import time

import pytest

from amp_fx.reports import explaining


def test_a_terminal_sees_a_line_that_goes_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(explaining, "_PATIENCE", 0.01)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    before = threading.active_count()
    with explaining.progress("counting"):
        time.sleep(0.2)
    said = capsys.readouterr().err
    assert "counting" in said
    assert said.endswith("\033[K")
    assert threading.active_count() == before


def test_what_is_quick_or_no_terminal_says_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with explaining.progress("counting"):
        pass
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with explaining.progress("counting"):
        pass
    assert capsys.readouterr().err == ""
