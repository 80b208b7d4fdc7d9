"""``amp-fx``: models by name or file, what each command writes, JSON, exit codes, one-line errors."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import amp_fx
from amp_fx import Plan, Report
from amp_fx.cli import main
from amp_fx.cli.inputs import literal, paint
from amp_fx.instruments.targets import TARGETS
from amp_fx.precision.placement.profile import DeviceProfile
from amp_fx.precision.plans.sensitivity import Sensitivity

SLOW = DeviceProfile("slow", "cpu", {"float32": 1e11, "bfloat16": 1e10, "float16": 1e10}, 1e10, 1e-6)
MODULE = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.5), nn.Linear(16, 4)), torch.randn(6, 16)

def one():
    return nn.Linear(16, 16), (torch.randn(1, 16),), {}

def batches():
    return [(torch.randn(6, 16),) for _ in range(2)]

def loss(outputs):
    return outputs.square().mean()

class Squared(nn.Linear):
    def forward(self, x):
        return super().forward(x).square().mean()

def with_loss():
    return Squared(4, 1), (), {"x": torch.randn(3, 4)}

def spoiled():
    from support.models import spoiled_by_low_dtypes
    return spoiled_by_low_dtypes.kelvin(), torch.randn(4, 32, 64)
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
    torch._dynamo.reset()
    folder = tmp_path_factory.mktemp("reports")
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4)), torch.randn(6, 16)
    reports = {name: amp_fx.explain(model, x, options={"profile": name}) for name in ("auto", "off")}
    return {name: str(report.save(folder / f"{name}.json")) for name, report in reports.items()}


def run(*argv: str, code: int = 0) -> tuple[str, str]:
    """What a command prints, and what it writes to stderr."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            found = main(argv)
        except SystemExit as exit:
            found = exit.code
    assert found == code
    return out.getvalue(), err.getvalue()


def read(*argv: str) -> Any:
    return json.loads(run(*argv, "--json")[0])


def error_of(*argv: str) -> str:
    """The one line that a command fails with."""
    out, err = run(*argv, code=1)
    assert (out, err[:7], err.count("\n")) == ("", "error: ", 1)
    return err


def test_a_model_is_explained_by_its_name_with_options_as_reports_print_them() -> None:
    written = "--table", "-o", "r.json", "-o", "r.md"
    printed = run("explain", "user_models:build", "--options", "options={'profile': 'off'}", *written)
    report = Report.load("r.json")
    assert printed == (f"{report}\n\n{report.table()}\n", "wrote r.json\nwrote r.md\n")
    assert report.shares()["bfloat16"]["flops"] == 1.0
    assert Path("r.md").read_text() == report.to_markdown()


def test_a_pt2_file_is_explained() -> None:
    program = torch.export.export(nn.Sequential(nn.Linear(16, 4)), (torch.randn(6, 16),))
    torch.export.save(program, "model.pt2")
    data = read("explain", "model.pt2", "--options", '{"profile": "off"}')
    assert data["summary"]["shares"]["bfloat16"]["flops"] == 1.0


def test_reports_are_read_instead_of_models(saved: dict[str, str]) -> None:
    assert read("explain", saved["off"]) == Report.load(saved["off"]).to_dict()
    assert "options are for a MODEL" in error_of("explain", saved["off"], "--options", '{"strict": true}')


def test_two_reports_are_compared(saved: dict[str, str]) -> None:
    expected = Report.load(saved["auto"]).diff(Report.load(saved["off"]))
    assert run("diff", saved["auto"], saved["off"]) == (f"{expected}\n", "")
    assert "0 linear (forward): float32 -> bfloat16" in str(expected)
    assert read("diff", saved["auto"], saved["off"]) == expected.to_dict()


def test_a_picture_is_drawn_and_marks_what_changed(saved: dict[str, str]) -> None:
    assert run("draw", saved["off"], "-o", "new.html")[0] == "wrote new.html\n"
    assert read("draw", saved["off"], "--against", saved["auto"], "-o", "both.html") == {"path": "both.html"}
    first_line = escape(str(Report.load(saved["auto"]).diff(Report.load(saved["off"]))).splitlines()[0])
    assert first_line in Path("both.html").read_text()
    assert first_line not in Path("new.html").read_text()
    assert "valid suffixes: .html" in error_of("draw", saved["off"], "-o", "picture.jpg")


