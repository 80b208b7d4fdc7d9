"""What a user's own code raises is told in one line with its place, and inputs go to the arguments that they are."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import amp_fx
from amp_fx import AmpFxError, InputError
from amp_fx.cli import main
from amp_fx.cli.inputs import Loaded
from amp_fx.errors import ExportError

MODULE = """
import torch
from torch import nn

class Net(nn.Linear):
    def forward(self, x, *, scale=1.0):
        return super().forward(x * scale).square().mean()

class Guarded(nn.Linear):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x

def wide():
    return Net(4, 1), torch.randn(3, 5)

def both():
    return Net(4, 1), torch.randn(3, 4), {"scale": 0.5}

def guarded():
    return Guarded(4, 4), torch.randn(3, 4)

def nothing():
    return Net(4, 1), ()

def without_file():
    raise ValueError("no checkpoint")

def loss(returned):
    return returned["loss"]

number = 3
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "own_models.py").write_text(MODULE)
    (tmp_path / "not_python.py").write_text("def f(:")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    yield
    sys.modules.pop("own_models", None)


_WRONG = r"cannot be called with \(float32\[3, 5\]\): RuntimeError: .*3x5 and 4x1.* \[own_models\.py:7\]"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        *((f"{command} ../own_models.py:wide", _WRONG) for command in ("explain", "histogram", "calibrate", "export")),
        ("calibrate ../own_models.py:wide --of outputs", _WRONG),
        ("export ../own_models.py:guarded", r"torch\.export.* fails .*\[own_models\.py:11\]"),
        *((f"{command} ../own_models.py:nothing", r"Net takes \(x, .*not \(\)") for command in ("histogram", "export")),
        ("explain ../own_models.py:without_file", r"ValueError: no checkpoint \[own_models\.py:26\]"),
        ("explain ../own_models.py:number", "no callable 'number'.$"),
        ("explain ../not_python.py:f", r"SyntaxError: .*not_python\.py, line 1\)\.$"),
        ("explain ../none.py:f", r"no file '\.\./none\.py'"),
        ("histogram ../own_models.py:both --loss own_models:loss", r"Tensor: IndexError: .*\[own_models\.py:29\]"),
        ("histogram own_models:both -o figure.doc", r"'figure\.doc'.*\.png"),
        ("calibrate own_models:both --figure figure.doc", r"'figure\.doc'.*\.png"),
        ("profile -o missing/here.json", "no folder 'missing'"),
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")
def test_what_is_wrong_with_a_users_model_is_told_in_one_line(
    argv: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv.split()) == 1
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    with pytest.raises(AssertionError, match=told):
        raise AssertionError(error)
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("budget", ["x", "-1", "nan"])
def test_a_budget_that_is_none_is_wrong_usage(budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "own_models:both", f"--budget={budget}"])
    assert f"'{budget}' is not autocast, or a number from 0 on" in capsys.readouterr().err


def test_inputs_of_a_call_by_position_and_by_name_are_one_batch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", "../own_models.py:both", "--profile", "off"]) == 0
    assert "Net in bfloat16" in capsys.readouterr().out
    # ``compare`` has an option of that name
    assert main(["explain", "../own_models.py:both"]) == 0

    class Mixed(nn.Module):
        def forward(self, first: Tensor, *more: Tensor, scale: float = 1.0, **others: Tensor) -> Tensor:
            return first

    x = torch.ones(2)
    named = Loaded(Mixed(), (x,), {"scale": 2.0, "mask": x})
    assert named.batch("calibrate") == {"first": x, "scale": 2.0, "mask": x}
    assert named.call == (({"first": x, "scale": 2.0, "mask": x},), {})
    unnamed = Loaded(Mixed(), (x, x), {"scale": 2.0})
    assert unnamed.call == ((x, x), {"scale": 2.0})
    with pytest.raises(AmpFxError, match="name for each"):
        unnamed.batch("calibrate")


def test_a_model_that_fails_by_itself_is_an_input_error_and_others_are_raised_as_they_are() -> None:
    with pytest.raises(InputError, match=r"float32\[3, 5\]") as caught:
        amp_fx.export(nn.Linear(4, 1), (torch.randn(3, 5),))
    assert isinstance(caught.value.__cause__, RuntimeError)
    norm = nn.BatchNorm1d(5)
    with pytest.raises(InputError):
        amp_fx.export(nn.Sequential(norm, nn.Linear(4, 1)), (torch.randn(3, 5),))
    assert norm.num_batches_tracked == 0
    with pytest.raises(ExportError, match=r"torch\.export\.export\(.* fails"):
        amp_fx.export(nn.Linear(4, 1), (torch.randn(3, 4),), dynamic_shapes=({0: torch.export.Dim("d")}, {}))
