"""What a terminal is told while something takes long: each part of the work, and work inside work in one line."""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx.exporting import packaging
from amp_fx.instruments import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def said(self) -> list[str]:
        """Every state of the line, without the seconds."""
        parts = (part.removeprefix("\033[K") for part in self.getvalue().split("\r"))
        return [re.sub(r", \d+ s$", "", part) for part in parts]


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """A stand-in for stderr, which is told at once."""
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    # run op by op, and what makes a package makes none
    monkeypatch.setattr("amp_fx.compiler.compiling.lower", lambda gm, *_: gm.forward)
    monkeypatch.setattr(packaging, "compile_package", lambda *_: None)
    return Terminal()


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8)).eval()


X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


def _compare(_: Path) -> object:
    with torch.no_grad():
        return amp_fx.compare(_net(), X, calls=True)


def _package(folder: Path) -> object:
    with torch.no_grad():
        program = amp_fx.export(_net(), (X,))
    return amp_fx.package(program, folder / "x.pt2", inductor_configs={"freezing": False})


@pytest.mark.parametrize(
    ("work", "parts"),
    [
        (
            _compare,
            (
                "compare: runs the reference|compare: compiles the model, and runs it|compare: compiles the model unobs"
                "|compare: runs every call op by op|compare: compiles the model with all results of calls"
            ),
        ),
        (
            _package,
            "export: traces the model|export: places casts|package: opens the program|package: AOTInductor compiles",
        ),
        (
            lambda _: amp_fx.explain(_net(), X),
            "explain: compiles as far as fusion with amp_fx|explain: compiles as far as fusion with torch.autocast",
        ),
        (
            lambda _: amp_fx.histogram(_net(), X, torch.sum),
            "histogram: runs the model forward and backward",
        ),
    ],
    ids=["compare", "package", "explain", "histogram"],
)
def test_each_part_of_the_work_is_said_in_order(
    terminal: Terminal,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    work: Callable[[Path], object],
    parts: str,
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    work(tmp_path)
    said = terminal.said()
    found = [
        next((at for at, line in enumerate(said) if line.startswith(part)), -1) for part in parts.split("|")
    ]
    assert found == sorted(found)
    assert found[0] >= 0, said
    assert not said[-1].strip()


def test_work_inside_work_is_in_one_line_that_fits_the_terminal(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress.progress("bench") as outer:
        outer("int8")
        with progress.progress("calibrate", 4) as inner:
            inner("ranges", 1)
            with progress.progress("forward", 9, "calls") as innermost:
                # no line for each of many units
                before = len(terminal.said())
                for _ in range(9):
                    innermost("", 1)
                assert len(terminal.said()) <= before + 1
            inner("what roundings do", 1)
            monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((30, 24)))
            inner("narrow")
        outer("package")
    said = terminal.said()
    wanted = "bench: int8: calibrate: ranges, 1 of 4 batches|bench: int8: calibrate: what roundings do, 2 of 4 batches"
    assert set(wanted.split("|")) < set(said)
    after = said[len(said) - said[::-1].index(wanted.split("|")[1]) :]
    assert after[0] == "bench: int8: calibrate: "
    assert max(map(len, after)) < 30
    assert "bench: package" in said
    assert not said[-1].strip()