def test_a_picture_has_as_many_levels_of_modules_as_asked_for(saved: dict[str, str]) -> None:
    drawn = {}
    for depth in ("1", "2", "all"):
        run("draw", saved["off"], "-o", "x.dot", "--depth", depth)
        drawn[depth] = Path("x.dot").read_text(encoding="utf-8")
    run("draw", saved["off"], "-o", "x.dot")
    assert len(drawn["1"]) < len(drawn["2"]) <= len(drawn["all"])
    assert Path("x.dot").read_text(encoding="utf-8") in drawn.values()
    for bad in ("0", "-1", "whole"):
        assert bad in run("draw", "user_models:with_loss", "--depth", bad, code=2)[1]


def test_gradients_are_counted() -> None:
    out, _ = run("histogram", "user_models:build", "--loss", "user_models:loss", "-o", "numbers.json")
    assert f"= {json.loads(Path('numbers.json').read_text())['loss_scale']:.0f}:" in out
    assert read("histogram", "user_models:with_loss")["modules"].keys() == {""}
    for more in ([], ["--loss", "torch:positive"]):
        error = error_of("histogram", "user_models:build", *more)
        assert "no loss: it should be a tensor with one element, got a tensor of shape (6, 4)." in error
        assert "--loss package.module:callable" in error


def test_a_program_is_exported_with_its_report_in_evaluation_mode() -> None:
    options = "--dynamic-batch --profile off --dtype float16 --low-io"
    out, _ = run("export", "user_models:build", "-o", "model.pt2", *options.split())
    assert re.search(r"wrote model.pt2, \d+\.\d MB: its weights take 0.50 of", out)
    files = {"amp_fx.json": ""}
    module = torch.export.load("model.pt2", extra_files=files).module()
    assert Plan.from_json(files["amp_fx.json"]).ops_by_dtype()["linear"] == {"float16": 2}
    x = torch.randn(5, 16).half()
    assert module(x).dtype is torch.float16
    # no dropout
    assert torch.equal(module(x), module(x))
    assert re.search(r"\(1, 16\).*at least 2", error_of("export", "user_models:one", "--dynamic-batch"))


def test_what_no_runtime_loads_is_named() -> None:
    onnx = pytest.importorskip("onnx")
    error = onnx.checker.ValidationError("Scale has inconsistent type")
    with mock.patch.object(onnx.checker, "check_model", side_effect=error):
        _, said = run("export", "user_models:one", "--dtype", "float16", "--onnx", code=1)
    assert "Scale has inconsistent type" in said


def test_sensitivity_a_plan_and_a_figure_are_calibrated() -> None:
    command = ["calibrate", "user_models:build", "--no-verify", "--profile", "off"]
    assert "no loss" in error_of(*command)
    command += ["--loss", "user_models:loss", "--batches", "user_models:batches", "-o", "found.json"]
    written = "--plan plan.json --figure frontier.svg --budget 0.5 --minimise bytes"
    out, err = run(*command, *written.split())
    assert "Sequential in bfloat16: 3 calls, graphs: 1, batches: 2" in out
    assert max(map(len, out.splitlines())) <= 100
    assert "memory traffic [MB]" in out
    assert "all calls stay in fp32: nothing is gained; the next plan gains, at plan(error=" in out
    assert "wrote plan.json" in err
    assert Sensitivity.load("found.json").dtype is torch.bfloat16
    assert json.loads(Path("plan.json").read_text())["nodes"]
    assert Path("frontier.svg").stat().st_size > 5_000
    assert "what policy fp8 adds (rowwise)" in run(*command, "--policy", "fp8", "--fp8", "rowwise")[0]
    assert Sensitivity.load("found.json").level == "rowwise"


