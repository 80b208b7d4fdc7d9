"""``amp-fx explain | draw | histogram | diff | targets``: models by name or file, JSON, exit codes, one-line errors."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import Report
from amp_fx.cli import main
from amp_fx.cli.inputs import literal, paint
from amp_fx.placement.profile import DeviceProfile
from amp_fx.targets import TARGETS

MODULE = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), (torch.randn(6, 16),)

def loss(outputs):
    return outputs.square().mean()

def identity(outputs):
    return outputs

def with_loss():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 1)
        def forward(self, x):
            return self.linear(x).square().mean()
    return Model(), (), {"x": torch.randn(3, 4)}

def wrong():
    return 3
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module in the working directory, as a user has it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(tmp_path)])
    (tmp_path / "user_models.py").write_text(MODULE)
    yield
    sys.modules.pop("user_models", None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two reports, made once."""
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp("reports")
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.randn(6, 16)
    found = {}
    for name, options in (("high", {}), ("low", {"profile": "off"})):
        report = amp_fx.explain(model, x, options=options)
        found[name] = str(report.save(folder / f"{name}.json"))
    return found


def error_of(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """The one line that a command fails with."""
    assert main(argv) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_a_model_is_explained_by_its_name_with_options_as_reports_print_them(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = "options={'profile': 'off'}"
    assert (
        main(["explain", "user_models:build", "--options", options, "--table", "-o", "r.json", "-o", "r.md"])
        == 0
    )
    out, err = capsys.readouterr()
    report = Report.load(tmp_path / "r.json")
    assert out == f"{report}\n\n{report.table()}\n"
    assert report.shares()["bfloat16"]["flops"] == 1.0
    assert err == "wrote r.json\nwrote r.md\n"
    assert (tmp_path / "r.md").read_text() == report.to_markdown()


def test_a_pt2_file_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    program = torch.export.export(nn.Sequential(nn.Linear(16, 4)), (torch.randn(6, 16),))
    torch.export.save(program, "model.pt2")
    assert main(["explain", "model.pt2", "--options", '{"profile": "off"}', "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["summary"]["shares"]["bfloat16"]["flops"] == 1.0


def test_reports_are_read_instead_of_models(
    capsys: pytest.CaptureFixture[str], saved: dict[str, str]
) -> None:
    assert main(["explain", saved["low"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == Report.load(saved["low"]).to_dict()
    assert "options are for a MODEL" in error_of(
        capsys, "explain", saved["low"], "--options", '{"strict": true}'
    )


def test_two_reports_are_compared(capsys: pytest.CaptureFixture[str], saved: dict[str, str]) -> None:
    expected = Report.load(saved["high"]).diff(Report.load(saved["low"]))
    assert main(["diff", saved["high"], saved["low"]]) == 0
    assert capsys.readouterr().out == f"{expected}\n"
    assert "0 linear (forward): float32 -> bfloat16" in str(expected)
    assert main(["diff", saved["high"], saved["low"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == expected.to_dict()


def test_a_picture_is_drawn_and_marks_what_changed(
    capsys: pytest.CaptureFixture[str], saved: dict[str, str], tmp_path: Path
) -> None:
    assert main(["draw", saved["low"], "-o", "new.html"]) == 0
    assert main(["draw", saved["low"], "--against", saved["high"], "-o", "changed.html", "--json"]) == 0
    assert capsys.readouterr().out == 'wrote new.html\n{"path": "changed.html"}\n'
    new, changed = ((tmp_path / name).read_text() for name in ("new.html", "changed.html"))
    first_line = str(Report.load(saved["high"]).diff(Report.load(saved["low"]))).splitlines()[0]
    assert escape(first_line) in changed
    assert escape(first_line) not in new
    assert "valid suffixes: .html" in error_of(capsys, "draw", saved["low"], "-o", "picture.jpg")


def test_gradients_are_counted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["histogram", "user_models:build", "--loss", "user_models:loss", "-o", "numbers.json"]) == 0
    out = capsys.readouterr().out
    data = json.loads((tmp_path / "numbers.json").read_text())
    assert f"= {data['loss_scale']:.0f}:" in out
    assert main(["histogram", "user_models:with_loss", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["modules"].keys() == {"linear"}
    for more in ([], ["--loss", "user_models:identity"]):
        error = error_of(capsys, "histogram", "user_models:build", *more)
        assert "no loss: it should be a tensor with one element, got a tensor of shape (6, 4)." in error
        assert "--loss package.module:callable" in error


def test_errors_of_the_operating_system_are_told_in_words(
    capsys: pytest.CaptureFixture[str], saved: dict[str, str], tmp_path: Path
) -> None:
    assert "there is no file 'none.json'." in error_of(capsys, "diff", saved["low"], "none.json")
    assert "there is no file 'no.json'." in error_of(capsys, "draw", saved["low"], "--against", "no.json")
    (tmp_path / "folder.json").mkdir()
    assert error_of(capsys, "explain", "folder.json") == "error: 'folder.json': Is a directory.\n"


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ("user_models", "'user_models'"),
        ("no_such_module:build", "'no_such_module'"),
        ("user_models:buidl", "'build'"),
        ("user_models:wrong", "(model, args)"),
        # a path of a module is taken as its name
        ("user_models.py:nothing", "no callable 'nothing'"),
        ("none.pt2", "'none.pt2'"),
        ("user_models.py.pt2", "torch.export.save"),
        ("none.json", "'none.json'"),
        ("nowhere/none.json", "'nowhere'"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch.export")
def test_a_model_that_is_not_there_is_told_in_one_line(
    capsys: pytest.CaptureFixture[str], model: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / "user_models.py.pt2").write_text("no archive")
    assert named in error_of(capsys, "explain", model)
    assert "'policy'" in error_of(capsys, "explain", "user_models:build", "--options", '{"polcy": 1}')


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("", "COMMAND"),
        ("explain", "MODEL"),
        ("diff a.json", "AFTER"),
        ("nonsense", "'nonsense'"),
        ("exlpain m:f", "'explain'"),
        ("explain m:f --options 3", "'3'"),
        ("explain m:f -x", "-x"),
        ("profile --seconds 0", "positive"),
        ("profile --seconds x", "'x'"),
        ("profile --device tpu", "'tpu'"),
    ],
)
def test_wrong_usage_exits_with_2(argv: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(argv.split())
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert "usage: " in error
    assert named in error


@pytest.mark.parametrize("command", ["explain", "draw", "histogram", "diff"])
def test_help_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main([command, "--help"])
    assert exit.value.code == 0
    text = capsys.readouterr().out
    assert "package.module:callable" in text
    assert text.count(f"python -m amp_fx {command} ") >= 3


@pytest.mark.parametrize(
    "text", ['{"dtype": "float16"}', "{'dtype': 'float16'}", "options={'dtype': 'float16'}"]
)
def test_options_are_read_as_json_and_as_reports_print_them(text: str) -> None:
    assert literal(text) == {"dtype": "float16"}


class Terminal:
    def __init__(self, is_terminal: bool) -> None:
        self.isatty = lambda: is_terminal


@pytest.mark.parametrize(
    ("environment", "terminal", "coloured"),
    [({}, True, True), ({}, False, False), ({"NO_COLOR": "1"}, True, False), ({"TERM": "dumb"}, True, False)],
)
def test_colours_are_for_terminals_that_want_them(
    environment: dict[str, str], terminal: bool, coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream: Any = Terminal(terminal)
    text = paint("heading\n  row", stream)
    assert text == ("\033[1mheading\033[0m\n  row" if coloured else "heading\n  row")


@pytest.mark.parametrize(
    ("path", "name", "other"),
    [("bin/amp-fx", "amp-fx", "python -m amp_fx"), ("amp_fx/__main__.py", "python -m amp_fx", "amp-fx")],
)
def test_a_program_calls_itself_by_the_name_it_was_started_by(
    saved: dict[str, str],
    path: str,
    name: str,
    other: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", [path])
    said = []
    for arguments in (
        ["nonsense"],
        ["explain", "--help"],
        ["explain", "user_models:build", "--options", '{"profile": "none.json"}'],
    ):
        with contextlib.suppress(SystemExit):
            assert main(arguments) == 1
        said.append(capsys.readouterr())
    usage, help_, hint = said
    assert usage.err.startswith(f"usage: {name} ")
    assert help_.out.count(f"\n  {name} explain train:build") == 4
    assert f"`{name} profile -o FILE`" in hint.err
    assert not any(other in each.out + each.err for each in said)


@pytest.mark.parametrize(
    "argv",
    [
        ["explain", "user_models:build", "-o", "missing/report.json"],
        ["explain", "user_models:build", "-o", "report.txt"],
        ["draw", "user_models:build", "-o", "folder"],
        ["histogram", "user_models:with_loss", "-o", "missing/figure.png"],
        ["compare", "user_models:build", "-o", "missing/compared.html"],
        ["compare", "user_models:build", "-o", "compared.txt"],
        ["calibrate", "user_models:with_loss", "--plan", "missing/plan.json"],
        ["export", "user_models:build", "-o", "missing/model.pt2"],
    ],
    ids=" ".join,
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "folder").mkdir()
    assert Path(argv[-1]).name in error_of(capsys, *argv)
    assert "user_models" not in sys.modules


def test_targets_have_a_line_each_and_profiles_that_can_be_used(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["targets"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["target", "architecture", "SMs", "memory", "bandwidth", "float32", "bfloat16"]
    assert [line.split()[0] for line in lines] == list(TARGETS)
    assert any("cuda:h100" in line and "sm_90" in line and "3350 GB/s" in line for line in lines)
    assert main(["targets", "--json"]) == 0
    for row in json.loads(capsys.readouterr().out):
        assert DeviceProfile.from_dict(row["profile"]) == TARGETS[row["name"]].profile


def test_the_program_finds_modules_in_the_working_directory_and_a_reader_may_have_seen_enough() -> None:
    command = [Path(sys.executable).with_name("amp-fx"), "histogram", "user_models:with_loss", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 0