@pytest.mark.usefixtures("without_inductor")
def test_the_module_that_spoils_a_run_is_named() -> None:
    options = "--loss user_models:loss --options {'profile':'off'}"
    command = ["compare", "user_models:spoiled", *options.split()]
    assert read(*command, "-o", "found.dot")["culprit"] == "attend"
    assert Path("found.dot").exists()
    assert "'nothing'" in error_of(*command, "--against", "nothing")


def test_errors_of_the_operating_system_are_told_in_words(saved: dict[str, str]) -> None:
    assert "there is no file 'none.json'." in error_of("diff", saved["off"], "none.json")
    assert "there is no file 'no.json'." in error_of("draw", saved["off"], "--against", "no.json")
    Path("folder.json").mkdir()
    assert error_of("explain", "folder.json") == "error: 'folder.json': Is a directory.\n"


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("user_models", "'user_models'"),
        ("no_such_module:build", "'no_such_module'"),
        ("user_models:buidl", "'build'"),
        ("builtins:int", "(model, args)"),
        # a path of a module is taken as its name
        ("user_models.py:nothing", "no callable 'nothing'"),
        ("none.pt2", "'none.pt2'"),
        ("user_models.py.pt2", "torch.export.save"),
        ("none.json", "'none.json'"),
        ("nowhere/none.json", "'nowhere'"),
        ('user_models:build --options {"polcy":1}', "'policy'"),
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning:torch.export")
def test_a_model_that_is_not_there_or_a_wrong_option_is_told_in_one_line(argv: str, named: str) -> None:
    Path("user_models.py.pt2").write_text("no archive")
    assert named in error_of("explain", *argv.split())


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        ("explain", "MODEL"), ("diff a.json", "AFTER"), ("nonsense", "'nonsense'"),
        ("exlpain m:f", "'explain'"), ("explain m:f --options 3", "'3'"), ("explain m:f -x", "-x"),
        ("profile --seconds 0", "positive"), ("profile --seconds x", "'x'"), ("profile --device tpu", "'tpu'"),
    ],
)  # fmt: skip
def test_wrong_usage_exits_with_2(argv: str, named: str) -> None:
    _, error = run(*argv.split(), code=2)
    assert "usage: " in error
    assert named in error


def test_alone_it_lists_its_commands() -> None:
    text, _ = run()
    assert [word for word in ("explain", "calibrate", "export", "env") if word not in text] == []


def test_env_says_what_is_here_and_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read("env")
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu"]["threads"] == torch.get_num_threads()
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("amp_fx.instruments.environment.builtin", lambda device: SLOW)
    text, _ = run("env")
    assert max(map(len, text.splitlines())) <= 113
    assert f"torch {torch.__version__}" in text
    for follows in (
        "graphs stay in fp32",
        "policy='int8' means 'autocast'",
        "install g++",
        "apt install graphviz",
    ):
        assert follows in text


def test_env_imports_nothing_that_only_compiling_takes() -> None:
    # each takes as long as all of amp_fx, or longer
    command = [sys.executable, "-X", "importtime", "-m", "amp_fx", "env"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "amp_fx.instruments.environment" in found
    assert found.isdisjoint({"torch._dynamo", "torch._inductor", "networkx", "triton"})


def test_no_help_text_points_elsewhere() -> None:
    for command in (
        "explain",
        "draw",
        "histogram",
        "diff",
        "compare",
        "calibrate",
        "export",
        "env",
        "targets",
        "profile",
    ):
        text, _ = run(command, "--help")
        assert "see below" not in text
        # an option whose whole help is its default
        assert not re.search(r"[}A-Z]\s+default: \w+$", text, re.MULTILINE)


def test_a_plan_of_int8_is_exported() -> None:
    policy = '{"base": "int8", "rules": [{"op": "linear", "precision": "int8"}]}'
    options = json.dumps({"policy": json.loads(policy), "profile": "off"})
    with torch.no_grad():
        run("explain", "user_models:build", "--options", options, "-o", "plan.json")
    run("export", "user_models:build", "-o", "planned.pt2", "--plan", "plan.json")
    run(
        "export",
        "user_models:build",
        "-o",
        "asked.pt2",
        "--policy",
        policy,
        "--int8",
        "int8_signed",
        "--profile",
        "off",
    )
    for name in ("planned.pt2", "asked.pt2"):
        state = torch.export.load(name).state_dict
        assert any(value.dtype is torch.int8 for value in state.values())
    run("export", "user_models:build", "-o", "eager.pt2", "--numerics", "eager")
    assert "numerics" in error_of("export", "user_models:build", "--numerics", "eager", "--policy", "int8")


@pytest.mark.parametrize("command", ["explain", "draw", "histogram", "diff"])
def test_help_has_examples_that_parse(command: str) -> None:
    text, _ = run(command, "--help")
    assert "package.module:callable" in text
    assert text.count(f"python -m amp_fx {command} ") >= 3


def test_options_are_read_as_json_and_as_reports_print_them() -> None:
    for text in ('{"dtype": "float16"}', "{'dtype': 'float16'}", "options={'dtype': 'float16'}"):
        assert literal(text) == {"dtype": "float16"}


@pytest.mark.parametrize(
    ("environment", "terminal", "heading"),
    [
        ({}, True, "\033[1mheading\033[0m"), ({}, False, "heading"),
        ({"NO_COLOR": "1"}, True, "heading"), ({"TERM": "dumb"}, True, "heading"),
    ],
)  # fmt: skip
def test_colours_are_for_terminals_that_want_them(environment: Any, terminal: bool, heading: str) -> None:
    stream: Any = SimpleNamespace(isatty=lambda: terminal)
    with mock.patch.dict(os.environ, {"NO_COLOR": "", "TERM": "", **environment}):
        assert paint("heading\n  row", stream) == f"{heading}\n  row"


@pytest.mark.parametrize(
    ("path", "name", "other"),
    [("bin/amp-fx", "amp-fx", "python -m amp_fx"), ("amp_fx/__main__.py", "python -m amp_fx", "amp-fx")],
)
def test_a_program_calls_itself_by_the_name_it_was_started_by(path: str, name: str, other: str) -> None:
    for arguments, code, said, times in (
        ("nonsense", 2, f"usage: {name} ", 1),
        ("explain --help", 0, f"\n  {name} explain train:build", 4),
        ('explain user_models:build --options {"profile":"none.json"}', 1, f"`{name} profile -o FILE`", 1),
    ):
        with mock.patch.object(sys, "argv", [path]):
            text = "".join(run(*arguments.split(), code=code))
        assert text.count(said) == times
        assert other not in text


@pytest.mark.parametrize(
    ("command", "files"),
    [
        ("explain", "-o missing/report.json"), ("explain", "-o report.txt"), ("draw", "-o folder"),
        ("histogram", "-o missing/figure.png"), ("calibrate", "--plan missing/plan.json"),
        ("compare", "-o missing/compared.html"), ("compare", "-o compared.txt"),
        ("export", "-o missing/model.pt2"), ("export", "-o model.bin"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_written_is_refused_before_the_work(command: str, files: str) -> None:
    Path("folder").mkdir()
    assert Path(files.split()[-1]).name in error_of(command, "user_models:with_loss", *files.split())
    assert "user_models" not in sys.modules


def test_targets_have_a_line_each_and_profiles_that_can_be_used() -> None:
    head, *lines = (" ".join(line.split()) for line in run("targets")[0].splitlines())
    assert head == "target architecture SMs memory bandwidth float32 bfloat16"
    assert [line.split()[0] for line in lines] == list(TARGETS)
    assert "cuda:h100 sm_90 132 80 GB 3350 GB/s 67 TFLOP/s 989 TFLOP/s" in lines
    for row in read("targets"):
        assert DeviceProfile.from_dict(row["profile"]) == TARGETS[row["name"]].profile


def test_the_program_finds_modules_in_the_working_directory_and_a_reader_may_have_seen_enough() -> None:
    command = [Path(sys.executable).with_name("amp-fx"), "histogram", "user_models:with_loss", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stderr
        process.stdout.close()
        assert (process.stderr.read(), process.wait()) == (b"", 0)
